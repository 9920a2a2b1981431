"""Ways: what a call waited for, followed backwards from its end, thread by thread. Pure.

The events of both processes are stamped with their times (`stages`). The **way** of one repetition::

    the client's thread has its reply  ◄── it waited for bytes (Read), which came because of
    a frame of the server (Sent)       ◄── whose thread had waited for bytes, which came because of
    a frame of the client              ◄── and there the work began

On the way, the time between two events of a thread belongs to the stage that the second one ends. The time from the end
of a write to the end of its read is time between the processes. The time from a thread's action for another thread
until that thread continues is time between threads. So all stages together make up the whole time, minus the cost of
the stamps themselves.

Repetitions of the same work may go different ways. `summarise` describes those that went the most common one.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backhaul.agent.observing import Came, Event, Queued, Read, Resumes, Sent, Starts, Waits
from backhaul.bench.stages import IN_BETWEEN, KINDS, Cost, Stamped, stage_between

BETWEEN_PROCESSES = "between processes (wake-up, kernel)"
BETWEEN_THREADS = "between threads (wake-up)"

_MOST_LEGS = 40


class Stamp(NamedTuple):
    """An event. All times are in nanoseconds."""

    kind: type[Event]
    at: int


class Thread(NamedTuple):
    process: str
    id: int


class Piece(NamedTuple):
    """A stretch of the way. ``leg`` counts the changes from one thread to another."""

    leg: int
    where: str
    stage: str
    begin: int
    end: float  # on the clock minus the time that stamps took

    @property
    def nanoseconds(self) -> float:
        return self.end - self.begin


class Way(NamedTuple):
    """One repetition. It has no pieces if it could not be followed."""

    pieces: list[Piece]
    clocked: int

    @property
    def nanoseconds(self) -> float:
        """Its time without the cost of stamps."""
        return sum(piece.nanoseconds for piece in self.pieces)


class Strayed(Exception):
    """The way cannot be followed to its beginning: something else was involved."""


Stamps = Mapping[Thread, Sequence[Stamp]]
"""The stamps of each thread, in order of time."""


class History:
    """All stamps of a run."""

    def __init__(self, stamped: Mapping[str, Stamped]) -> None:
        self._stamps: dict[Thread, list[Stamp]] = {}
        for process, rows in stamped.items():
            for number, at, thread in rows.tolist():
                self._stamps.setdefault(Thread(process, thread), []).append(Stamp(KINDS[number], at))

    def during(self, begin: int, end: int) -> Stamps:
        """The stamps in that time, plus the last before it and the first after it of each thread."""
        found = {}
        for thread, stamps in self._stamps.items():
            first = bisect_left(stamps, begin, key=lambda stamp: stamp.at)
            last = bisect_left(stamps, end, key=lambda stamp: stamp.at)
            found[thread] = stamps[max(0, first - 1) : last + 1]
        return found

    def ways(self, main: Thread, windows: Iterable[tuple[int, int]], cost: Cost) -> list[Way]:
        """The way of each repetition."""
        found: list[Way] = []
        for begin, end in windows:
            try:
                pieces = follow(self.during(begin, end), main, begin, end, cost)
            except Strayed:
                pieces = []
            found.append(Way(pieces, end - begin))
        return found


def follow(stamps: Stamps, main: Thread, begin: int, end: int, cost: Cost) -> list[Piece]:
    """The way of thread ``main`` in that time, in order. Raises `Strayed`."""
    before, after = cost
    pieces: list[Piece] = []
    thread, leg = main, 0
    place = bisect_right(stamps.get(main, ()), end, key=lambda stamp: stamp.at) - 1
    stage, until, ending = IN_BETWEEN, end, 0.0  # of the current stretch, and the cost of the stamp at its end

    def add(where: str, since: int, taken: float) -> None:
        pieces.append(Piece(leg, where, stage, since, max(since, until - taken)))

    while True:
        stamp = stamps[thread][place] if place >= 0 else None
        if stamp is None or stamp.at <= begin:
            if thread != main:
                raise Strayed
            add(thread.process, begin, ending)
            return [piece._replace(leg=pieces[-1].leg - piece.leg) for piece in reversed(pieces)]
        add(thread.process, stamp.at, ending + after)
        cause = _cause(stamps, thread, place)
        if cause is None:  # the thread did not have to wait
            stage, until, ending = _stage(stamps[thread], place), stamp.at, before
            place -= 1
            continue
        other, number = cause
        event = stamps[other][number]
        stage, until = BETWEEN_THREADS if other.process == thread.process else BETWEEN_PROCESSES, stamp.at
        add("", min(event.at, stamp.at), before)
        stage, ending = _stage(stamps[other], number), before if event.at <= stamp.at else 0.0
        until = min(event.at, stamp.at)
        thread, place = other, number - 1
        leg += 1
        if leg == _MOST_LEGS:
            raise Strayed


def _stage(mine: Sequence[Stamp], place: int) -> str:
    """What a thread did between the previous stamp and this one."""
    return stage_between(mine[place - 1].kind if place > 0 else None, mine[place].kind)


def _cause(stamps: Stamps, thread: Thread, place: int) -> tuple[Thread, int] | None:
    """What a thread waited for before this stamp: another thread and the index of its stamp. None if it did not wait.

    A write, or the wake-up of a thread, takes effect at some time between two stamps of the acting thread. So
    its stamp may be a little later than its effect. A stamp from before the wait cannot have ended it.
    """
    mine = stamps[thread]
    wanted = _ended_by(mine, place)
    if wanted is None:
        return None
    until, since = mine[place].at, _wait_began(mine, place)
    best: tuple[tuple[bool, int], Thread, int] | None = None
    for other, theirs in stamps.items():
        if other == thread or (other.process == thread.process) == (wanted is Sent):
            continue
        for number, event in enumerate(theirs):
            if event.kind is not wanted or event.at <= since:
                continue
            in_time = event.at <= until
            if in_time or (number > 0 and theirs[number - 1].at < until and wanted is not Queued):
                # The last one in time; if there is none, the one that was about to be stamped.
                rank = in_time, event.at if in_time else -event.at
                if best is None or rank > best[0]:
                    best = rank, other, number
    return None if best is None else best[1:]


def _ended_by(mine: Sequence[Stamp], place: int) -> type[Event] | None:
    """The kind of event that ends the wait before this stamp; None if there was no wait."""
    kind = mine[place].kind
    if kind is Read:
        return Sent
    if kind is Starts:
        return Queued
    return Came if kind is Resumes and place > 0 and mine[place - 1].kind is Waits else None


def _wait_began(mine: Sequence[Stamp], place: int) -> float:
    """When a thread began to wait for what it has at this stamp.

    If it did nothing since it sent something, that is when it began to send: it may have lost its processor right
    after the write, and find the reply when it continues.
    """
    place -= 1
    sent = place
    while sent > 0 and mine[sent].kind is Waits:
        sent -= 1
    if sent > 0 and mine[sent].kind is Sent:
        place = sent - 1
    return mine[place].at if place >= 0 else -math.inf


# Many repetitions.


class Stage(NamedTuple):
    leg: int
    where: str  # a process; "" means between two
    name: str
    seconds: float


@dataclass(frozen=True)
class Explained:
    """A work in stages, in order, and how long it takes, in seconds.

    A stage is the mean over the **usual** repetitions: those with the most common way, and of these the middle half
    by time. Means add up, unlike medians, and disturbed repetitions are excluded.
    """

    work: str
    stages: list[Stage]
    total: float  # the median over the most common way, without the cost of stamps
    stamps: float  # their cost
    untouched: float  # the median in processes that have no stamps
    repetitions: int
    alike: int  # repetitions with that way

    @property
    def remainder(self) -> float:
        """The total minus all stages."""
        return self.total - sum(stage.seconds for stage in self.stages)

    @property
    def covered(self) -> float:
        """The share of the total that the stages cover."""
        return sum(stage.seconds for stage in self.stages if stage.name != IN_BETWEEN) / self.total


def summarise(work: str, ways: Sequence[Way], untouched: float) -> Explained:
    """The explanation of the usual repetitions. Raises `Strayed` if there are none."""
    followed = [way for way in ways if way.pieces]
    if not followed:
        raise Strayed(f"{work}: no repetition could be followed from its end back to its beginning")
    legs, _ = Counter(_legs(way.pieces) for way in followed).most_common(1)[0]
    alike = sorted((way for way in followed if _legs(way.pieces) == legs), key=lambda way: way.nanoseconds)
    quarter = len(alike) // 4
    usual = alike[quarter : len(alike) - quarter]
    times: dict[tuple[int, str, str], float] = {}
    begins: dict[tuple[int, str, str], list[int]] = {}
    for way in usual:
        first: dict[tuple[int, str, str], int] = {}
        for piece in way.pieces:
            key = piece.leg, piece.where, piece.stage
            times[key] = times.get(key, 0.0) + piece.nanoseconds / len(usual)
            first.setdefault(key, piece.begin - way.pieces[0].begin)
        for key, begin in first.items():
            begins.setdefault(key, []).append(begin)
    order = sorted(times, key=lambda key: (key[0], statistics.median(begins[key])))
    return Explained(
        work,
        [Stage(*key, times[key] / 1e9) for key in order if times[key] > 0],
        total=statistics.median(way.nanoseconds for way in alike) / 1e9,
        stamps=statistics.median(way.clocked - way.nanoseconds for way in alike) / 1e9,
        untouched=untouched,
        repetitions=len(ways),
        alike=len(alike),
    )


def _legs(way: Sequence[Piece]) -> tuple[tuple[int, str], ...]:
    """Which process has which leg."""
    return tuple(dict.fromkeys((piece.leg, piece.where) for piece in way if piece.where))
