"""Running programs with this interpreter, on torch as it is or on a torch without RPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROGRAM = str(HERE / "torch_program.py")
PATIENCE = 240.0
KINDS = ("torch", "built", "gone")
"""Torch as it is; built without RPC; or without the Python files of RPC. See torch_without_rpc/."""


def start(*argv: str, kind: str = "torch", cwd: Path = HERE, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python until it exits."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    if kind != "torch":
        environ.update(PYTHONPATH=str(HERE / "torch_without_rpc"), TORCH_WITHOUT_RPC=kind)
    return subprocess.run(
        [sys.executable, *argv],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def run(*argv: str, **options: Any) -> str:
    """Run Python, which must exit with 0; returns its output."""
    done = start(*argv, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def facts(output: str) -> list[dict[str, Any]]:
    """The output of torch_program.py's workers, by rank."""
    lines = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '{"rank"' in line]
    return sorted(lines, key=lambda line: int(line["rank"]))
