"""The demo runs, with and without a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_plain_lines() -> None:
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    losses = [float(loss) for loss in re.findall(r"^step +\d+ +loss ([\d.]+)", done.stdout, flags=re.MULTILINE)]
    assert len(losses) == 9
    assert losses[-1] < losses[0] / 2
    compared = re.findall(
        r"^(\w+) +(\d+) gradients of up to [\d.e-]+, [\d.e-]+ apart$", done.stdout, flags=re.MULTILINE
    )
    assert compared == [("worker1", "4"), ("worker2", "4"), ("here", "2")]
    last = re.search(r"^✓ the gradients are those of one process; largest difference ([\d.e-]+)\n\Z", done.stdout, re.M)
    assert last is not None, done.stdout
    assert float(last[1]) <= 1e-9


@pytest.mark.slow
def test_gradients_that_differ(tmp_path: Path) -> None:
    """The comparison can fail, and the exit code says so."""
    spoiled = tmp_path / "demo.py"
    source = DEMO.read_text().replace("STEPS = 200", "STEPS = 1")
    assert "return gradients(self)" in source
    spoiled.write_text(source.replace("return gradients(self)", "return [g + 2e-9 for g in gradients(self)]"))
    done = subprocess.run([sys.executable, str(spoiled)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "✗ the gradients are not those of one process; largest difference 2e-09" in done.stdout


@pytest.mark.slow
def test_a_line_on_a_terminal() -> None:
    ours, theirs = os.openpty()
    demo = subprocess.Popen(
        [sys.executable, str(DEMO)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 1 << 16):
            shown += chunk
    except OSError:
        pass  # how a terminal reports that its other side is closed
    finally:
        os.close(ours)
    _, errors = demo.communicate(timeout=60)
    assert (demo.returncode, errors) == (0, b"")
    text = shown.decode()
    assert re.search(r"step 200   loss [\d.]+ +\d+% right   \S*█", text)
    assert "✓ the gradients are those of one process" in text
