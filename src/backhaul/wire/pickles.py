"""Pickles values that the safe codec does not know, for peers that may run code here anyway.

Tensors, and the types that upper layers register, do not enter the pickle: it refers
to them by index, and they travel as parts of the tree around it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, refer: Callable[[Any], int | None]) -> None:
        super().__init__(file, protocol=5)
        self._refer = refer

    def persistent_id(self, obj: Any) -> int | None:
        return self._refer(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Use ``_rpc_reduce`` instead of ``__reduce__`` for a type that travels in another way than it is saved."""
        reduce = getattr(type(obj), "_rpc_reduce", None)
        return NotImplemented if reduce is None else reduce(obj)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, parts: Sequence[Any]) -> None:
        super().__init__(file)
        self._parts = parts

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not int or not 0 <= pid < len(self._parts):
            raise pickle.UnpicklingError(f"part {pid!r} of {len(self._parts)}")
        return self._parts[pid]


def dump(value: Any, is_part: Callable[[Any], bool]) -> tuple[bytes, list[Any]]:
    """The pickle of a value, and its parts that stay outside the pickle. Raises whatever pickling raises."""
    parts: list[Any] = []
    indices: dict[int, int] = {}

    def refer(obj: Any) -> int | None:
        if not is_part(obj):
            return None
        index = indices.get(id(obj))
        if index is None:
            index = indices[id(obj)] = len(parts)
            parts.append(obj)
        return index

    file = io.BytesIO()
    _Pickler(file, refer).dump(value)
    return file.getvalue(), parts


def load(data: bytes, parts: Sequence[Any]) -> Any:
    """The value of a pickle. Raises `Broken` for bytes that are not a pickle, and whatever unpickling raises."""
    return _Unpickler(io.BytesIO(data), parts).load()


Broken = (pickle.UnpicklingError, EOFError)
