"""Processes: how a worker names its process, and whether this machine's kernel says that such a process is over.

A name has four parts: the boot of the machine, the namespace of process ids, the id, and the start time of the process.
The last part distinguishes a process from a later one with the same id. A name from another machine, or from another
namespace, has no meaning here.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_START_TIME = 19  # counted after the program's name, which is in parentheses and may contain anything
_STATE = 0
_ENDED = ("Z", "X")


def boot_id() -> str:
    """The id of this boot of the machine; empty if the system does not provide it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def own_name() -> str:
    """The name of this process; empty if the system does not provide all parts."""
    return name_of(os.getpid())


def name_of(id: int) -> str:
    """The name of a process of this machine and namespace; empty if the system does not provide all parts."""
    boot = boot_id()
    fields = _fields(id)
    if not boot or not fields:
        return ""
    return f"{boot}/{_namespace()}/{id}/{fields[_START_TIME]}"


def is_over(name: str) -> bool:
    """Whether the kernel says that the process has ended. False also if this process cannot see it."""
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
    """The kernel's fields about a process; None if there is no such process, empty if the kernel does not tell."""
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
