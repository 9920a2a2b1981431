"""The listening side of a greeting, on a thread that waits for it."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.base import Channel, Visitor

_EVENTS = {"read": select.POLLIN, "write": select.POLLOUT}


def admit(visitor: Visitor, judge: Callable[[Hello], Welcome], deadline: float) -> tuple[Channel, Hello]:
    """Finish the greeting with a visitor, as the door does, and return its channel. Raises `TimeoutError`."""
    found = greet(visitor, judge, deadline)
    assert found is not None, "it belongs to another connection"
    return found


def greet(visitor: Visitor, judge: Callable[[Hello], Welcome], deadline: float) -> tuple[Channel, Hello] | None:
    """The same. None for a further connection of a channel that was accepted before."""
    while isinstance(outcome := visitor.step(judge), str):
        poll = select.poll()
        poll.register(visitor.fileno(), _EVENTS[outcome])
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            visitor.turn_away()
            raise TimeoutError("the greeting took too long")
    return outcome
