"""docs/clusters-ray.md and examples/ray_cluster.py run as written, against a real Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually, living_actors, placements

from test_docs import blocks, program

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/clusters-ray.md"
EXAMPLE = ROOT / "examples/ray_cluster.py"


def run(nodes: Any, script: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that finds the Ray of these tests."""
    env = {**os.environ, "RAY_ADDRESS": nodes.address, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=280, check=False)
    done.stdout = "".join(line for line in done.stdout.splitlines(True) if "(raylet)" not in line)  # of Ray's own
    eventually(lambda: not living_actors() and not placements())
    return done


def test_the_page(nodes: Any, tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(program(PAGE))
    done = run(nodes, script)
    assert done.returncode == 0, done.stdout + done.stderr


SCRIPTS = [block for block in blocks(PAGE) if block.kind == "script"]


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: f"line {block.line}")
def test_a_script_on_the_page(nodes: Any, block: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Ray Train is not installed")
    script = tmp_path / "script.py"
    script.write_text(block.source)
    done = run(nodes, script)
    assert done.returncode == 0, done.stdout + done.stderr


END = r"✓ worker2 was lost and replaced, and all 20 losses are, bit by bit, those of the undisturbed run"


def test_the_example(nodes: Any) -> None:
    done = run(nodes, EXAMPLE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == END
    assert "lost worker2, and went on" in done.stdout
    first, last = map(float, re.findall(r"^step +\d+ +loss ([\d.]+)$", done.stdout, re.MULTILINE))
    assert last < first


def test_the_check_of_the_example_can_fail(nodes: Any, tmp_path: Path) -> None:
    source = EXAMPLE.read_text()
    assert "every=5, replace" in source
    script = tmp_path / "ray_cluster.py"
    script.write_text(source.replace("every=5, replace", 'every=5, restore="lost", replace'))
    done = run(nodes, script)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "✗ the losses are not those of the undisturbed run"
