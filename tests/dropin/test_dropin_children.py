"""Processes started where Backhaul is installed also have it, before they import anything."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest
from dropin_runs import run

import backhaul

pytestmark = pytest.mark.timeout(300)


def test_processes_that_are_forked_and_those_of_a_fork_server() -> None:
    output = run("starting.py", "fork", "forkserver")
    assert output.splitlines() == [
        "fork: backhaul.dropin.rpc",
        "preloaded: backhaul.dropin.rpc",
        "forkserver: backhaul.dropin.rpc",
    ]


def test_child_processes_that_need_the_path_to_backhaul_first() -> None:
    packages = [str(Path(backhaul.__file__).parent.parent), sysconfig.get_paths()["purelib"]]
    ways = ["spawn", "forkserver", "cluster"]
    output = run("-S", "starting.py", *ways, PACKAGES=os.pathsep.join(packages))
    assert [line for line in output.splitlines() if "preloaded" not in line] == [
        f"{way}: backhaul.dropin.rpc" for way in ways
    ]
