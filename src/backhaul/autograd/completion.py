"""Decides when a pass is over: the worker that started it keeps a ledger of the messages under way. Pure.

Every run reports once, at its end: the messages whose gradients it consumed, and those for which it emitted gradients.
The ledger is the set of ids that were reported an odd number of times. It starts with the roots.

Why an empty ledger means that all runs have reported: if it is empty, the run from the roots has reported (otherwise
`ROOT` is in the set), and each message that a reported run emitted was consumed by a reported run. Every run of a pass
is caused by a chain of messages from the roots. By induction along the chain, every run has reported. Reports may come
in any order, and need no answer.
"""

from __future__ import annotations

from collections.abc import Collection

from backhaul.autograd.functions import ROOT
from backhaul.errors import ProtocolError

# The limit for reports of peers that may lie. Peers choose the ids, so they could make the hashes in a set collide.
_MOST = 20_000


class Ledger:
    """The messages of a pass that are under way. Not thread-safe."""

    def __init__(self, doubts: bool = False) -> None:
        """``doubts``: refuse ids that were reported before. Such a report could empty a ledger too early."""
        self._open = {ROOT}
        self._told: tuple[set[int], set[int]] | None = (set(), set()) if doubts else None

    def report(self, consumed: Collection[int], emitted: Collection[int]) -> bool:
        """Enter a report. Returns whether it is over. With ``doubts``, raises `ProtocolError` for repeated ids."""
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
        """The messages whose gradients, or reports, are under way."""
        return frozenset(self._open)
