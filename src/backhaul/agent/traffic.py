"""Traffic: how the reference layer hears of messages that carry references.

The agent moves messages and does not know what a reference is. It calls these methods at the moments that matter for
reference counting.
"""

from __future__ import annotations

from typing import Any, Protocol

from backhaul.ids import WorkerInfo
from backhaul.wire.messages import Refs


class Traffic(Protocol):
    """See `refs.holdings`. All methods are quick, thread-safe, and call no peer."""

    def departing(self, attached: list[Any], to: WorkerInfo, over: object) -> Refs:
        """Pin the references of a message that is about to leave over a connection. Returns what the message carries.

        Call `stayed` if the message does not leave. Raises if the references may not go to that worker.
        """

    def stayed(self, refs: Refs) -> None:
        """Unpin the references of a message that did not leave after all."""

    def arriving(self, refs: Refs, sender: WorkerInfo) -> None:
        """Note that a message with these references was read. Called in the order of reading. Call `arrived` later.

        Raises `ProtocolError` if the sender has no right to send them.
        """

    def arrived(self, refs: Refs) -> None:
        """Note that the message with these references has been unpacked or dropped."""

    def admit(self, request: Any, sender: WorkerInfo) -> None:
        """`arriving`, for a request that a `Guard` has read. Called in the order of reading.

        Raises `RefusedError` if the sender has no right to what the request names, or already has too much of it. Then
        none of the request's references has arrived.
        """

    def decline(self, refs: Refs, sender: WorkerInfo) -> None:
        """Note that a request with these references was refused before they arrived."""


class NoTraffic:
    """The default for an agent without references."""

    def departing(self, attached: list[Any], to: WorkerInfo, over: object) -> Refs:
        return ()

    def stayed(self, refs: Refs) -> None: ...

    def arriving(self, refs: Refs, sender: WorkerInfo) -> None: ...

    def arrived(self, refs: Refs) -> None: ...

    def admit(self, request: Any, sender: WorkerInfo) -> None: ...

    def decline(self, refs: Refs, sender: WorkerInfo) -> None: ...
