"""`make mutants`: break the core in one place at a time, and see whether the tests notice.

Two kinds of mutants. `by_rule.py` changes an operator, a number or a statement of a pure module (`pure.py` lists them
with their unit tests); a sample of each module is tried. `by_hand.py` lists mistakes that an engineer could make in the
modules that run threads, sockets and torch: a lock that is dropped, an order that is swapped, a check that is skipped,
a resource that is not released.

A mutant that no test notices is a survivor: a test is missing, or the code that it broke is not needed, or the mutant
is not a mistake. In the last case an excuse says why. The run fails if a survivor has no excuse, or if fewer than nine
of ten mutants are caught; a mutant by hand that does not apply any more fails it too.

A test that fails for another reason, such as a busy machine, must not pass for one that has noticed a mutant. So the
tests that have noticed mutants by hand run once more without them, and so do those that did not end with a mutant by
rule. A mutant whose test fails then is not judged, and fails the run.

    python tests/mutants/run.py                  all
    python tests/mutants/run.py refs             those with this text in their file, or in what they do
    python tests/mutants/run.py --hand | --rule  one kind only
    python tests/mutants/run.py --each 60 --seed 2   another, larger sample

The rules are those of mutmut and cosmic-ray. Neither tool is used. Cosmic-ray, for example, starts an interpreter for
each mutant, which imports torch for two seconds before the first test, and it changes files of the working tree.
`forked.py` forks from one process that has imported torch, changes no file, and tries several mutants of one module at
a time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from by_hand import MUTANTS
from by_rule import Change, changes_of, sample
from forked import PACKAGE, ROOT, Trial, verdicts
from mutant import Mutant
from pure import EXCUSES, MODULES

ENOUGH = 0.9
_SECONDS = 300
_PASSED = 0
_DID_NOT_END = "a test that did not end"
# A mutant may leave a thread that never ends, or close a descriptor of another's: Python would not exit.
_PYTEST = """
import os, sys, pytest
status = 1
try:
    status = int(pytest.main(sys.argv[1:]))
finally:
    sys.stdout.flush()
    os._exit(status)
"""


class Tally:
    """The outcomes of the mutants so far. Prints each mutant that is not caught."""

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self.caught = 0
        self.survived = 0
        self.wrong = 0
        """Survivors without an excuse, and mutants that do not apply."""

    def add(self, name: str, outcome: str, excuse: str = "", by: str = "") -> None:
        """``by`` is the test that has noticed it."""
        if outcome == "caught":
            self.caught += 1
            if excuse:
                print(f"caught, and needs no excuse: {name}", flush=True)
            elif self._verbose:
                print(f"caught: {name}\n    by {by}", flush=True)
            return
        self.survived += outcome == "survived"
        self.wrong += not (excuse and outcome == "survived")
        print(f"{outcome}: {name}" + (f"\n    ({excuse})" if excuse else ""), flush=True)

    def withdraw(self, name: str, by: str) -> None:
        """A mutant that counted as caught is not judged."""
        self.caught -= 1
        self.wrong += 1
        print(f"not judged: {name}\n    {by} also fails without it", flush=True)

    @property
    def good(self) -> bool:
        return not self.wrong and self.caught >= ENOUGH * (self.caught + self.survived)

    def __str__(self) -> str:
        return f"{self.caught} of {self.caught + self.survived} caught"


def _is_wanted(wanted: Sequence[str], *texts: str) -> bool:
    return not wanted or any(each in text for each in wanted for text in texts)


def _first_failure(output: str, *, in_time: bool = True) -> str:
    """The test that has failed, from pytest's output."""
    if not in_time:
        return _DID_NOT_END
    found = re.search(r"^(?:FAILED|ERROR) (\S.*)$", output, flags=re.MULTILINE)
    return found[1] if found else "a run that failed as a whole"


def by_rule(wanted: Sequence[str], each: int, seed: int, abreast: int, verbose: bool) -> Tally:
    chosen = {file: tests for file, tests in MODULES.items() if _is_wanted(wanted, file)}
    sources = {file: (PACKAGE / file).read_text() for file in chosen}
    takes = _times([Trial(file, sources[file], tests, _SECONDS, None) for file, tests in chosen.items()], abreast)
    trials = [
        Trial(file, change.source, tests, 60 + 5 * takes[file], change)
        for file, tests in chosen.items()
        for change in sample(changes_of(sources[file]), each, seed)
    ]
    tally = Tally(verbose)
    modules: dict[str, list[bool]] = {file: [] for file in chosen}
    late: list[Trial] = []
    for trial, status, _, output in verdicts(trials, abreast):
        change: Change = trial.label
        survived = status == _PASSED
        modules[trial.file].append(not survived)
        excuse = EXCUSES.get((trial.file, change.key), "")
        by = _first_failure(output, in_time=status is not None)
        if by == _DID_NOT_END or "Timeout" in by:
            late.append(trial)
        tally.add(_place(trial), "survived" if survived else "caught", excuse, by)
    # Perhaps the machine was too busy, and not the mutant too slow.
    unchanged = {trial.file: trial._replace(source=sources[trial.file]) for trial in late}
    slow = {verdict.trial.file for verdict in verdicts(unchanged.values(), abreast) if verdict.status != _PASSED}
    for trial in late:
        if trial.file in slow:
            tally.withdraw(_place(trial), _DID_NOT_END)
    for file, caught in sorted(modules.items()):
        print(f"  {sum(caught):3} of {len(caught):3}  {file}")
    return tally


