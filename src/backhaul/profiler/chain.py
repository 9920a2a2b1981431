"""Chain: what a step waited for, from its end back to its beginning, across threads and workers.

The chain starts at the end of the step, on the profiling worker's own thread. While that thread worked, the chain goes
back along it. Where it waited, the chain continues at the event that ended the wait: the write of the peer whose bytes
it read, or the thread of its own worker that woke it. So the segments follow each other without gaps, and their times
add up to the step's time.

    Read        ◄── the last write of that peer to this worker
    Began       ◄── the thread that had read the message, and had another one to handle first
    Starts      ◄── the thread that queued the message
    Resumes     ◄── the thread that read the reply
    GateOpens, RunBegan ◄── the thread that the gradients came to
    FinishedLate ◄── the beginning of that call: in between it had no thread

If the event that ended a wait was not recorded, or came from a thread that had long been idle, the chain contains the
wait itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from backhaul.agent.observing import (
    Began,
    Came,
    FinishedLate,
    GateOpens,
    GradientsCame,
    HandedOut,
    Planned,
    Queued,
    Read,
    Resumes,
    RunBegan,
    Sent,
    Starts,
    Stops,
)
from backhaul.profiler.gathered import Moment, Recording
from backhaul.profiler.replay import COMPUTE, IDLE, WIRE, Piece, Told

BETWEEN_WORKERS = "between workers"
BETWEEN_THREADS = "between threads"
WITHOUT_THREAD = "a call without a thread"

_IDLE_SHARE = 0.05
"""The chain follows an idle thread for at most this share of the step."""
_MOST_LOOKS = 200
"""How many events are searched for the one that ended a wait."""

Place = tuple[str, int]
"""A worker and one of its threads."""

_CAUSES: dict[type[Any], tuple[type[Any], ...]] = {
    Began: (Read,),
    Starts: (Queued,),
    Resumes: (Came, HandedOut, Stops),
    GateOpens: (GradientsCame,),
    RunBegan: (Planned, GradientsCame, Stops),
}


class Segment(msgspec.Struct, frozen=True):
    """A stretch of the chain. ``what`` is the name of the function that ran, or another activity."""

    worker: str
    state: str
    what: str
    seconds: float


class Chain(msgspec.Struct, frozen=True):
    """The longest chain of a step, in order of time."""

    step: str
    seconds: float
    segments: list[Segment]


class _Index:
    """The moments of some kinds in order of time: a kind and a worker -> [(earliest effect, thread, moment)].

    An action of a thread takes effect before it is recorded, and the thread may lose the GIL in between. The earliest
    possible time of the effect is just after the thread's previous event.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._found: dict[tuple[type[Any], str], list[tuple[int, int, Moment]]] = {}
        wanted = {Sent, Began, *(cause for causes in _CAUSES.values() for cause in causes)}
        for recording in recordings:
            for thread in recording.threads:
                before = 0
                for moment in thread.moments:
                    kind = type(moment.event)
                    if kind in wanted:
                        row = self._found.setdefault((kind, recording.worker), [])
                        row.append((before if kind is Sent else moment.at, thread.native, moment))
                    before = moment.at
        for row in self._found.values():
            row.sort(key=lambda each: each[0])

    def back_from(self, kind: type[Any], worker: str, since: int, until: int) -> Iterator[tuple[int, int, Moment]]:
        """The moments that may have taken effect after ``since`` and up to ``until``, latest first."""
        row = self._found.get((kind, worker), [])
        place = bisect_right(row, until, key=lambda each: each[0]) - 1
        for number in range(place, max(-1, place - _MOST_LOOKS), -1):
            _, thread, moment = row[number]
            if moment.at > since:
                yield min(moment.at, until), thread, moment


