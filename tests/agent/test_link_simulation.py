"""`LinkState` and `Role` under random schedules of threads and deaths, and proof that the simulation notices mistakes.

Each class below plants one mistake: it leaves out a rule of `link_state`, of `role` or of their driver. Its docstring
says what goes wrong then.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from link_simulation import Simulation, SimulationError, run
from simulated_calling import Calling
from simulated_channel import Joined
from simulated_threads import Steps

from backhaul.agent.link_state import LinkState
from backhaul.agent.outbox import Departure, Outbox
from backhaul.agent.pending import Slot
from backhaul.agent.role import NOBODY, Role
from backhaul.transport.base import Way
from backhaul.wire.decoder import Envelope

NOWHERE = Way()


def test_400_schedules() -> None:
    tally = run(range(400))
    assert tally["schedules"] == 400
    for what in ("answered", "failed", "held", "pings", "deaths", "hangs", "lost", "silences", "stops", "unsent"):
        assert tally[what] > 10, f"few of the schedules have any {what}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_20_000_schedules() -> None:
    assert run(range(20_000))["schedules"] == 20_000


def test_a_seed_is_one_schedule() -> None:
    stories = []
    for _ in range(2):
        simulation = Simulation(11)
        simulation.run()
        stories.append(simulation.story())
    assert len(stories[0]) > 20
    assert stories[0] == stories[1]


def test_a_schedule_can_be_replayed() -> None:
    script = Path(__file__).with_name("link_simulation.py")
    told = subprocess.run([sys.executable, str(script), "11"], capture_output=True, text=True, timeout=60, check=True)
    simulation = Simulation(11)
    simulation.run()
    assert told.stdout.splitlines() == simulation.story()


# The role.


class WakesNobody(Role[Any]):
    """A reader that stops leaves the others asleep."""

    def release(self, token: int) -> Any:
        candidates, self._candidates = self._candidates, type(self._candidates)()
        super().release(token)
        self._candidates = candidates


class DoesNotPassOn(Role[Any]):
    """A thread that was woken for the role, and leaves without it, tells nobody."""

    def leave(self, candidate: Any) -> Any:
        if candidate in self._candidates:
            self._candidates.remove(candidate)


class LeavesNothing(Role[Any]):
    """A thread that has left is woken later, in place of one that waits."""

    def leave(self, candidate: Any) -> Any:
        return self._candidates.popleft() if self.free and self._candidates else None


class GivesTheRoleTwice(Role[Any]):
    def take(self) -> int:
        self._holder = NOBODY
        return super().take()


class LinesUpBesideAFreeRole(Role[Any]):
    def line_up(self, candidate: Any) -> bool:
        self._candidates.append(candidate)
        return True


class IsNeverFree(Role[Any]):
    """The role is lost with its first holder."""

    def release(self, token: int) -> Any:
        return self._candidates.popleft() if self._candidates else None


# Requests.


class AnswersLate(LinkState[Any]):
    """A reply finishes a slot that has been finished."""

    def open(self, slot: Slot, *, watched: bool) -> bool:
        self.__dict__.setdefault("all", {})[slot.id] = slot
        return super().open(slot, watched=watched)

    def answered(self, id: int, envelope: Envelope) -> Slot | None:
        return super().answered(id, envelope) or self.__dict__["all"].get(id)


class AnswersAndKeeps(LinkState[Any]):
    """A slot that is answered stays in."""

    def answered(self, id: int, envelope: Envelope) -> Slot | None:
        slot = super().answered(id, envelope)
        if slot is not None:
            self._pending.open(slot, watched=False)
        return slot


class AnswersUndone(LinkState[Any]):
    """A slot is filled in, and not marked."""

    def answered(self, id: int, envelope: Envelope) -> Slot | None:
        slot = super().answered(id, envelope)
        if slot is not None:
            slot.done = False
        return slot


class OpensWhenLost(LinkState[Any]):
    """A request on a lost link is never finished."""

    def open(self, slot: Slot, *, watched: bool) -> bool:
        lost, self.lost = self.lost, False
        try:
            return super().open(slot, watched=watched)
        finally:
            self.lost = lost


class GivesUpTwice(LinkState[Any]):
    def give_up(self, slot: Slot) -> bool:
        super().give_up(slot)
        return True


class ExpiresAndKeeps(LinkState[Any]):
    """An overdue slot stays in."""

    def expire(self, now: float) -> list[Slot]:
        overdue = super().expire(now)
        for slot in overdue:
            self._pending.open(slot, watched=False)
        return overdue


class NeverExpires(LinkState[Any]):
    def next_deadline(self) -> float:
        return math.inf

    def expire(self, now: float) -> list[Slot]:
        return []


class ForgetsWaiters(LinkState[Any]):
    """A slot that ends without a reply wakes nobody."""

    def finish(self, slot: Slot, error: BaseException | None) -> tuple[Any, ...]:
        super().finish(slot, error)
        return ()


class MiscountsFutures(LinkState[Any]):
    """Futures that time out while a thread waits for them stay in the count."""

    def give_up(self, slot: Slot) -> bool:
        return self._pending.take(slot.id) is not None


# Waiting and reading.


class WaitsForWhatIsDone(LinkState[Any]):
    def wait(self, slot: Slot, waiter: Any) -> bool:
        done, slot.done = slot.done, False
        try:
            return super().wait(slot, waiter)
        finally:
            slot.done = done


class WaitsBesideAFreeRole(LinkState[Any]):
    """A thread looks at the slot, and not at the role."""

    def wait(self, slot: Slot, waiter: Any) -> bool:
        if slot.done:
            return False
        self._reader.line_up(waiter)
        slot.waiters += (waiter,)
        return True


class WaitsForTheRoleOnly(LinkState[Any]):
    """A thread lines up, and is not woken for its slot."""

    def wait(self, slot: Slot, waiter: Any) -> bool:
        return not slot.done and self._reader.line_up(waiter)


class WatchesNothing(LinkState[Any]):
    """A thread that waits for several lines is not woken for its slot."""

    def watch(self, slot: Slot, waiter: Any) -> None:
        pass


class KeepsWatchers(LinkState[Any]):
    def stop_watching(self, slot: Slot, waiter: Any) -> None:
        pass


class ReadsWhatIsLost(LinkState[Any]):
    def read(self) -> int:
        return self._reader.take()


# Loss.


class LosesSlots(LinkState[Any]):
    """The threads that wait are not told."""

    def lose(self) -> list[Slot] | None:
        return None if super().lose() is None else []


class LosesTwice(LinkState[Any]):
    def lose(self) -> list[Slot] | None:
        return super().lose() or []


class LosesAndHolds(LinkState[Any]):
    """Calls that were held back when the link was lost stay there."""

    def lose(self) -> list[Slot] | None:
        held = self._held
        slots = super().lose()
        self._held = held
        return slots


class ClosesUnderTheReader(LinkState[Any]):
    def close(self) -> bool:
        super().close()
        self._unclosed = False
        return True


class NeverCloses(LinkState[Any]):
    """The reader of a lost link leaves its channel open."""

    def must_close(self) -> bool:
        return False


# Holding back.


class HoldsTooMany(LinkState[Any]):
    def may_hold(self, size: int) -> bool:
        held, self._held = self._held, []
        try:
            return super().may_hold(size)
        finally:
            self._held = held


class HoldsForEver(LinkState[Any]):
    """Nobody is told to send what is held back."""

    def hold(self, frame: Any) -> bool:
        super().hold(frame)
        return False


class HoldsInReverse(LinkState[Any]):
    def hold(self, frame: Any) -> bool:
        self._held.insert(0, frame)
        return len(self._held) == 1


class SendsTwice(LinkState[Any]):
    """What is held back is sent, and kept."""

    def take_held(self) -> Sequence[Any]:
        return list(self._held)


# Silence.


class LosesWithoutAPing(LinkState[Any]):
    def look(self, now: float, way: Way = NOWHERE) -> Literal["ping", "lose"] | None:
        return None if super().look(now, way) is None else "lose"


class LosesAfterAStop(LinkState[Any]):
    """Looks that come late count: one look after a long stop loses a peer that is well."""

    def look(self, now: float, way: Way = NOWHERE) -> Literal["ping", "lose"] | None:
        if self._pinged is not None:
            self._looked = now
        return super().look(now, way)


class HearsNothing(LinkState[Any]):
    """A peer that answers counts as silent."""

    def heard(self) -> None:
        self.reads += 1


class NeverLoses(LinkState[Any]):
    """A call to a peer that hangs is never over."""

    def look(self, now: float, way: Way = NOWHERE) -> Literal["ping", "lose"] | None:
        action = super().look(now, way)
        return None if action == "lose" else action


class HearsASystem(LinkState[Any]):
    """A ping that the system of a stopped peer has taken counts as life."""

    def look(self, now: float, way: Way = NOWHERE) -> Literal["ping", "lose"] | None:
        self._much = True
        return super().look(now, way)


# Sending.


class PumpsNever(Outbox[Any]):
    """Each thread thinks that another one pumps."""

    def take_duty(self) -> bool:
        self.pumped = True
        return False


class HandsOverSilently(Outbox[Any]):
    """The thread that is to pump is woken, and not told why."""

    def hand_over(self, by: Departure | None = None) -> Departure | None:
        successor = super().hand_over(by)
        if successor is not None:
            successor.pumps = False
        return successor


class ForgetsWhoWaits(Outbox[Any]):
    """A frame has left, and its thread goes on waiting."""

    def left(self) -> Departure | None:
        super().left()
        return None


class ForgetsWhoIsLost(Outbox[Any]):
    """The channel has ended, and threads go on waiting for their frames."""

    def lose(self) -> list[Departure]:
        super().lose()
        return []


class SendsWhatWasTakenBack(Outbox[Any]):
    def give_up(self, departure: Departure) -> bool:
        departure.waiter = None
        return not departure.begun


class TakesBackWhatHasBegun(Outbox[Any]):
    """A frame of which the peer has a part is said not to have been sent."""

    def give_up(self, departure: Departure) -> bool:
        super().give_up(departure)
        return True


class PassesInReverse(Outbox[Any]):
    def next_small(self) -> Departure | None:
        self._small.reverse()
        try:
            return super().next_small()
        finally:
            self._small.reverse()


# The driver.


class GivesUpTheRoleFirst(Calling):
    """The next reader waits for a reply that has been read."""

    def receive(self, timeout: float, slots: list[Slot], news: list[Any]) -> Steps:
        token = next(iter(self.readers))
        read: list[Any] = []
        original = self.world.read

        def read_all(line: Calling) -> list[Any]:
            read.extend(original(line))
            return []

        self.world.read = read_all  # type: ignore[method-assign]
        try:
            yield from super().receive(timeout, slots, news)
        finally:
            self.world.read = original  # type: ignore[method-assign]
        yield from self.stop_reading(token)
        self.world.read = lambda line: read  # type: ignore[method-assign]
        try:
            yield from super().receive(0, slots, news)
        finally:
            self.world.read = original  # type: ignore[method-assign]


class LooksBeforeTheRoleIsFree(Calling):
    """A thread sees that its reply has not come; another one reads it and gives up the role; the first one reads on."""

    def begin_reading_for(self, slot: Slot) -> Steps:
        is_open = slot.id in self.state
        yield
        return self.begin_reading() if is_open else 0


class LosesHeldCalls(Calling):
    """A thread takes along what is held back, and all of it is dropped if the channel is full."""

    def take_held(self) -> Joined | None:
        held = super().take_held()
        return None if self.unflushed else held


class LooksOnce(Calling):
    """A role that becomes free between a vigil's two looks at it has no reader, and nobody is woken for it."""

    looks_once = True


