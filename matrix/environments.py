"""One virtual environment for each pair of a Python and a torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from stubs import stub_cuda

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".venv-matrix"

_CUDA_PACKAGES = re.compile(r"^Requires-Dist: (nvidia|cuda|triton|pytorch-triton)")


class Pair(NamedTuple):
    """A Python, such as ``3.12``, and a release of torch, such as ``2.11.0``."""

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """From ``3.12:2.11.0``. Raises ValueError."""
        match = re.fullmatch(r"(3\.\d+):(\d+\.\d+\.\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a pair of a Python and a torch: write it as 3.12:2.11.0")
        return cls(*match.groups())

    @property
    def folder(self) -> Path:
        return FOLDER / f"py{self.python}-torch{self.torch}"


class NotAvailable(Exception):
    """Why a pair cannot be run on this machine."""


def interpreter(version: str) -> Path:
    """An interpreter of this version: on the PATH, from pyenv, or the one that runs this. Raises NotAvailable."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    own = Path(sys.executable)
    on_path = shutil.which(f"python{version}")
    candidates = [*([own] if _is(version, own) else []), *([Path(on_path)] if on_path else [])]
    candidates += sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for candidate in candidates:
        if _is(version, candidate):  # a pyenv shim may refer to a version that is not active
            return candidate
    raise NotAvailable(f"no python{version} on the PATH or among pyenv's")


def _is(version: str, python: Path) -> bool:
    question = "import sys; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([str(python), "-c", question], capture_output=True, text=True, check=False)
    return answer.returncode == 0 and answer.stdout.strip() == version


def set_up(pair: Pair, pip_args: list[str], *, stubs: bool, install: bool) -> Path:
    """The interpreter of a pair's environment, which is made if it does not exist. Raises NotAvailable.

    ``stubs``: install torch without CUDA's libraries, and stubs instead. ``install``: whether environments may be made.
    """
    python = pair.folder / "bin" / "python"
    done = pair.folder / ".done"
    if done.exists():
        return python
    if not install:
        raise NotAvailable("there is no environment, and --no-install was given")
    base = interpreter(pair.python)
    _run([str(base), "-m", "venv", "--clear", str(pair.folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *pip_args]
    torch = f"torch=={pair.torch}"
    if stubs:
        _run([*pip, "--no-deps", torch])
        site_packages = next((pair.folder / "lib").glob("python*/site-packages"))
        _drop_cuda_packages(site_packages)
        stub_cuda(site_packages)
    _run([*pip, torch, "-e", f"{ROOT}[dev]"])
    done.touch()
    return python


def _drop_cuda_packages(site_packages: Path) -> None:
    """Or pip would install them with the next package that needs torch."""
    metadata = next(site_packages.glob("torch-*.dist-info")) / "METADATA"
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not _CUDA_PACKAGES.match(line)))


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said or ["it said nothing"]
        raise NotAvailable(f"{' '.join(Path(word).name for word in command[:3])}: {errors[-1]}")
