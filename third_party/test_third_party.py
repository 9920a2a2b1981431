"""Unmodified libraries for torch.distributed.rpc, on Backhaul: `make third-party`.

The programs use the libraries as documented, and must get the same results on Backhaul as on torch's RPC.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PATIENCE = 240.0

pytestmark = pytest.mark.timeout(600)


def found(*argv: str) -> list[dict[str, Any]]:
    """The output of a program that ended with 0. No process is left behind in any case."""
    program = subprocess.Popen(
        [sys.executable, *argv],
        cwd=HERE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = program.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        output, errors = program.communicate()
        pytest.fail(f"not over after {PATIENCE:.0f} s:\n{output}{errors}")
    assert program.returncode == 0, output + errors
    return sorted((json.loads(line) for line in output.splitlines() if line.startswith("{")), key=str)


@pytest.mark.parametrize("program", ["geometric_program.py", "rl_program.py buffer", "rl_program.py sync"])
def test_a_library_on_backhaul_and_on_torch(program: str) -> None:
    ours = found("-m", "backhaul.dropin", *program.split())
    theirs = found(*program.split())
    assert ours
    for line in ours:
        assert line.pop("agent") == "backhaul.dropin.rpc.agent"
    for line in theirs:
        assert line.pop("agent") == "torch._C._distributed_rpc"
    assert sorted(ours, key=str) == sorted(theirs, key=str)


def test_collectors_that_do_not_wait_for_each_other() -> None:
    """The parameters of a batch depend on which collector is first."""
    (line,) = found("-m", "backhaul.dropin", "rl_program.py", "async")
    assert line["agent"] == "backhaul.dropin.rpc.agent"
    assert [count for count, _ in line["batches"]] == [20, 20, 20]
