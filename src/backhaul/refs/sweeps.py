"""Sweeps: which workers are dead, and what has to be asked before what they held may go. Pure; a part of `counting`.

A worker may die after it has sent a reference on and before the receiver is listed. If the owner struck the dead worker
off at once, the value could go although the receiver has it. So a worker that has the dead one on a list, or a pin
towards it, first *sweeps*: it asks every other living worker whether all that the dead ones ever sent it has been dealt
with. A worker answers `Swept` when it has read the dead ones' connections to their end, and every entry that was
registering then is confirmed. When all have answered for all the dead, nothing that a dead worker sent is under way,
and what it held is dropped. Workers that die meanwhile are added to the question. Those that join meanwhile are not
asked: a worker that was not in the group while the dead one lived has nothing from it.

A worker that one takes for dead is dead, and the driver examines every worker that a `Sweep` names: it then calls
`Counting.died`, or `Counting.lives` if that worker answers, since the asking worker is mistaken or means a predecessor.
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
        self.open = set(dead)  # those whose fate is not known here
        self.awaited: set[RefId] | None = None  # entries to be confirmed first; None until the dead have ended


class Sweeps:
    """The questions of one worker, whose rank is ``me``, and those of others to it."""

    def __init__(self, me: int) -> None:
        self._me = me
        self.dead: set[int] = set()
        """Those that are dead, and all that they sent here has been read."""
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
        """Whoever asks about this worker as a dead one is mistaken, or means a predecessor."""
        for question in self._questions.values():
            question.open.discard(worker)

    @property
    def going_on(self) -> bool:
        """Whether this worker sweeps."""
        return self._unswept is not None

    def begin(self) -> list[tuple[int, Sweep]]:
        """Whom to ask about all the dead, and what: anew if a sweep is going on. If there is nobody, it has ended."""
        self._unswept = set(self._living) or None
        question = Sweep(tuple(sorted(self.dead)))
        return [(worker, question) for worker in sorted(self._living)]

    def answered(self, peer: int, dead: tuple[int, ...]) -> bool:
        """A worker has answered for these. True if that ends the sweep."""
        if self._unswept is None or not self.dead.issubset(dead):
            return False  # an answer to an earlier, smaller question
        self._unswept.discard(peer)
        return not self._unswept and self.end()

    def end(self) -> bool:
        """Wait for no more answers. False if no sweep was going on."""
        going_on = self._unswept is not None
        self._unswept = None
        return going_on

    def asked(self, peer: int, dead: tuple[int, ...]) -> None:
        """A worker asks about these."""
        self._questions[peer] = _Question(dead)

    def confirmed(self, ref: RefId) -> None:
        """An entry that was registering is listed, or its value is gone."""
        for question in self._questions.values():
            if question.awaited is not None:
                question.awaited.discard(ref)

    def answers(self, registering: Callable[[], set[RefId]]) -> list[tuple[int, Swept]]:
        """The questions that can be answered now. ``registering`` are the entries that are not confirmed yet."""
        found: list[tuple[int, Swept]] = []
        for peer, question in list(self._questions.items()):
            if question.awaited is None and self.dead.issuperset(question.open):
                question.awaited = registering()
            if question.awaited is not None and not question.awaited:
                del self._questions[peer]
                found.append((peer, Swept(question.dead)))
        return found
