"""Stubs instead of CUDA's libraries, so that PyPI's torch runs on CPUs without gigabytes of them.

PyPI has torch for Linux only with CUDA. Its libraries name a dozen of NVIDIA's, which the loader must find, although no
function of theirs is called without a GPU. The stubs have the same names, and define the symbols that torch's libraries
need as functions that return 100, which CUDA calls "no device".
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path

_NO_DEVICE = 100
# Not the driver, libcuda.so: torch checks whether it exists.
_THEIRS = re.compile(r"^lib(cu(?!da\.)|nv|nccl)")
_SYMBOL = re.compile(r"^_*(cu|nccl|nv)\w*$")


def stub_cuda(site_packages: Path) -> list[str]:
    """Make the stubs that torch in this folder needs, next to torch's own libraries. Returns their names."""
    folder = site_packages / "torch" / "lib"
    libraries = sorted(path for path in folder.iterdir() if ".so" in path.name)
    needed = {name for path in libraries for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _shown("readelf", "-d", path))}
    missing = sorted(name for name in needed if _THEIRS.match(name) and not (folder / name).exists())
    if not missing:
        return []
    own = {name for path in libraries for name, _ in _symbols(path, "--defined-only")}
    wanted = {symbol for path in libraries for symbol in _symbols(path, "--undefined-only")}
    owners = {version: file for path in libraries for file, version in _versions(path)}
    symbols: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for name, version in wanted:
        if _SYMBOL.match(name) and name not in own:
            # The loader looks for a symbol without a version in all libraries.
            symbols[owners.get(version, missing[0]) if version else missing[0]][version].add(name)
    for name in missing:
        _make(folder / name, symbols[name])
    return missing


def _make(path: Path, symbols: dict[str, set[str]]) -> None:
    """A library with these symbols, by their versions."""
    names = sorted(set().union(*symbols.values()))
    source = "".join(f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in names)
    script = path.with_suffix(".map")
    versions = {version: found for version, found in sorted(symbols.items()) if version}
    script.write_text(
        "".join(f"{version} {{ global: {'; '.join(sorted(found))}; }};\n" for version, found in versions.items())
    )
    flags = ["-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{path.name}"]
    if versions:
        flags.append(f"-Wl,--version-script={script}")
    try:
        subprocess.run(["gcc", *flags, "-o", str(path), "-x", "c", "-"], input=source, text=True, check=True)
    finally:
        script.unlink()


def _shown(program: str, how: str, path: Path) -> str:
    command = [program, *how.split(), str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _symbols(path: Path, which: str) -> list[tuple[str, str]]:
    """Names of functions and their versions, which may be empty."""
    words = [line.split()[-1] for line in _shown("nm", f"-D {which}", path).splitlines()]
    return [(name, version.lstrip("@")) for name, _, version in (word.partition("@") for word in words)]


def _versions(path: Path) -> list[tuple[str, str]]:
    """The versions that a library needs, each with the file that must define it."""
    found: list[tuple[str, str]] = []
    file = ""
    for line in _shown("readelf", "-V -W", path).splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match[1]
        elif (match := re.search(r"Name: (\S+) +Flags", line)) and _THEIRS.match(file):
            found.append((file, match[1]))
    return found
