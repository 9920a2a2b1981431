"""Holder: drives the parts of all workers in a profile (`session`), and gathers their recordings.

The holder controls the workers with ordinary calls that are not recorded. They run outside the autograd context that
the block may be in. A worker that becomes unreachable is left out, with a warning.
"""

from __future__ import annotations

import contextvars
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from backhaul.errors import BackhaulError, MisuseError, RpcTimeoutError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.profiler import session
from backhaul.profiler.clocks import HOME, Alignment, align, trips
from backhaul.profiler.gathered import Gathered, Operator, Owners, Recording, operators_of, unpack
from backhaul.worker import Worker

_PATIENCE = 120.0
"""Seconds that a worker has to answer a request of the holder."""

_ASK_EVERY = 5.0
"""Seconds between two questions whether a worker has packed its recording."""

_LOSSES = (WorkerLostError, RpcTimeoutError, MisuseError)


class Holder:
    """For one thread, in the order `warm`, `record`, `mark`, `collect`; call `close` at the end."""

    def __init__(
        self, worker: Worker, members: list[WorkerInfo], options: dict[str, Any], rounds: int, max_events: int
    ) -> None:
        """Make all workers ready to record. Raises if one of them is not."""
        self._worker = worker
        self._me = worker.info.name
        self._id = uuid.uuid4().hex
        self._members = {info.name: info for info in members}
        self._others = [info for info in members if info != worker.info]
        self._lost: dict[str, str] = {}
        self._mine: session.Session | None = None
        self._context = contextvars.Context()
        self._home_thread = threading.get_native_id()
        self._begin = 0
        self._mark = 0
        self._steps: list[tuple[str, int, int]] = []
        self._places: dict[str, Any] = {}
        self._alignments: dict[str, Alignment] = {self._me: HOME}
        try:
            self._start(options, rounds, max_events)
        except BaseException:
            self.close()
            raise

    @property
    def marked(self) -> bool:
        """Whether this recording contains steps."""
        return bool(self._steps)

    def _start(self, options: dict[str, Any], rounds: int, max_events: int) -> None:
        self._places = {self._me: session.introduce(), **self._on_others(session.introduce, strict=True)}
        for info in self._others:
            self._alignments[info.name] = self._align(info, rounds)
        taken: set[tuple[str, int]] = set()
        orders = {}
        for name in (self._me, *(info.name for info in self._others)):
            # Torch has only one profiler for each process. Among workers that share a process, the first runs it.
            process = self._places[name]["host"], self._places[name]["pid"]
            orders[name] = {"options": options, "max_events": max_events, "torch": process not in taken}
            taken.add(process)
        self._mine = session.take_part(self._worker, self._me, self._id, orders[self._me])
        self._on_others(session.arm, lambda info: (self._me, self._id, orders[info.name]), strict=True)

    def _align(self, info: WorkerInfo, rounds: int) -> Alignment:
        def ask() -> int:
            there: list[int] = self._call(info, session.read_clock)
            return there[0]

        same_host: bool = self._places[info.name]["host"] == self._places[self._me]["host"]
        return align(trips(ask, rounds), same_host=same_host)

    def warm(self) -> None:
        with self._unheard() as mine:
            mine.warm()
            self._on_others(session.warm, lambda info: (self._id,))

    def record(self) -> None:
        """Begin the window."""
        self._steps = []
        with self._unheard() as mine:
            self._on_others(session.record, lambda info: (self._id,))
            mine.record()
            self._begin = self._mark = time.perf_counter_ns()

    def mark(self, name: str) -> None:
        """End a step here."""
        now = time.perf_counter_ns()
        if self._begin:
            self._steps.append((name, self._mark, now))
        self._mark = now

    def collect(self) -> Gathered:
        """End the window: stop recording everywhere, and fetch the recordings."""
        end = time.perf_counter_ns()
        begin, self._begin = self._begin, 0
        with self._unheard() as mine:
            mine.recorder.on = False
            stopped = self._on_others(session.stop, lambda info: (self._id,))
            mine.stop()
            parcels: dict[str, list[bytes]] = {}
            for name in stopped:
                blocks = self._fetch(self._members[name])
                if blocks is not None:
                    parcels[name] = blocks
            parcels[self._me] = [mine.fetch(number) for number in range(mine.packed(None) or 0)]
        if self._lost:
            listed = "; ".join(f"worker {name!r}: {reason}" for name, reason in self._lost.items())
            text = f"the profile lacks workers that were lost during it: {listed}"
            warnings.warn(text, RuntimeWarning, stacklevel=4)
        recordings, operators = self._unpack(parcels)
        return Gathered(
            home=self._me,
            home_thread=self._home_thread,
            begin=begin,
            end=end,
            recordings=recordings,
            operators=operators,
            steps=list(self._steps),
            lost=sorted(self._lost),
        )

    def _unpack(self, parcels: dict[str, list[bytes]]) -> tuple[list[Recording], list[Operator]]:
        """The recordings, this worker's first, and the operators in order of time."""
        recordings: list[Recording] = []
        rows: dict[str, list[dict[str, Any]]] = {}
        for name in sorted(parcels, key=lambda name: (name != self._me, self._members[name].id)):
            place, info = self._places[name], self._members[name]
            recording, found = unpack(name, info.id, place["host"], self._alignments[name], parcels[name])
            recordings.append(recording)
            rows[name] = found
        operators: list[Operator] = []
        for recording in recordings:
            together = [each for each in recordings if (each.host, each.pid) == (recording.host, recording.pid)]
            operators += operators_of(rows[recording.worker], recording, Owners(together))
        return recordings, sorted(operators, key=lambda operator: operator.begin)

    def close(self) -> None:
        """End all parts."""
        if self._mine is not None:
            self._mine.recorder.on = False
        self._on_others(session.disarm, lambda info: (self._id,))
        session.leave(self._worker, self._id)

    @contextmanager
    def _unheard(self) -> Iterator[session.Session]:
        """A context in which this thread's activity is not recorded."""
        mine = self._mine
        if mine is None:
            raise RuntimeError("the holder was not started")
        with mine.recorder.deaf():
            yield mine

    def _fetch(self, info: WorkerInfo) -> list[bytes] | None:
        """A worker's recording, as soon as it is packed; None if the worker is lost."""
        try:
            count = None
            while count is None:  # packing may take minutes: a worker is lost only if it does not answer
                count = self._call(info, session.packed, self._id, _ASK_EVERY)
            return [self._call(info, session.fetch, self._id, number) for number in range(count)]
        except BackhaulError as error:
            self._lose(info, error)
            return None

    def _call(self, info: WorkerInfo, function: Any, *args: Any) -> Any:
        return self._context.run(self._worker.agent.call, info, function, args, {}, _PATIENCE)

    def _on_others(
        self, function: Any, args: Callable[[WorkerInfo], tuple[Any, ...]] = lambda info: (), *, strict: bool = False
    ) -> dict[str, Any]:
        """Call the function on all other workers at once. Workers that are lost or have left are skipped from then on.

        ``strict``: raise such errors too.
        """
        futures: list[tuple[WorkerInfo, Any]] = []
        found: dict[str, Any] = {}
        errors: list[Exception] = []

        def attempt(info: WorkerInfo, act: Callable[[], Any]) -> Any:
            try:
                return act()
            except Exception as error:  # still call the others
                if strict or not isinstance(error, _LOSSES):
                    errors.append(error)
                self._lose(info, error)
                return None

        for info in self._others:
            if info.name not in self._lost:
                start = partial(self._worker.agent.call_async, info, function, args(info), {}, _PATIENCE)
                futures.append((info, attempt(info, partial(self._context.run, start))))
        for info, future in futures:
            if future is not None:
                value = attempt(info, future.wait)
                if info.name not in self._lost:
                    found[info.name] = value
        if errors:
            raise errors[0]
        return found

    def _lose(self, info: WorkerInfo, error: BaseException) -> None:
        self._lost.setdefault(info.name, str(error))
