"""RemoteHandle: removes a hook from a module on another worker."""

from __future__ import annotations

from typing import Any

from backhaul.rpc import RRef


class RemoteHandle:
    """The handle of a hook of a `RemoteModule`. ``remove()``, or the end of a ``with`` block, removes the hook.

    As with torch's handles, the hook stays if the handle is dropped without ``remove()``.
    """

    def __init__(self, rref: RRef[Any]) -> None:
        self._rref = rref

    def remove(self) -> None:
        """Remove the hook. A second call does nothing."""
        self._rref.rpc_sync().remove()

    def __enter__(self) -> RemoteHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
