"""Run torch's own RPC suites on Backhaul, or on torch itself, and compare with what is expected.

    python conformance/run.py                       all of them, on Backhaul
    python conformance/run.py RpcTest 'DistAutogradTest.test_back*'
    python conformance/run.py --on torch            the same on torch.distributed.rpc

Each test runs in its own process tree with a time limit. ``not_passing.txt`` lists those that do not pass on Backhaul,
each under its reason. The run fails if a listed test passes or an unlisted one fails. An unlisted test that fails is
run once more, alone, because some have their own races, in torch's process groups for example. The output shows tests
that pass only then.
"""

from __future__ import annotations

import argparse
import faulthandler
import fnmatch
import io
import json
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
LIST = HERE / "not_passing.txt"


class Outcome(NamedTuple):
    """How one test went: ``passed``, ``failed``, ``skipped`` or ``timeout``."""

    test: str
    how: str
    seconds: float
    output: str


def expected() -> dict[str, str]:
    """The tests listed as not passing, with their reasons."""
    found: dict[str, str] = {}
    reason = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("#"):
            reason = line[1:].strip()
        elif line.strip():
            found[line.strip()] = reason
    return found


def run_here(suite: type[unittest.TestCase], test: str) -> str:
    """Run one test in this process, from which its ranks are forked."""
    stream = io.StringIO()
    result = unittest.TextTestRunner(stream=stream, verbosity=2).run(suite(test))
    print(stream.getvalue(), flush=True)
    if result.skipped:
        return "skipped"
    return "passed" if result.wasSuccessful() and result.testsRun else "failed"


def start(suite: type[unittest.TestCase], test: str, output: Path) -> int:
    """Fork a process, the leader of its own group, that runs one test. Returns its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setpgid(0, 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ["TMPDIR"] = str(output.parent)
        tempfile.tempdir = str(output.parent)
        faulthandler.enable()
        code = {"passed": 0, "skipped": 77}.get(run_here(suite, test), 1)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end(pid: int) -> None:
    """Kill the whole process tree of a test: the group whose leader this process has forked."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run_all(
    suites: dict[str, type[unittest.TestCase]], tests: Iterable[str], jobs: int, limit: float
) -> Iterator[Outcome]:
    """Run tests, ``jobs`` at a time."""
    todo = list(reversed(list(tests)))
    running: dict[int, tuple[str, float, Path]] = {}
    with tempfile.TemporaryDirectory() as folder:
        while todo or running:
            while todo and len(running) < jobs:
                name = todo.pop()
                suite, test = name.split(".")
                place = Path(folder) / name
                place.mkdir()
                running[start(suites[suite], test, place / "output")] = name, time.monotonic(), place / "output"
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                for other, (_, began, output) in running.items():
                    if time.monotonic() - began > limit and not output.with_suffix(".late").exists():
                        output.with_suffix(".late").touch()
                        end(other)
                time.sleep(0.005)  # waitpid has no timeout
                continue
            if pid not in running:
                continue
            name, began, output = running.pop(pid)
            end(pid)
            code = os.waitstatus_to_exitcode(status)
            late = output.with_suffix(".late").exists()
            how = "timeout" if late else {0: "passed", 77: "skipped"}.get(code, "failed")
            yield Outcome(name, how, time.monotonic() - began, output.read_text(errors="replace"))


def matching(tests: list[str], patterns: list[str]) -> list[str]:
    if not patterns:
        return tests
    chosen = [t for t in tests if any(fnmatch.fnmatch(t, p) or fnmatch.fnmatch(t, f"{p}.*") for p in patterns)]
    if not chosen:
        sys.exit(f"no test matches {' '.join(patterns)}")
    return chosen


def table(outcomes: list[Outcome], listed: dict[str, str]) -> str:
    """A table of the suites: how many tests passed, failed and were skipped."""
    lines = ["| suite | tests | pass | listed | skipped | else |", "|---|---|---|---|---|---|"]
    suites = list(dict.fromkeys(outcome.test.split(".")[0] for outcome in outcomes))
    for suite in [*suites, "all"]:
        mine = [each for each in outcomes if suite in ("all", each.test.split(".")[0])]
        passed = sum(each.how == "passed" for each in mine)
        skipped = sum(each.how == "skipped" for each in mine)
        known = sum(each.how in ("failed", "timeout") and each.test in listed for each in mine)
        lines.append(
            f"| {suite} | {len(mine)} | {passed} | {known} | {skipped} | {len(mine) - passed - known - skipped} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", help="Suite, Suite.test, with * and ?; all if there is none")
    parser.add_argument("--on", choices=["backhaul", "torch"], default="backhaul")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each test")
    parser.add_argument("--json", type=Path, help="write all outcomes, with the output of those that fail")
    parser.add_argument("--verbose", action="store_true", help="show the output of tests that fail")
    given = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.on == "backhaul":
        import backhaul.dropin

        backhaul.dropin.install()
    sys.path.insert(0, str(HERE))
    import suites as theirs

    found = theirs.load()
    chosen = matching(theirs.tests(found), given.patterns)
    listed = expected() if given.on == "backhaul" else {}
    outcomes: list[Outcome] = []
    wrong: list[str] = []
    again: list[str] = []
    for outcome in chain(run_all(found, chosen, given.jobs, given.limit), run_all(found, again, 1, given.limit)):
        good = outcome.how in ("passed", "skipped")
        second = outcome.test in again
        if not good and not second and given.on == "backhaul" and outcome.test not in listed:
            again.append(outcome.test)
            print(f"{outcome.how:8} {outcome.seconds:5.1f} s  {outcome.test}   to be run once more", flush=True)
            continue
        outcomes.append(outcome)
        mark = "   the second time" if second else ""
        if good and outcome.test in listed:
            mark = "   but it is listed as not passing"
            wrong.append(outcome.test)
        elif not good and given.on == "backhaul" and outcome.test not in listed:
            mark = "   and it is not listed"
            wrong.append(outcome.test)
        print(f"{outcome.how:8} {outcome.seconds:5.1f} s  {outcome.test}{mark}", flush=True)
        if given.verbose and not good:
            print(outcome.output, flush=True)
    if given.json:
        given.json.write_text(
            json.dumps(
                [each._asdict() if each.how != "passed" else {**each._asdict(), "output": ""} for each in outcomes]
            )
        )
    unknown = sorted(set(listed) - set(theirs.tests(found)))
    print(table(outcomes, listed))
    for test in unknown:
        print(f"{LIST.name} lists {test}, which does not exist")
    if wrong or unknown:
        print(f"{LIST.name} is wrong about {len(wrong) + len(unknown)} tests")
    return 1 if wrong or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
