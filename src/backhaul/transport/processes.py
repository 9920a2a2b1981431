"""Processes: how a worker names its process, and whether the kernel of this machine says that such a process is over.

A name has four parts: the boot of the machine, the namespace of process ids, the id, and the time at which the process
started. The last part tells a process from a later one with the same id. A name from another machine, or from
another namespace, says nothing here.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_START_TIME = 19  # after the name of the program, which is in parentheses and may contain anything
_STATE = 0
_ENDED = ("Z", "X")


def boot_id() -> str:
    """Names the machine, from its start to the next; empty where the system does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def own_name() -> str:
    """The name of this process; empty where the system does not tell enough."""
    return name_of(os.getpid())


def name_of(id: int) -> str:
    """The name of a process of this machine and namespace; empty where the system does not tell enough."""
    boot = boot_id()
    fields = _fields(id)
    if not boot or not fields:
        return ""
    return f"{boot}/{_namespace()}/{id}/{fields[_START_TIME]}"


def is_over(name: str) -> bool:
    """The kernel says that the process of that name has ended. False also if it cannot be seen from here."""
    parts = name.split("/")
    if len(parts) != 4 or not parts[2].isdecimal() or len(parts[2]) > 10:
        return False
    if parts[0] != boot_id() or parts[1] != _namespace():
        return False
    fields = _fields(int(parts[2]))
    if fields is None:
        return True
    return bool(fields) and (fields[_START_TIME] != parts[3] or fields[_STATE] in _ENDED)


def _fields(id: int) -> list[str] | None:
    """What the kernel tells about a process; None if there is none, empty if it does not say."""
    try:
        text = Path(f"/proc/{id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else []
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return ""
