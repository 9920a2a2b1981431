"""Fate: what this worker knows about the current incarnation of one peer. A pure state machine.

Theory of operation
-------------------
A worker is identified by its name and its *incarnation*: random text that it draws when it starts, and sends in every
greeting. A process that replaces another one has the same name and a different incarnation.

::

    present ──(cannot be reached)──> suspected ──(known to have ended)──> over
       ^                                 │
       └────────(it answers again)───────┘

A broken connection does not mean death. A suspected peer may be stopped, cut off by the network, or dead. Calls to it
fail at once, but nothing that it holds or owns is given up: after a while it may continue as if nothing had happened.

An incarnation is *over* in these cases:

- The kernel of this machine says that its process has ended.
- The peer has said goodbye.
- Its launcher, or the engine that started it, says that it has ended.
- Another incarnation of the same name has greeted.
- The peer has been suspected for as long as the option ``lost_after`` says.

Only the last case is a guess, and then `certain` is False. An incarnation that is over never comes back; the next
greeting begins a new fate.
"""

from __future__ import annotations

import math
from typing import Literal

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0

State = Literal["present", "suspected", "over"]


class Fate:
    """See the module's docstring. All times are seconds of one clock. Not thread-safe: `fates` holds a lock."""

    __slots__ = ("certain", "incarnation", "reason", "since", "state", "tries")

    def __init__(self, incarnation: str = "") -> None:
        """An empty ``incarnation`` means that the peer has not greeted yet."""
        self.incarnation = incarnation
        self.state: State = "present"
        self.reason = ""
        """Why the peer is suspected, or how it ended."""
        self.since = math.inf
        """When the peer became suspected."""
        self.certain = False
        self.tries = 0

    @property
    def suspected(self) -> bool:
        return self.state == "suspected"

    @property
    def over(self) -> bool:
        return self.state == "over"

    def continues(self, incarnation: str) -> bool:
        """Whether a peer that greets with this incarnation is the peer of this fate."""
        return not self.over and self.incarnation in ("", incarnation)

    def doubt(self, now: float, reason: str) -> bool:
        """Note that the peer cannot be reached. True if it was present before."""
        if self.over:
            return False
        self.reason = reason
        self.tries += 1
        if self.suspected:
            return False
        self.state, self.since = "suspected", now
        return True

    def answered(self) -> bool:
        """Note that the peer has answered. True if it was suspected."""
        was_suspected = self.suspected
        if was_suspected:
            self.state, self.since, self.reason, self.tries = "present", math.inf, "", 0
        return was_suspected

    def end(self, reason: str, *, certain: bool) -> bool:
        """Note that the incarnation is over. False if it was over already."""
        if self.over:
            return False
        self.state, self.reason, self.certain = "over", reason, certain
        return True

    def is_given_up(self, now: float, lost_after: float) -> bool:
        """Whether the peer has been suspected for so long that it counts as over."""
        return self.suspected and now - self.since >= lost_after

    def next_try(self, now: float, lost_after: float) -> float:
        """When to examine a suspected peer again."""
        pause = min(_FIRST_PAUSE * 2.0 ** min(self.tries, 10), _LONGEST_PAUSE)
        return min(now + pause, max(now, self.since + lost_after))
