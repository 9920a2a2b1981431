"""Run torch's own CUDA tests of RPC on Backhaul, or on torch itself, on a machine with a GPU.

    python conformance/cuda.py [--on torch] [--jobs 4] [PATTERN …]

Importing the suites starts CUDA, and a process that has started CUDA cannot fork. So each test has its own interpreter,
and starts its own ranks. Tests that need more GPUs than available skip themselves.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import os
import signal
import subprocess
import sys
import time
import unittest
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_INTERNAL = "torch.testing._internal.distributed"


def load() -> dict[str, type[unittest.TestCase]]:
    """The suites by name. They are in the main module, where the ranks of a test look for them."""
    utils: Any = importlib.import_module(f"{_INTERNAL}.rpc_utils")
    fixture: Any = importlib.import_module(f"{_INTERNAL}.rpc.tensorpipe_rpc_agent_test_fixture")
    found: dict[str, type[unittest.TestCase]] = {}
    for suite in [*utils.GENERIC_CUDA_TESTS, *utils.TENSORPIPE_CUDA_TESTS]:
        name = suite.__name__
        parts = (suite, fixture.TensorPipeRpcAgentTestFixture, utils.SpawnHelper)
        found[name] = type(name, parts, {"__module__": "__main__"})
        setattr(sys.modules["__main__"], name, found[name])
    return found


def install(on: str) -> None:
    if on == "backhaul":
        import backhaul.dropin

        backhaul.dropin.install()


if __name__ == "__mp_main__":  # a rank of a test
    install(os.environ.get("CONFORMANCE_ON", "backhaul"))
    for _name, _suite in load().items():
        globals()[_name] = _suite


def runnable() -> list[str]:
    """The tests that need no more GPUs than available. A test would take seconds to skip itself."""
    import torch

    loader = unittest.TestLoader()
    here = torch.cuda.device_count()
    return [
        f"{name}.{test}"
        for name, suite in load().items()
        for test in loader.getTestCaseNames(suite)
        if _gpus(getattr(suite, test)) <= here
    ]


def _gpus(test: Any) -> int:
    """How many GPUs a test's ``skip_if_lt_x_gpu`` requires."""
    found = 0
    while test is not None:
        cells = [cell.cell_contents for cell in getattr(test, "__closure__", None) or ()]
        found = max([found, *(each for each in cells if type(each) is int)])
        test = getattr(test, "__wrapped__", None)
    return found


def run_here(test: str) -> int:
    suite, name = test.split(".")
    result = unittest.TextTestRunner(verbosity=2).run(load()[suite](name))
    if result.skipped:
        return 77
    return 0 if result.wasSuccessful() and result.testsRun else 1


def run_apart(test: str, on: str, limit: float) -> tuple[str, str, float, str]:
    began = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--on", on, "--here", test]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        how = {0: "passed", 77: "skipped"}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        how = "timeout"
    return test, how, time.monotonic() - began, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--on", choices=["backhaul", "torch"], default="backhaul")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--limit", type=float, default=90.0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["CONFORMANCE_ON"] = given.on
    if given.here or given.list:
        install(given.on)
    if given.here:
        return run_here(given.here)
    if given.list:
        print("\n".join(runnable()))
        return 0
    command = [sys.executable, __file__, "--on", given.on, "--list"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    chosen = [
        test
        for test in listed
        if not given.patterns or any(fnmatch.fnmatch(test, f"*{each}*") for each in given.patterns)
    ]
    outcomes: list[tuple[str, str]] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for test, how, seconds, output in pool.map(lambda test: run_apart(test, given.on, given.limit), chosen):
            outcomes.append((test, how))
            if how != "skipped":
                print(f"{how:8} {seconds:5.1f} s  {test}", flush=True)
            if given.verbose and how in ("failed", "timeout"):
                print("\n".join(output.splitlines()[-30:]), flush=True)
    for how in ("passed", "failed", "timeout", "skipped"):
        print(how, sum(each == how for _, each in outcomes))
    return 1 if any(how in ("failed", "timeout") for _, how in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
