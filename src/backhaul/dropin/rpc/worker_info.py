"""WorkerInfo with torch's constructor: the name comes first, and is checked."""

from __future__ import annotations

import re
from typing import Any

from backhaul import ids
from backhaul.errors import MisuseError

_NAME = re.compile(r"[A-Za-z0-9_:-]*")
_MAX_NAME = 128


class _Kind(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, ids.WorkerInfo)


class WorkerInfo(metaclass=_Kind):
    """``WorkerInfo(name, id)`` is a `backhaul.ids.WorkerInfo`."""

    def __new__(cls, name: str, id: int) -> ids.WorkerInfo:  # type: ignore[misc]
        return ids.WorkerInfo(id, checked(name))


def checked(name: str) -> str:
    """The name, if torch accepts it."""
    if not name:
        raise MisuseError("Worker name must be non-empty.")
    if len(name) > _MAX_NAME:
        raise MisuseError(f"Worker name must be shorter than {_MAX_NAME} characters, but {name[:20]!r}... is not.")
    if not _NAME.fullmatch(name):
        raise MisuseError(f"Worker name must match [A-Za-z0-9-_:]*, but {name!r} does not.")
    return name
