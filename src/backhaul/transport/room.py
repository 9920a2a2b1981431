"""Room: how much memory this process can still use before the system kills processes to free some.

The system promises more memory than there is: the allocation of a large tensor succeeds, and the process is killed
while it fills the tensor. So the memory that a message needs is compared with the memory that is available to the
machine, and to the control groups of the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def check_room(size: int) -> None:
    """Raise MemoryError if ``size`` more bytes are not available to this process."""
    found = (available(), *(_left_in(group, size) for group in _groups()))
    left = min((each for each in found if each is not None), default=size)
    if size > left:
        raise MemoryError(f"no memory for a buffer of {size} bytes: {left} are available")


def available() -> int | None:
    """The bytes that the machine has available; None if it does not say."""
    try:
        figures = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        return sum(int(figures[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024
    except (OSError, ValueError, KeyError):
        return None


@lru_cache(maxsize=1)
def _groups() -> tuple[Path, ...]:
    """The directories of the control groups that limit the memory of this process."""
    with contextlib.suppress(OSError):
        return tuple(_find_groups(_MEMBERSHIP.read_text()))
    return ()


def _find_groups(membership: str) -> Iterator[Path]:
    for line in membership.splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "memory":
            base = _GROUPS / "memory"
        elif controllers == "":
            base = _GROUPS
        else:
            continue
        group = base / name.lstrip("/")
        # In a container the name may be the one on the host, while the container's group is at the top.
        yield from (each for each in (group, *group.parents) if each.is_relative_to(base) and each.is_dir())


def _left_in(group: Path, size: int) -> int | None:
    """The bytes that a control group has left. If fewer than ``size`` are free, its file cache counts as free."""
    for limit, used, reclaimable in (
        ("memory.max", "memory.current", ("active_file", "inactive_file")),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
    ):
        try:
            most = int((group / limit).read_text())
            now = int((group / used).read_text())
            if size <= most - now:
                return most - now
            figures = dict(line.split(" ", 1) for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # there is no limit, or it is another version of control groups
            continue
        return max(0, most - now + sum(int(figures.get(name, 0)) for name in reclaimable))
    return None
