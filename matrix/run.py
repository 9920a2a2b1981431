"""Run the tests with several Pythons and releases of torch, and print a table of what passed.

    python matrix/run.py                              the pairs that docs/versions.md lists
    python matrix/run.py --pairs 3.12:2.11.0 3.13:2.15.0
    python matrix/run.py --sets pure                  only some of the tests; see SETS
    python matrix/run.py --index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple
    python matrix/run.py --stub-cuda                  PyPI's torch without gigabytes of CUDA's libraries; needs gcc
    python matrix/run.py -- -x -k sparse              what follows goes to pytest

Each pair has its own environment in .venv-matrix/, which is made once. A pair without an interpreter or a torch is
shown as not run, with the reason. The exit status is 0 if at least one pair was run and all tests passed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent))

from environments import FOLDER, ROOT, NotAvailable, Pair, set_up

PAIRS = ["3.10:2.6.0", "3.11:2.8.0", "3.11:2.13.0", "3.12:2.11.0", "3.12:2.15.0", "3.13:2.15.0"]
"""Each Python, the oldest torch and the newest, and some between."""

SETS: dict[str, list[str]] = {
    # Neither threads nor sockets: bytes, trees, the walk over torch's graph.
    "pure": [
        "tests/test_compat.py",
        "tests/test_matrix.py",
        "tests/test_errors.py",
        "tests/wire/test_decoder.py",
        "tests/wire/test_[!d]*.py",  # without fuzzing
        "tests/autograd/test_completion.py",
        "tests/autograd/test_graph.py",
        "tests/autograd/test_schedule.py",
    ],
    # Several workers in one process.
    "workers": [
        "tests/test_compile.py",
        "tests/agent/test_future.py",
        "tests/agent/test_steps.py",
        "tests/calls/test_autocast.py",
        "tests/calls/test_calls.py",
        "tests/autograd/test_adversarial_programs.py",
        "tests/autograd/test_exact_[ekl]*.py",
        "tests/autograd/test_gradients.py",
        "tests/autograd/test_joint_hooks.py",
        "tests/autograd/test_node_hooks.py",
        "tests/autograd/test_silent_mistakes.py",
        "tests/autograd/test_subclasses.py",
        "tests/checkpoint/test_checkpoint_kinds.py",
        "tests/nn/test_remote_module.py",
        "tests/optim/test_optim_classes.py",
        "tests/optim/test_optim_scaler.py",
        "tests/security/test_exposure.py",
        "tests/seeing/test_blocking.py",
    ],
    # Real processes: FSDP, DDP and tensor parallelism inside workers, torch's profilers, the drop-in.
    "processes": [
        "tests/autograd/test_parallel.py",
        "tests/dropin",
        "tests/test_remote_profile.py",
    ],
}
"""The tests in which torches and Pythons differ most. ``--sets all`` is every test that is not slow: half an hour."""


class Outcome(NamedTuple):
    """The outcome of a pair's tests; ``why`` says why they were not run at all."""

    pair: Pair
    why: str = ""
    counts: Mapping[str, int] = MappingProxyType({})
    failures: Sequence[str] = ()
    skips: Sequence[str] = ()
    seconds: float = 0

    @property
    def passed(self) -> bool:
        return bool(self.counts.get("passed")) and not self.counts.get("failed")


