"""Claims: locks on sets of parameters, granted in order.

Code that changes parameters, or needs them to stay unchanged, claims them first. Claims that share a parameter are
granted in the order in which they were made; other claims do not wait for each other. There is one set of claims for
the process, because workers of one process, and optimizers of several trainers, may share parameters.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from backhaul.devices.streams import new_baton


class _Claim:
    """A context manager. It waits for its turn at the start of the block, and holds the claim until the end."""

    __slots__ = ("_claims", "objects", "thread")

    def __init__(self, claims: Claims, objects: frozenset[int]) -> None:
        self._claims = claims
        self.objects = objects
        self.thread = threading.get_ident()

    def __enter__(self) -> None:
        self._claims._make(self)
        try:
            self._claims.baton.take()
        except BaseException:  # an error of the GPU
            self._claims._release(self)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._claims.baton.leave()
        finally:
            self._claims._release(self)

    def must_wait_for(self, other: _Claim) -> bool:
        # A hook of one optimizer may step another one on the same thread, which must not wait for itself.
        return self.thread != other.thread and not self.objects.isdisjoint(other.objects)


class Claims:
    """The claims that are held or wait. Thread-safe. Its lock is not held while a claim is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self.baton = new_baton()
        self._claims: list[_Claim] = []  # held or waiting, in the order in which they were made

    def on(self, objects: Iterable[object]) -> _Claim:
        """A block that waits for all earlier claims on any of these objects, and makes later claims wait for its end.

        Objects are compared by identity. The caller must keep them alive.
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
        """The number of claims that are held or wait."""
        return len(self._claims)


claims = Claims()  # global to the process: see above
