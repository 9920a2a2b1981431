"""Entries: what `counting` keeps about each reference, and about each share of one that may not have arrived. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable

from backhaul.ids import RefId, ShareId


class Owned:
    """The owner's entry. It lives while a user is listed, a share is pinned, or the owner has copies."""

    __slots__ = ("copies", "expected", "gone", "pins", "users")

    def __init__(self) -> None:
        self.expected = False  # its creation is still to come
        self.gone = False  # the value was freed, or never came, before a late message brought this reference
        self.copies = 0
        self.pins: set[ShareId] = set()
        self.users: set[int] = set()

    def idle(self) -> bool:
        return not (self.copies or self.pins or self.users)


class Used:
    """A user's entry."""

    __slots__ = ("confirmed", "copies", "lost", "pins", "released", "to_unpin")

    def __init__(self) -> None:
        self.copies = 0
        self.pins: set[ShareId] = set()
        self.confirmed = False
        self.lost = False  # this worker asked for the creation and does not know whether it happened
        self.released = False  # the owner has been sent a `Release`
        self.to_unpin: dict[ShareId, None] = {}  # the shares that arrived while registering, in order

    def is_useless(self) -> bool:
        """Whether nothing needs the entry: no usable copy is here, and no share may still be under way."""
        return self.confirmed and not self.pins and (self.lost or not self.copies)


class Pin:
    """A share that may not have arrived yet. ``over`` is its connection; None once that has ended."""

    __slots__ = ("over", "ref", "to")

    def __init__(self, ref: RefId, to: int, over: Hashable) -> None:
        self.ref = ref
        self.to = to
        self.over = over


class Pins(dict[ShareId, Pin]):
    """The pins of one worker, by their shares. Change it only with `add` and `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._towards: Counter[int] = Counter()  # worker -> number of pins towards it
        self._returning: Counter[int] = Counter()  # worker -> pins towards it of its own values
        self._given: Counter[tuple[RefId, int]] = Counter()  # (value, worker) -> number of its pins towards the worker

    def add(self, share: ShareId, pin: Pin) -> None:
        self[share] = pin
        self._towards[pin.to] += 1
        if pin.ref.owner == pin.to:
            self._returning[pin.to] += 1
        self._given[pin.ref, pin.to] += 1

    def take(self, share: ShareId) -> Pin | None:
        """Forget a pin, and return it; None if there is none. The caller removes its share from the entry."""
        pin = self.pop(share, None)
        if pin is not None:
            self._towards[pin.to] -= 1
            if pin.ref.owner == pin.to:
                self._returning[pin.to] -= 1
            self._given[pin.ref, pin.to] -= 1
            if not self._given[pin.ref, pin.to]:
                del self._given[pin.ref, pin.to]
        return pin

    def towards(self, worker: int) -> int:
        """The number of references that are under way to that worker."""
        return self._towards[worker]

    def returning(self, worker: int) -> int:
        """The number of references to its own values that are under way to that worker."""
        return self._returning[worker]

    def is_under_way(self, ref: RefId, worker: int) -> bool:
        """Whether this reference is under way to that worker."""
        return (ref, worker) in self._given

    def of_any(self, workers: Container[int]) -> list[ShareId]:
        """The shares that go to one of these workers."""
        return [share for share, pin in self.items() if pin.to in workers]

    def connection_ended(self, over: Hashable) -> list[ShareId]:
        """Note that a connection has ended. Returns the shares that it carried, all of which go to one worker."""
        lost = [share for share, pin in self.items() if pin.over == over]
        for share in lost:
            self[share].over = None
        return lost
