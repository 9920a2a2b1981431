"""RemoteHandle: what takes a hook off a module on another worker."""

from __future__ import annotations

from typing import Any

from backhaul.rpc import RRef


class RemoteHandle:
    """Of a hook of a `RemoteModule`: ``handle.remove()``, or the end of a ``with`` block, takes the hook off again.

    As with torch's own handles, the hook stays if the handle is dropped without that.
    """

    def __init__(self, rref: RRef[Any]) -> None:
        self._rref = rref

    def remove(self) -> None:
        """Take the hook off. Twice does no harm."""
        self._rref.rpc_sync().remove()

    def __enter__(self) -> RemoteHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
