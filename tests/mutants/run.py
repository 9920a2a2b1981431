"""`make mutants`: break the core in one place at a time, and see whether the tests notice.

Each mutant of `by_hand.py` is applied to a copy of the package, and the tests that are to notice it run against the
copy. A mutant that no test notices is a survivor: a test is missing, or the code that it broke is not needed.

    python tests/mutants/run.py            all
    python tests/mutants/run.py share      those with this text in their file, or in what they do
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from by_hand import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
ENOUGH = 0.9
_SECONDS = 600


def outcome(mutant: Mutant) -> str:
    """'caught', 'survived', or 'does not apply'."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        file = copy / "backhaul" / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1:
            return "does not apply"
        file.write_text(text.replace(mutant.old, mutant.new))
        options = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow")
        command = [sys.executable, "-m", "pytest", *options, *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            return "caught"  # the mutant makes a test hang
    if done.returncode > 1 and "error" not in done.stdout:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return "caught" if done.returncode else "survived"


def main(wanted: str = "") -> int:
    chosen = [mutant for mutant in MUTANTS if wanted in mutant.file or wanted in mutant.what]
    began = time.monotonic()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(outcome, chosen))
    for mutant, found in zip(chosen, outcomes, strict=True):
        if found != "caught":
            print(f"{found}: {mutant.file}: {mutant.what}" + (f" ({mutant.excuse})" if mutant.excuse else ""))
    caught = outcomes.count("caught")
    print(f"{caught} of {len(chosen)} mutants caught, in {time.monotonic() - began:.0f} s")
    if "does not apply" in outcomes:
        return 1
    survivors = [mutant for mutant, found in zip(chosen, outcomes, strict=True) if found != "caught"]
    return 1 if not all(mutant.excuse for mutant in survivors) or caught < ENOUGH * len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
