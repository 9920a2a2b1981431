"""A process may end while one of its worker's threads asks the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PATIENCE = 120.0

# The question is under way when the process ends, and takes a moment longer.
PROGRAM = """
import sys, threading, time
import backhaul.rpc as rpc
from backhaul.worker import current

class Slow:
    def __init__(self, store):
        self.store = store

    def check(self, keys):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            found = self.store.check(keys)
            asked.set()
        return found

    def add(self, key, count):
        self.check([key])
        return self.store.add(key, count)

    def get(self, key):
        return self.store.get(key)

    def renew(self):
        self.check(["group"])

init_method = "tcp://127.0.0.1:0" if WORLD else f"file://{sys.argv[1]}"
rpc.init_rpc("only", rank=0, world_size=WORLD, rpc_backend_options=rpc.RpcOptions(init_method=init_method))
membership = current().agent.membership
asked = threading.Event()
membership._store = store = Slow(membership._store)
PREPARE
threading.Thread(target=lambda: QUESTION, daemon=True).start()
asked.wait()
sys.exit(3)
"""


@pytest.mark.parametrize(
    ("question", "world", "prepare"),
    [
        ("membership._ask_store(lambda: store.check(['group']))", 1, ""),
        ("membership.refresh()", None, ""),
        ("membership.renew_store()", 1, "membership._store_is_gone = membership.store_is_renewable = True"),
    ],
    ids=["a question", "the list of members", "another store"],
)
def test_the_exit_code_is_that_of_the_program(question: str, world: int | None, prepare: str, tmp_path: Path) -> None:
    """Python unwinds the stacks of such threads at the end. torch's code would abort the process then."""
    program = PROGRAM.replace("QUESTION", question).replace("WORLD", str(world)).replace("PREPARE", prepare)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")
