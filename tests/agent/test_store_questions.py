"""A process may end while one of its worker's threads asks the store."""

from __future__ import annotations

import subprocess
import sys

PATIENCE = 120.0

# The question is under way when the process ends, and takes a moment longer.
PROGRAM = """
import sys, threading, time
import backhaul.rpc as rpc
from backhaul.worker import current

rpc.init_rpc("only", rank=0, world_size=1, rpc_backend_options=rpc.RpcOptions(init_method="tcp://127.0.0.1:0"))
membership = current().agent.membership
asked = threading.Event()

def question():
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        membership._store.check(["group"])
        asked.set()

threading.Thread(target=membership._ask_store, args=(question,), daemon=True).start()
asked.wait()
sys.exit(3)
"""


def test_the_exit_code_is_that_of_the_program() -> None:
    """Python unwinds the stacks of such threads at the end. torch's code would abort the process then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stderr) == (3, "")
