"""Imports: parts that need an optional package say so if it is not installed; no time is wasted on garbage."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, types
sys.modules["ray"] = {found}
import backhaul
assert "ray" not in backhaul.__all__
{use}
"""
ABSENT = "None"  # `import` treats this as a missing package
UNRELATED = "types.ModuleType('ray')"  # such as a folder of that name on the search path


@pytest.mark.parametrize(
    ("found", "use"), [(ABSENT, "import backhaul.ray"), (ABSENT, "backhaul.ray"), (UNRELATED, "import backhaul.ray")]
)
def test_without_ray(found: str, use: str) -> None:
    program = PROGRAM.format(found=found, use=use)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: backhaul.ray needs Ray 2.40 or later, on this machine and on all nodes: ")
    assert last.endswith("pip install 'backhaul[ray]'")


COUNTING = """
import gc
import torch
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
{before}
from backhaul import rpc
print(gc.isenabled(), 2 in collections, rpc.is_available())
"""


@pytest.mark.parametrize(("before", "enabled"), [("", True), ("gc.disable()", False)])
def test_the_import_starts_no_full_collection(before: str, enabled: bool) -> None:
    """A full collection behind torch takes as long as the import itself. The collector is left as it was."""
    program = COUNTING.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(enabled), "False", "True"]