def _place(trial: Trial) -> str:
    change: Change = trial.label
    return f"{trial.file}:{change.line}: {change.key}"


def _times(unchanged: Sequence[Trial], abreast: int) -> dict[str, float]:
    """How long the tests of each file take without a mutant. Tests that fail twice end the run."""
    takes = {}
    left = list(unchanged)
    for again in (True, False):
        failed = []
        for verdict in verdicts(left, abreast):
            if verdict.status == _PASSED:
                takes[verdict.trial.file] = verdict.seconds
            elif again:
                failed.append(verdict.trial)
                test = _first_failure(verdict.output, in_time=verdict.status is not None)
                print(f"fails without a mutant, and is tried again: {test}", flush=True)
            else:
                raise SystemExit(f"{verdict.trial.tests} fail without a mutant:\n{verdict.output}")
        left = failed
    return takes


def by_hand(wanted: Sequence[str], abreast: int, verbose: bool) -> Tally:
    chosen = [mutant for mutant in MUTANTS if _is_wanted(wanted, mutant.file, mutant.what)]
    tally = Tally(verbose)
    caught: list[tuple[Mutant, str]] = []
    with ThreadPoolExecutor(abreast) as pool:
        for mutant, (outcome, by) in zip(chosen, pool.map(_outcome, chosen), strict=True):
            tally.add(_name(mutant), outcome, mutant.excuse, by)
            if outcome == "caught":
                caught.append((mutant, by))
    for mutant, by in _unjudged(caught):
        tally.withdraw(_name(mutant), by)
    return tally


def _name(mutant: Mutant) -> str:
    return f"{mutant.file}: {mutant.what}"


def _outcome(mutant: Mutant) -> tuple[str, str]:
    """'caught', 'survived' or 'does not apply'; and the test that has noticed it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        # With the bytecode: it stays valid, since the copies keep the times of their files.
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("*.egg-info"))
        file = copy / "backhaul" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return "does not apply", ""
        file.write_text(text.replace(mutant.old, mutant.new))
        status, output = _pytest(copy, ["-x", *mutant.tests], _SECONDS)
    if status is None or status:
        return "caught", _first_failure(output, in_time=status is not None)
    return "survived", ""


def _unjudged(caught: Sequence[tuple[Mutant, str]]) -> list[tuple[Mutant, str]]:
    """The mutants whose test also fails without them. Without the name of a test, all tests of the mutant are run."""
    names = {mutant: [by.split(" - ")[0]] if "::" in by else list(mutant.tests) for mutant, by in caught}
    wanted = sorted({name for tests in names.values() for name in tests})
    if not wanted:
        return []
    _, output = _pytest(ROOT / "src", wanted, _SECONDS + 10 * len(wanted))
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", output, flags=re.MULTILINE)
    if not failed and not re.search(r"^\d+ passed", output, flags=re.MULTILINE):
        raise RuntimeError(f"the tests do not run without mutants:\n{output}")
    return [(mutant, by) for mutant, by in caught if any(bad.startswith(n) for bad in failed for n in names[mutant])]


def _pytest(source: Path, arguments: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Pytest's exit status with the package in ``source``, None if it did not end in time; and its output."""
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow")
    command = [sys.executable, "-c", _PYTEST, *options, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            status: int | None = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
        output.seek(0)
        text = output.read()
    if status is not None and status > 1 and "error" not in text.lower():
        raise RuntimeError(f"{' '.join(command)}\n{text}")
    return status, text


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the core in one place at a time.")
    parser.add_argument("wanted", nargs="*", help="text in the file of a mutant, or in what it does")
    parser.add_argument("--hand", action="store_true", help="only the mutants of by_hand.py")
    parser.add_argument("--rule", action="store_true", help="only those of by_rule.py")
    parser.add_argument("--each", type=int, default=10, help="mutants by rule of each module")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="also say which test has noticed each mutant")
    parser.add_argument("--abreast", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    good = True
    for kind, asked in (("rule", options.rule), ("hand", options.hand)):
        if (options.rule or options.hand) and not asked:
            continue
        began = time.monotonic()
        if kind == "rule":
            tally = by_rule(options.wanted, options.each, options.seed, options.abreast, options.verbose)
        else:
            tally = by_hand(options.wanted, options.abreast, options.verbose)
        print(f"mutants by {kind}: {tally}, in {time.monotonic() - began:.0f} s", flush=True)
        good = good and tally.good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