MISTAKES: list[type[Any]] = [
    LooksBeforeTheRoleIsFree,
    WakesNobody,
    DoesNotPassOn,
    LeavesNothing,
    GivesTheRoleTwice,
    LinesUpBesideAFreeRole,
    IsNeverFree,
    AnswersLate,
    AnswersAndKeeps,
    AnswersUndone,
    OpensWhenLost,
    GivesUpTwice,
    ExpiresAndKeeps,
    NeverExpires,
    ForgetsWaiters,
    MiscountsFutures,
    WaitsForWhatIsDone,
    WaitsBesideAFreeRole,
    WaitsForTheRoleOnly,
    KeepsWatchers,
    ReadsWhatIsLost,
    LosesSlots,
    LosesTwice,
    LosesAndHolds,
    ClosesUnderTheReader,
    NeverCloses,
    HoldsTooMany,
    HoldsForEver,
    HoldsInReverse,
    SendsTwice,
    LosesWithoutAPing,
    LosesAfterAStop,
    HearsNothing,
    NeverLoses,
    HearsASystem,
    PumpsNever,
    HandsOverSilently,
    ForgetsWhoWaits,
    ForgetsWhoIsLost,
    SendsWhatWasTakenBack,
    TakesBackWhatHasBegun,
    PassesInReverse,
    GivesUpTheRoleFirst,
]


PARTS: dict[type[Any], str] = {LinkState: "state", Role: "role", Calling: "calling", Outbox: "outbox"}

RARE_MISTAKES: list[type[Any]] = [WatchesNothing, LosesHeldCalls, LooksOnce]


def assert_noticed(mistake: type[Any], schedules: int) -> None:
    part = next(part for base, part in PARTS.items() if issubclass(mistake, base))
    with pytest.raises(SimulationError):
        run(range(schedules), **{part: mistake})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_simulation_finds_a_planted_mistake(mistake: type[Any]) -> None:
    assert_noticed(mistake, 600)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mistake", RARE_MISTAKES)
def test_the_simulation_finds_a_rare_planted_mistake(mistake: type[Any]) -> None:
    assert_noticed(mistake, 10_000)
