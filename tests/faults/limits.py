"""Limits that the system puts on a process: cgroups, rlimits, small file systems."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_ROOT = Path("/sys/fs/cgroup")
_CLONE_NEWNS = 0x00020000


def no_cgroups(controller: str) -> str:
    """Why this machine has no cgroup of this controller; empty if it has."""
    if os.geteuid() != 0:
        return "needs root, for cgroups"
    if _is_first_version(controller):
        return "" if os.access(_ROOT / controller, os.W_OK) else f"/sys/fs/cgroup/{controller} cannot be written to"
    controllers = _ROOT / "cgroup.subtree_control"
    if not controllers.exists() or controller not in controllers.read_text():
        return f"there is no cgroup controller {controller!r} for processes started here"
    return ""


def _is_first_version(controller: str) -> bool:
    return (_ROOT / controller / "cgroup.procs").exists()


@contextmanager
def cgroup(controller: str, pid: int, limits: dict[str, int]) -> Iterator[Path]:
    """Put a process under limits: ``{"memory.limit_in_bytes": …}`` or ``{"pids.max": …}``; yields the folder."""
    reason = no_cgroups(controller)
    if reason:
        pytest.skip(reason)
    first = _is_first_version(controller)
    folder = (_ROOT / controller if first else _ROOT) / f"backhaul-faults-{os.getpid()}-{pid}"
    folder.mkdir()
    home = next(
        (line.split(":", 2)[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if controller in line),
        "/",
    )
    home_folder = (_ROOT / controller if first else _ROOT) / home.lstrip("/")
    try:
        for name, value in limits.items():
            name = name if first else name.replace("memory.limit_in_bytes", "memory.max")
            (folder / name).write_text(str(value))
        (folder / "cgroup.procs").write_text(str(pid))
        yield folder
    finally:
        for left in (folder / "cgroup.procs").read_text().split():
            (home_folder / "cgroup.procs").write_text(left)
        folder.rmdir()


# In the worker's process.


def small_disk(path: str, size: str) -> None:
    """Mount a file system of that size, visible only to this process and its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)


def fill(path: str) -> None:
    """Leave no byte free on the file system of this file."""
    with Path(path).open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass


def limit_memory(more: int) -> None:
    """Limit the address space of this process to its current size plus ``more`` bytes; -1 means no limit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft = resource.RLIM_INFINITY if more < 0 else pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


_hoard: list[int] = []


def take_descriptors() -> int:
    """Use up this process's descriptors. Returns how many it took."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, hard))
    try:
        while True:
            _hoard.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return len(_hoard)


def give_descriptors_back() -> None:
    while _hoard:
        os.close(_hoard.pop())
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def can_start_a_thread() -> bool:
    thread = threading.Thread(target=lambda: None)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident() -> int:
    """The bytes of resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