class Walk:
    """Walks back through the activities of all workers."""

    def __init__(self, recordings: Sequence[Recording], told: Mapping[str, Told], home: Place) -> None:
        self._index = _Index(recordings)
        self._errors = {recording.worker: recording.alignment.error for recording in recordings}
        self._pieces = {(worker, thread): row for worker, each in told.items() for thread, row in each.pieces.items()}
        self._home = home

    def chain(self, step: str, begin: int, end: int) -> Chain:
        """The chain that ends at ``end`` on the home thread, back to ``begin``."""
        found: list[tuple[str, str, str, int, int]] = []
        place, now = self._home, end
        jumped: set[tuple[Place, int]] = set()
        jumps: list[tuple[Place, int, int]] = []  # the origin, and the length of the chain then
        while now > begin:
            piece = self._piece(place, now)
            if piece is None:
                until = self._last_before(place, now)
                if until <= begin and place != self._home and found:
                    until = begin
                base = COMPUTE if place == self._home else "idle"
                found.append((place[0], base, "the block" if place == self._home else "", max(until, begin), now))
                now = max(until, begin)
                continue
            if piece.state not in (COMPUTE, WIRE) and piece.ended_by is not None and (place, piece.begin) not in jumped:
                jumped.add((place, piece.begin))
                cause = self._cause(place, piece, now)
                if cause is not None:
                    other, at, what = cause
                    at = max(begin, min(at, now))
                    label = f"{other[0]} → {place[0]}" if what == BETWEEN_WORKERS else place[0]
                    state = COMPUTE if what == WITHOUT_THREAD else WIRE
                    jumps.append((place, now, len(found)))
                    found.append((label, state, what, at, now))
                    place, now = other, at
                    continue
            since = max(piece.begin, begin)
            if piece.state == IDLE and jumps and now - since > _IDLE_SHARE * (end - begin):
                # A thread that had long been idle did not end that wait, so the chain contains the wait itself.
                place, now, length = jumps.pop()
                del found[length:]
                continue
            found.append((place[0], piece.state, piece.what, since, now))
            now = since
        return Chain(step, (end - begin) / 1e9, _merge(found[::-1]))

    def _piece(self, place: Place, at: int) -> Piece | None:
        """What a thread did just before this time."""
        row = self._pieces.get(place, [])
        number = bisect_left(row, at, key=lambda piece: piece.begin) - 1
        return row[number] if number >= 0 and row[number].end >= at else None

    def _last_before(self, place: Place, at: int) -> int:
        row = self._pieces.get(place, [])
        number = bisect_left(row, at, key=lambda piece: piece.begin) - 1
        return row[number].end if number >= 0 else 0

    def _cause(self, place: Place, piece: Piece, now: int) -> tuple[Place, int, str] | None:
        """Where and when the cause that ended a wait happened."""
        worker, thread = place
        assert piece.ended_by is not None
        event: Any = piece.ended_by.event
        if now < piece.end:
            return None
        if isinstance(event, Read):
            error = self._errors.get(worker, 0) + self._errors.get(event.peer, 0)
            for at, other, moment in self._index.back_from(Sent, event.peer, piece.begin - error, now + error):
                if moment.event.peer == worker:  # type: ignore[attr-defined]
                    return (event.peer, other), at, BETWEEN_WORKERS
            return None
        if isinstance(event, FinishedLate):
            for at, other, moment in self._index.back_from(Began, worker, 0, now):
                began: Any = moment.event
                if (began.peer, began.call) == (event.peer, event.call):
                    return (worker, other), at, WITHOUT_THREAD
            return None
        for kind in _CAUSES.get(type(event), ()):
            for at, other, moment in self._index.back_from(kind, worker, piece.begin, now):
                if other != thread and (kind is not Read or moment.event.peer == event.peer):  # type: ignore[attr-defined]
                    return (worker, other), at, BETWEEN_THREADS
        return None


def _merge(found: list[tuple[str, str, str, int, int]]) -> list[Segment]:
    """The segments, with equal neighbours merged."""
    merged: list[tuple[str, str, str, int]] = []
    for worker, state, what, begin, end in found:
        if merged and merged[-1][:3] == (worker, state, what):
            merged[-1] = (worker, state, what, merged[-1][3] + end - begin)
        elif end > begin:
            merged.append((worker, state, what, end - begin))
    return [Segment(worker, state, what, nanoseconds / 1e9) for worker, state, what, nanoseconds in merged]
