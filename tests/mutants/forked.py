"""Run the unit tests of a module against changed sources of it, each in a forked process.

The parent process has imported torch and pytest, and nothing of the package: a child starts to test within a second,
while a new interpreter would need two to import torch. The child imports the changed module in place of the file.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

import pytest
import torch  # noqa: F401 the children need it

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "backhaul"
_MEMORY = 16 << 30  # of address space: a mutant may append to a list in an endless loop
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:pytest_cov", "-m", "not slow")


class Trial(NamedTuple):
    """One source to test. ``label`` is the caller's."""

    file: str  # below the package
    source: str
    tests: tuple[str, ...]
    seconds: float
    label: Any


class Verdict(NamedTuple):
    trial: Trial
    status: int | None  # the exit status of pytest; None if it did not end in time
    seconds: float
    output: str


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, with another source than that of its file."""

    def __init__(self, trial: Trial) -> None:
        self._name = ".".join(("backhaul", *Path(trial.file).with_suffix("").parts))
        self._path = str(PACKAGE / trial.file)
        self._source = trial.source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        loader = _Loader(fullname, self._path, self._source)
        return importlib.util.spec_from_file_location(fullname, self._path, loader=loader)


def _test(trial: Trial, output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(ROOT)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    sys.meta_path.insert(0, _Finder(trial))
    sys.path.insert(0, str(PACKAGE.parent))
    status = int(pytest.main([*_OPTIONS, *trial.tests]))
    sys.stdout.flush()
    os._exit(status)


def verdicts(trials: Iterable[Trial], abreast: int) -> Iterator[Verdict]:
    """Pytest's verdict on each trial, as they end. ``abreast`` trials run at a time."""
    context = multiprocessing.get_context("fork")
    waiting = iter(trials)
    running: dict[int, tuple[Any, Trial, float, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(sys.maxsize):
            if number >= abreast or not _start(context, waiting, running, f"{folder}/{number}"):
                break
        number = abreast
        while running:
            now = time.monotonic()
            nearest = min(begun + trial.seconds for _, trial, begun, _ in running.values())
            wait(list(running), max(0.0, nearest - now))
            now = time.monotonic()
            for sentinel, (process, trial, begun, output) in list(running.items()):
                late = now > begun + trial.seconds
                if process.exitcode is None and not late:
                    continue
                if process.exitcode is None:
                    process.kill()
                process.join()
                del running[sentinel]
                text = Path(output).read_text(errors="replace") if Path(output).exists() else ""
                yield Verdict(trial, None if late and process.exitcode < 0 else process.exitcode, now - begun, text)
                number += 1
                _start(context, waiting, running, f"{folder}/{number}")


def _start(context: Any, waiting: Iterator[Trial], running: dict[int, Any], output: str) -> bool:
    trial = next(waiting, None)
    if trial is None:
        return False
    process = context.Process(target=_test, args=(trial, output))
    process.start()
    running[process.sentinel] = (process, trial, time.monotonic(), output)
    return True
