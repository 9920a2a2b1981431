"""Claims: who may work on which parameters.

Everything that changes parameters, or needs them to stay as they are, claims them first. Claims on common
parameters take turns in the order in which they were made; others do not wait for each other. There is one set of
claims for the process: workers of one process, and optimizers of several trainers, may share parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from backhaul.devices.streams import Baton


class _Claim:
    """A context manager: inside the block it is granted."""

    __slots__ = ("_claims", "objects", "thread")

    def __init__(self, claims: Claims, objects: frozenset[int]) -> None:
        self._claims = claims
        self.objects = objects
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        self._claims._make(self)
        self._claims.baton.take()

    def __exit__(self, *_: object) -> None:
        self._claims.baton.leave()
        self._claims._release(self)

    def must_wait_for(self, other: _Claim) -> bool:
        # A hook of an optimizer may step another one: its thread does not wait for itself.
        return self.thread != other.thread and not self.objects.isdisjoint(other.objects)


class Claims:
    """Thread-safe. Its lock is not held while a claim is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self.baton = Baton()
        self._claims: list[_Claim] = []  # held or waiting, in the order in which they were made

    def on(self, objects: Iterable[object]) -> _Claim:
        """Wait for all earlier claims on any of these objects, and keep later ones waiting inside the block.

        Objects are told apart by identity; the caller keeps them alive.
        """
        return _Claim(self, frozenset(map(id, objects)))

    def _make(self, claim: _Claim) -> None:
        with self._lock:
            alone = not self._claims
            self._claims.append(claim)
        if alone:
            return
        try:
            with self._lock:
                self._released.wait_for(lambda: self._is_granted(claim))
        except BaseException:
            self._release(claim)
            raise

    def _release(self, claim: _Claim) -> None:
        with self._lock:
            self._claims.remove(claim)
            if self._claims:
                self._released.notify_all()

    def _is_granted(self, claim: _Claim) -> bool:
        for earlier in self._claims:
            if earlier is claim:
                return True
            if claim.must_wait_for(earlier):
                return False
        raise AssertionError("a claim that was not made")

    def __len__(self) -> int:
        """How many are held or wait."""
        return len(self._claims)


claims = Claims()  # of the process: see above
