"""When a pass is over: a ledger of what is under way, kept by who started it. Pure.

Every run reports once, when it is over: which messages it consumed the gradients of, and for which it emitted
some. The ledger is the set of ids that have been told of once only. It starts with the roots.

A run that has not reported keeps it from being empty. Take the runs that have reported, the one from the roots among
them (or `ROOT` is left in the set). If the ledger is empty, each message that one of them emitted has been
consumed by one of them. Whatever is run in a pass, is run because of a chain of messages from the roots; so by going
along the chain, all runs have reported. Reports may come in any order, and no answer to them is needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from backhaul.autograd.functions import ROOT


class Ledger:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._open = {ROOT}

    def report(self, consumed: Iterable[int], emitted: Iterable[int]) -> bool:
        """Take note of a report; True if all is over."""
        self._open.symmetric_difference_update(consumed)
        self._open.symmetric_difference_update(emitted)
        return not self._open

    @property
    def open(self) -> frozenset[int]:
        """Messages whose gradients are under way, or whose reports are."""
        return frozenset(self._open)
