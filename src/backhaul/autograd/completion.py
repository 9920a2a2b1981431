"""When a pass is over: a ledger of what is under way, kept by who started it. Pure.

Every run reports once, when it is over: which messages it consumed the gradients of, and for which it emitted
some. The ledger is the set of ids that have been told of once only. It starts with the roots.

A run that has not reported keeps it from being empty. Take the runs that have reported, the one from the roots among
them (or `ROOT` is left in the set). If the ledger is empty, each message that one of them emitted has been
consumed by one of them. Whatever is run in a pass, is run because of a chain of messages from the roots; so by going
along the chain, all runs have reported. Reports may come in any order, and no answer to them is needed.
"""

from __future__ import annotations

from collections.abc import Collection

from backhaul.autograd.functions import ROOT
from backhaul.errors import ProtocolError

# Of reports that may lie. Their numbers are chosen by peers, so that their hashes may collide.
_MOST = 20_000


class Ledger:
    """Not thread-safe."""

    def __init__(self, doubts: bool = False) -> None:
        """``doubts``: refuse what has been reported before. Such a lie could make a ledger empty that is not."""
        self._open = {ROOT}
        self._told: tuple[set[int], set[int]] | None = (set(), set()) if doubts else None

    def report(self, consumed: Collection[int], emitted: Collection[int]) -> bool:
        """Take note of a report; True if all is over."""
        if self._told is not None:
            for before, now in zip(self._told, (consumed, emitted), strict=True):
                if len(now) > _MOST or len(set(now)) != len(now) or not before.isdisjoint(now):
                    raise ProtocolError("a worker has reported work of a backward pass that was reported before")
                before.update(now)
                if len(before) > _MOST:
                    raise ProtocolError(f"a backward pass of more than {_MOST} messages")
        self._open.symmetric_difference_update(consumed)
        self._open.symmetric_difference_update(emitted)
        return not self._open

    @property
    def open(self) -> frozenset[int]:
        """Messages whose gradients are under way, or whose reports are."""
        return frozenset(self._open)
