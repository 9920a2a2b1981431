"""Summary: where the time of each worker went, and the longest chain of a step, as data that prints as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from backhaul.profiler.averages import columns
from backhaul.profiler.chain import Chain, Walk
from backhaul.profiler.gathered import Gathered, Operator, Recording
from backhaul.profiler.replay import COMPUTE, IDLE, Piece, Told
from backhaul.profiler.shares import COLUMNS, Interpreter, Shares, shares

_LONGEST_LIST = 40

_TITLES = {
    "gates": "waits: gates",
    "interpreter": "waits: interpreter",
    "replies": "waits: replies",
}


class Summary(msgspec.Struct, frozen=True):
    """The result of `profile.summary`. ``chains`` has one for each step; ``chain`` is that of the longest step."""

    seconds: float
    workers: list[Shares]
    chains: list[Chain]

    @property
    def chain(self) -> Chain:
        return max(self.chains, key=lambda chain: chain.seconds)

    def __getitem__(self, worker: str) -> Shares:
        return next(each for each in self.workers if each.worker == worker)

    def __str__(self) -> str:
        headers = ["worker", *(_TITLES.get(name, name) for name in COLUMNS), "sum"]
        cells = [
            [
                each.worker,
                *(f"{100 * each.part(name):.1f} %" for name in COLUMNS),
                f"{sum(each.seconds.values()):.3f} s",
            ]
            for each in self.workers
        ]
        chain = self.chain
        lines = [[each.worker, each.what or each.state, _milliseconds(each.seconds)] for each in chain.segments]
        note = "in order"
        if len(lines) > _LONGEST_LIST:
            lines, note = _added_up(chain), "the longest first"
        return "\n".join(
            [
                f"{self.seconds:.3f} s of wall time",
                columns(headers, cells, left=1),
                "",
                f"Longest chain of {chain.step}, {_milliseconds(chain.seconds)}, {note}:",
                columns(["worker", "what", "time"], lines),
            ]
        )


def _added_up(chain: Chain) -> list[list[str]]:
    """The segments of a long chain, with equal ones summed in one line."""
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for each in chain.segments:
        count, seconds = found.get((each.worker, each.what or each.state), (0, 0.0))
        found[each.worker, each.what or each.state] = count + 1, seconds + each.seconds
    return [
        [worker, f"{what}, {count} times" if count > 1 else what, _milliseconds(seconds)]
        for (worker, what), (count, seconds) in sorted(found.items(), key=lambda item: -item[1][1])
    ]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def summarise(gathered: Gathered, told: Mapping[str, Told]) -> Summary:
    """The summary of a profile."""
    begin, end = gathered.begin, gathered.end
    found = []
    for recording in gathered.recordings:
        together = [each for each in gathered.recordings if (each.host, each.pid) == (recording.host, recording.pid)]
        interpreter = Interpreter(look for each in together for look in each.looks)
        operators = [each for each in gathered.operators if each.worker == recording.worker and each.device == "CPU"]
        threads = _threads(gathered, recording, told[recording.worker], operators)
        found.append(shares(recording.worker, threads, interpreter, begin, end))
    walk = Walk(gathered.recordings, told, (gathered.home, gathered.home_thread))
    steps = gathered.steps or [("the block", begin, end)]
    return Summary((end - begin) / 1e9, found, [walk.chain(*step) for step in steps])


def _threads(
    gathered: Gathered, recording: Recording, told: Told, operators: Sequence[Operator]
) -> list[Sequence[Piece]]:
    """The pieces of each thread of a worker, for the whole window."""
    busy: dict[int, list[tuple[int, int]]] = {}
    for operator in operators:
        if not operator.inner:
            busy.setdefault(operator.thread, []).append((operator.begin, operator.end))
    serving = {thread.native for thread in recording.threads if thread.serves}
    home = gathered.home_thread if recording.worker == gathered.home else None
    found: list[Sequence[Piece]] = []
    for native in {*told.pieces, *busy, *(() if home is None else (home,))}:
        pieces = told.pieces.get(native, [])
        if native == home:
            found.append(_filled(pieces, gathered.begin, gathered.end, COMPUTE))
        else:
            filled = _filled(pieces, gathered.begin, gathered.end, IDLE)
            found.append(_with_operators(filled, busy.get(native, []), own=native not in serving))
    return found


def _filled(pieces: Sequence[Piece], begin: int, end: int, state: str) -> list[Piece]:
    """The pieces, with the time before the first and after the last filled in."""
    if not pieces:
        return [Piece(begin, end, state, "", end - begin, None)]
    first, last = pieces[0].begin, pieces[-1].end
    found = list(pieces)
    if first > begin:
        found.insert(0, Piece(begin, first, state, "", first - begin, None))
    if last < end:
        found.append(Piece(last, end, state, "", end - last, None))
    return found


def _with_operators(pieces: Sequence[Piece], busy: list[tuple[int, int]], *, own: bool) -> list[Piece]:
    """The pieces, with computing time from operators where Backhaul's events show an idle thread.

    ``own``: the thread is the user's. Between two events its processor time shows how long it computed.
    """
    busy = sorted(busy)
    found: list[Piece] = []
    place = 0
    for piece in pieces:
        if piece.state != IDLE:
            found.append(piece)
            continue
        if own and piece.ended_by is not None and piece.begin > pieces[0].begin:
            computed = min(piece.processor, piece.end - piece.begin)
            found.append(Piece(piece.begin, piece.begin + computed, COMPUTE, "", computed, None))
            continue
        while place < len(busy) and busy[place][1] <= piece.begin:
            place += 1
        number = place
        while number < len(busy) and busy[number][0] < piece.end:
            begin, end = max(busy[number][0], piece.begin), min(busy[number][1], piece.end)
            if end > begin:
                found.append(Piece(begin, end, COMPUTE, "operators", end - begin, None))
            number += 1
    return found
