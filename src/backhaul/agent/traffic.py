"""Traffic: what the layer of references is told about messages that carry references.

The agent moves messages and does not know what a reference is. It calls these at the four moments
that matter for counting.
"""

from __future__ import annotations

from typing import Any, Protocol

from backhaul.ids import WorkerInfo
from backhaul.wire.messages import Refs


class Traffic(Protocol):
    """See `refs.holdings`. All methods are quick, thread-safe, and call no peer."""

    def departing(self, attached: list[Any], to: WorkerInfo, over: object) -> Refs:
        """A message with these is about to leave over that connection; what it has to carry for them.

        Raises if they may not go there.
        """

    def stayed(self, refs: Refs) -> None:
        """It did not leave after all."""

    def arriving(self, refs: Refs, sender: WorkerInfo) -> None:
        """A message with these was read. Called in the order of reading, before any later message's.

        Raises `ProtocolError` if that worker has no right to send them.
        """

    def arrived(self, refs: Refs) -> None:
        """That message has been unpacked, or thrown away."""

    def admit(self, request: Any, sender: WorkerInfo) -> None:
        """A request was read by a `Guard`, which does not call `arriving`. Called in the order of reading.

        Raises `RefusedError` if that worker has no right to what the request names, or has too much of it already;
        then none of its references has arrived.
        """

    def decline(self, refs: Refs, sender: WorkerInfo) -> None:
        """A request with these was refused before they arrived."""


class NoTraffic:
    """For an agent without references."""

    def departing(self, attached: list[Any], to: WorkerInfo, over: object) -> Refs:
        return ()

    def stayed(self, refs: Refs) -> None: ...

    def arriving(self, refs: Refs, sender: WorkerInfo) -> None: ...

    def arrived(self, refs: Refs) -> None: ...

    def admit(self, request: Any, sender: WorkerInfo) -> None: ...

    def decline(self, refs: Refs, sender: WorkerInfo) -> None: ...
