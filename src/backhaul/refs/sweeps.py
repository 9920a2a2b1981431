"""Sweeps: which workers are dead, and which questions come before their references are dropped. A part of `counting`.

A worker may die after it has passed a reference on and before the receiver is listed. If the owner struck the dead
worker off at once, it could free the value although the receiver has a reference. So a worker that lists the dead
worker, or has a pin towards it, first *sweeps*: it asks every other living worker whether that worker has handled
everything that the dead workers ever sent it. A worker answers `Swept` when it has read the dead workers' connections
to the end, and every entry that was registering at that moment is confirmed. When all have answered for all dead
workers, nothing that a dead worker sent is under way, and the references that it held are dropped.

Workers that die during a sweep are added to the question. Workers that join during a sweep are not asked: a worker that
was not in the group while the dead worker lived has nothing from it.

It is assumed that a worker is dead if one worker considers it dead. The driver examines every worker that a `Sweep`
names, and then calls `Counting.died`. If the named worker answers, the driver calls `Counting.lives` instead: the
asking worker is mistaken, or means a predecessor. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backhaul.ids import RefId
from backhaul.wire.messages import Sweep, Swept


class _Question:
    """A sweep of another worker that has not been answered yet."""

    __slots__ = ("awaited", "dead", "open")

    def __init__(self, dead: tuple[int, ...]) -> None:
        self.dead = dead
        self.open = set(dead)  # those that must be dead here too before the answer, unless they turn out to live
        self.awaited: set[RefId] | None = None  # entries that must be confirmed first; None while `open` ones may live


class Sweeps:
    """The questions that one worker, whose rank is ``me``, asks, and those that other workers ask it."""

    def __init__(self, me: int) -> None:
        self._me = me
        self.dead: set[int] = set()
        """The workers that are dead, and whose messages to this worker have all been read."""
        self._living: set[int] = set()
        self._unswept: set[int] | None = None  # workers that have not answered the sweep that is going on
        self._questions: dict[int, _Question] = {}  # the asking worker -> its last question

    def joined(self, workers: Iterable[int]) -> None:
        self._living.update({*workers} - self.dead - {self._me})

    def died(self, worker: int) -> None:
        self.dead.add(worker)
        self._living.discard(worker)
        self._questions.pop(worker, None)

    def revived(self, worker: int) -> None:
        self.dead.discard(worker)
        self._living.add(worker)

    def lives(self, worker: int) -> None:
        """A worker answers. A peer that asks about it as a dead worker is mistaken, or means a predecessor."""
        for question in self._questions.values():
            question.open.discard(worker)

    @property
    def going_on(self) -> bool:
        """Whether a sweep of this worker is going on."""
        return self._unswept is not None

    def begin(self) -> list[tuple[int, Sweep]]:
        """Start a sweep about all dead workers, and return the questions to send. Replaces a sweep that is going on.

        If there is no living worker to ask, the result is empty, and the sweep has ended.
        """
        self._unswept = set(self._living) or None
        question = Sweep(tuple(sorted(self.dead)))
        return [(worker, question) for worker in sorted(self._living)]

    def answered(self, peer: int, dead: tuple[int, ...]) -> bool:
        """A worker has answered for these dead workers. True if that ends the sweep."""
        if self._unswept is None or not self.dead.issubset(dead):
            return False  # an answer to an earlier, smaller question
        self._unswept.discard(peer)
        return not self._unswept and self.end()

    def end(self) -> bool:
        """End the sweep without waiting for more answers. False if no sweep was going on."""
        going_on = self._unswept is not None
        self._unswept = None
        return going_on

    def asked(self, peer: int, dead: tuple[int, ...]) -> None:
        """A worker asks about these dead workers."""
        self._questions[peer] = _Question(dead)

    def confirmed(self, ref: RefId) -> None:
        """An entry that was registering is confirmed: the owner has listed us, or the value is gone."""
        for question in self._questions.values():
            if question.awaited is not None:
                question.awaited.discard(ref)

    def answers(self, registering: Callable[[], set[RefId]]) -> list[tuple[int, Swept]]:
        """The answers that can be sent now. ``registering()`` returns the entries that are not confirmed yet."""
        found: list[tuple[int, Swept]] = []
        for peer, question in list(self._questions.items()):
            if question.awaited is None and self.dead.issuperset(question.open):
                question.awaited = registering()
            if question.awaited is not None and not question.awaited:
                del self._questions[peer]
                found.append((peer, Swept(question.dead)))
        return found
