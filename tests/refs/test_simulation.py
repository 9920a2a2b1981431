"""Counting under random programs, broken connections and deaths; and proof that the simulation notices mistakes.

Each class below plants a mistake: it leaves out a rule of `refs.counting` or `refs.mailbox`. Its docstring names the
race that this opens. Most show within some hundred programs; those that take two deaths in one chain, or three delays
at once, are rare.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulated_world import Worker
from simulation import Happening, Simulation, SimulationError, run

from backhaul.ids import RefId, ShareId
from backhaul.refs.actions import Action, Confirm, Send, Void
from backhaul.refs.counting import Counting
from backhaul.refs.mailbox import Inbox, Outbox
from backhaul.wire.messages import Sweep, Swept, Unpin


def test_400_programs() -> None:
    tally = run(range(400))
    assert tally["programs"] == 400
    assert tally["deaths"] > 100
    assert tally["breaks"] > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_10_000_programs() -> None:
    assert run(range(10_000))["programs"] == 10_000


# Sharing.


class UnpinsAtOnce(Counting):
    """The sharer trusts its own reference to last until the receiver is listed."""

    def share(self, ref: RefId, to: int, over: Hashable = None) -> ShareId:
        share = super().share(ref, to, over)
        self.unpin(share)
        return share


class UnpinsOnReceipt(Counting):
    """The receiver unpins before it is listed."""

    def receive(self, ref: RefId, share: ShareId) -> list[Action]:
        return [*super().receive(ref, share), *self._tell(share.sharer, Unpin(share))]


class ReleasesUnconfirmed(Counting):
    """A user gives up its entry before the owner has listed it, and its sharer waits forever."""

    def _leave_if_idle(self, ref: RefId) -> list[Action]:
        entry = self._used.get(ref)
        if entry is not None and not (entry.copies or entry.pins):
            entry.confirmed = True
        return super()._leave_if_idle(ref)


class PinsForTheDead(Counting):
    """A pin towards a worker that has been swept already is never unpinned."""

    def share(self, ref: RefId, to: int, over: Hashable = None) -> ShareId:
        dead, self._dead = self._dead, set()
        try:
            return super().share(ref, to, over)
        finally:
            self._dead = dead


# Broken connections.


class NeverRecalls(Counting):
    """The sharer waits forever for a message that a broken connection has lost."""

    def connection_ended(self, over: Hashable) -> list[Action]:
        return []


class RecallsEverything(Counting):
    """A share that went over another connection is recalled, too, and has no pin any more when it arrives."""

    def connection_ended(self, over: Hashable) -> list[Action]:
        peers = {pin.to for pin in self._pins.values() if pin.over == over}
        for pin in self._pins.values():
            if pin.to in peers:
                pin.over = over
        return super().connection_ended(over)


class UnpinsWhatIsRegistering(Counting):
    """A share that is recalled after it came is unpinned before its receiver is listed."""

    def _on_recall(self, peer: int, shares: tuple[ShareId, ...]) -> list[Action]:
        return [action for share in shares for action in self._tell(peer, Unpin(share))]


class BelievesLateMessages(Counting):
    """A recalled reference that comes to the owner after all counts for one to a living value."""

    def receive(self, ref: RefId, share: ShareId) -> list[Action]:
        return [action for action in super().receive(ref, share) if not isinstance(action, Void)]


# Creations.


class ForgetsTheCreator(Counting):
    """A worker that registers before the creation comes, and releases, frees the value for the creator, too."""

    def expects(self, ref: RefId) -> bool:
        is_new = ref not in self._owned
        expected = super().expects(ref)
        if is_new and expected:
            self._owned[ref].users.clear()
        return expected


class ForgetsReleases(Counting):
    """A creation that comes after its release is kept forever."""

    def _note_created(self, ref: RefId) -> bool:
        self._created.clear()
        return super()._note_created(ref)


class IgnoresReferencesToNothing(Counting):
    """The owner does not count a reference that reaches it before the creation."""

    def receive(self, ref: RefId, share: ShareId) -> list[Action]:
        if ref.owner == self.me and ref not in self._owned:
            return self._tell(share.sharer, Unpin(share))
        return super().receive(ref, share)


# Deaths.


class DoesNotSweep(Counting):
    """A dead worker is struck off at once, and so is what it passed on."""

    def _start_sweep(self) -> list[Action]:
        self._sweeps.end()
        return self._strike_off_the_dead()


class AnswersAtOnce(Counting):
    """A worker answers a sweep before it has read what the dead one sent."""

    def _on_sweep(self, peer: int, dead: tuple[int, ...]) -> list[Action]:
        return [Send(peer, Swept(dead))]


class AnswersUnconfirmed(Counting):
    """A worker answers before the owner has listed it, and overtakes its own registration."""

    def _answer_sweeps(self) -> list[Action]:
        for question in self._sweeps._questions.values():
            if self._dead.issuperset(question.dead):
                question.awaited = set()
        return super()._answer_sweeps()


class TakesOldAnswers(Counting):
    """The answer to a question about one dead worker counts for a question about two."""

    def _on_swept(self, peer: int, dead: tuple[int, ...]) -> list[Action]:
        return super()._on_swept(peer, tuple(self._dead))


class AsksAboutTheLast(TakesOldAnswers):
    """A sweep asks only about the latest death, and not about the earlier ones."""

    def died(self, worker: int) -> list[Action]:
        return [
            Send(action.to, Sweep((worker,)))
            if isinstance(action, Send) and isinstance(action.notice, Sweep)
            else action
            for action in super().died(worker)
        ]


class SweepsAsOwnerOnly(Counting):
    """A pin towards a dead worker stays."""

    def _concerned(self, worker: int) -> bool:
        return any(worker in entry.users for entry in self._owned.values())


class WaitsForNewcomers(Counting):
    """A sweep waits for the answer of a worker that was never asked."""

    def joined(self, worker: int) -> None:
        super().joined(worker)
        if self._sweeps._unswept is not None:
            self._sweeps._unswept |= {worker} & self._sweeps._living


class KeepsQuestionsOfTheDead(Counting):
    """The questions of a dead worker are never forgotten."""

    def died(self, worker: int) -> list[Action]:
        question = self._sweeps._questions.get(worker)
        actions = super().died(worker)
        if question is not None:
            self._sweeps._questions[worker] = question
        return actions


class RegistersWithTheDead(Counting):
    """A reference to a dead worker's value waits for that worker's answer."""

    def receive(self, ref: RefId, share: ShareId) -> list[Action]:
        actions = super().receive(ref, share)
        if Confirm(ref, False) in actions:
            self._used[ref].confirmed = False
        return actions


# Mail.


class NeverRepeats(Outbox):
    def again(self) -> None:
        return None


class TakesAnyAnswer(Outbox):
    """A late answer to one batch counts for the next."""

    def answered(self, number: int) -> None:
        super().answered(self._number)


class TakesTwice(Inbox):
    def accept(self, number: int, process: int = 0) -> bool:
        return True


MISTAKES: list[type[Any]] = [
    UnpinsAtOnce,
    UnpinsOnReceipt,
    ReleasesUnconfirmed,
    PinsForTheDead,
    NeverRecalls,
    BelievesLateMessages,
    ForgetsTheCreator,
    ForgetsReleases,
    IgnoresReferencesToNothing,
    DoesNotSweep,
    AnswersAtOnce,
    SweepsAsOwnerOnly,
    WaitsForNewcomers,
    RegistersWithTheDead,
    NeverRepeats,
    TakesTwice,
]

RARE_MISTAKES: list[type[Any]] = [
    RecallsEverything,
    UnpinsWhatIsRegistering,
    AnswersUnconfirmed,
    TakesOldAnswers,
    AsksAboutTheLast,
    KeepsQuestionsOfTheDead,
    TakesAnyAnswer,
]


def assert_noticed(mistake: type[Any], programs: int) -> None:
    part = {Counting: "counting", Outbox: "outbox", Inbox: "inbox"}[mistake.__mro__[-2]]
    with pytest.raises(SimulationError):
        run(range(programs), **{part: mistake})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_simulation_notices(mistake: type[Any]) -> None:
    assert_noticed(mistake, 600)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", RARE_MISTAKES)
def test_the_simulation_notices_a_rare_mistake(mistake: type[Any]) -> None:
    assert_noticed(mistake, 10_000)


class TwoLocks(Simulation):
    """A driver that puts notices into the outboxes after it has released the lock, so that two threads can swap
    theirs."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.late: dict[int, list[Action]] = {}

    def act(self, worker: Worker, actions: Iterable[Action]) -> None:
        actions = list(actions)
        late = self.late.pop(worker.rank, [])
        if not late and self.random.random() < 0.3:
            self.late[worker.rank] = [action for action in actions if isinstance(action, Send)]
            actions = [action for action in actions if not isinstance(action, Send)]
        super().act(worker, actions)
        super().act(worker, [action for action in late if isinstance(action, Send) and action.to not in worker.dead])

    def happenings(self, stale: bool = True) -> list[Happening]:
        catch_up: list[Happening] = [(self.act, (self.workers[rank], ())) for rank, late in self.late.items() if late]
        return [*super().happenings(stale), *catch_up]


def test_the_simulation_notices_a_driver_that_changes_the_order() -> None:
    def run_all() -> None:
        for seed in range(600):
            TwoLocks(seed).run()

    with pytest.raises(SimulationError):
        run_all()
