"""The demo runs, plainly and on a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "examples" / "demo.py"


def test_plain_lines() -> None:
    done = subprocess.run([sys.executable, str(DEMO)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("7 of 7 checks passed")
    assert not any("\x1b" in line or line.startswith("✗") for line in lines)
    assert sum("is ready, pid" in line for line in lines) == 3


def test_a_table_on_a_terminal() -> None:
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
        pass  # how a terminal tells that its other side is closed
    finally:
        os.close(ours)
    _, errors = demo.communicate(timeout=60)
    assert (demo.returncode, errors) == (0, b"")
    assert "Backhaul: three processes" in shown.decode()
    assert "7 of 7 checks passed" in shown.decode()