def main(argv: Sequence[str]) -> int:
    """Run what the command line requests. Returns the exit status."""
    argv, for_pytest = _split(argv)
    options = _parser().parse_args(argv)
    pip_args = [word for name in ("index_url", "extra_index_url") for word in _flag(name, getattr(options, name))]
    tests = files(options.sets)
    outcomes: list[Outcome] = []
    for pair in options.pairs:
        try:
            python = set_up(pair, pip_args, stubs=options.stub_cuda, install=not options.no_install)
            outcome = run(pair, python, [*tests, *for_pytest])
        except NotAvailable as error:
            outcome = Outcome(pair, str(error))
        outcomes.append(outcome)
        print(row(outcome), flush=True)
    print("\n" + table(outcomes, options.sets))
    return 0 if is_good(outcomes) else 1


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _flag(name: str, value: str | None) -> list[str]:
    return [] if value is None else [f"--{name.replace('_', '-')}", value]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the tests with several Pythons and releases of torch.")
    pairs = [Pair.parse(pair) for pair in PAIRS]
    parser.add_argument("--pairs", nargs="+", type=Pair.parse, default=pairs, help="such as 3.12:2.11.0")
    parser.add_argument("--sets", nargs="+", choices=[*SETS, "all"], default=list(SETS), help="which tests")
    parser.add_argument("--index-url", help="for pip")
    parser.add_argument("--extra-index-url", help="for pip")
    parser.add_argument("--stub-cuda", action="store_true", help="install stubs in the place of CUDA's libraries")
    parser.add_argument("--no-install", action="store_true", help="run only the environments that are there")
    return parser


def files(sets: Iterable[str]) -> list[str]:
    """The files and folders of some sets. Raises ValueError if a pattern matches nothing: a test may be renamed."""
    found: list[str] = []
    for pattern in (pattern for name in sets for pattern in SETS.get(name, ["tests"])):
        here = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
        if not here:
            raise ValueError(f"there is no test {pattern}: correct SETS in matrix/run.py")
        found += here
    return found


def run(pair: Pair, python: Path, arguments: Sequence[str]) -> Outcome:
    """Run pytest in the environment of a pair. Its output goes into a file next to the environment."""
    report = FOLDER / f"{pair.folder.name}.xml"
    report.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}", *arguments]
    began = time.monotonic()
    with (FOLDER / f"{pair.folder.name}.log").open("w") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        # pip compiles nothing, so each process of a test would compile torch again.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode
    seconds = time.monotonic() - began
    if not report.exists():
        return Outcome(pair, f"pytest ended with {status}: see {log.name}", seconds=seconds)
    return read(pair, report.read_text(), seconds)


def read(pair: Pair, report: str, seconds: float) -> Outcome:
    """An outcome from the report that pytest writes."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    skips: list[str] = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        bad, skip = [*case.iter("failure"), *case.iter("error")], case.find("skipped")
        how = "failed" if bad else "passed" if skip is None else "skipped"
        counts[how] += 1
        if bad:
            failures.append(f"{name}: {(bad[0].get('message') or '').splitlines()[0][:160]}")
        if skip is not None:
            skips.append(str(skip.get("message")))
    return Outcome(pair, "", counts, failures, skips, seconds)


def row(outcome: Outcome) -> str:
    """One line of the table."""
    start = f"| {outcome.pair.python} | {outcome.pair.torch} |"
    if outcome.why:
        return f"{start} not run: {outcome.why} | | |"
    return start + "".join(f" {outcome.counts.get(how, 0)} |" for how in ("passed", "failed", "skipped"))


def table(outcomes: Sequence[Outcome], sets: Iterable[str]) -> str:
    """The table as Markdown; below it each failed test, and why tests were skipped."""
    lines = [f"Sets: {', '.join(sets)}", ""]
    lines += ["| Python | torch | passed | failed | skipped |", "|---|---|---|---|---|"]
    lines += [row(outcome) for outcome in outcomes]
    for outcome in outcomes:
        title = f"Python {outcome.pair.python}, torch {outcome.pair.torch}"
        if outcome.failures:
            lines += ["", f"{title}, failed:", *(f"  {failure}" for failure in outcome.failures)]
        if outcome.skips:
            reasons = Counter(outcome.skips).most_common()
            lines += ["", f"{title}, skipped:", *(f"  {count} {reason}" for reason, count in reasons)]
    return "\n".join(lines)


def is_good(outcomes: Sequence[Outcome]) -> bool:
    """Whether at least one pair was run, and all tests passed."""
    ran = [outcome for outcome in outcomes if not outcome.why]
    return bool(ran) and all(outcome.passed for outcome in ran)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
