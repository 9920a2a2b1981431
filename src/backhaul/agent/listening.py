"""Listener: a thread that waits for messages about one thing, wherever they come.

The thread reads the lines of the workers that it expects messages from, and handles the messages itself. While it does
something else for long, such as a run of torch's engine, it is **away**: the watch thread reads those lines, and the
pool handles what comes. A thread that is about to block says so at once (`Listeners.step_away`); otherwise ticks
notice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from backhaul.agent.activity import Note
from backhaul.agent.line import Line, named
from backhaul.agent.observing import Queued, Starts, Stops
from backhaul.agent.waiting import Vigil, Vigils
from backhaul.errors import ProtocolError
from backhaul.wire.decoder import Envelope

if TYPE_CHECKING:
    from backhaul.agent.calling import Calling
    from backhaul.agent.serving import Handler, Serving
    from backhaul.agent.watch import Watch


class Listener:
    """What has arrived for one thread, and what the thread does. `add` and `wake` are for all threads."""

    def __init__(self, vigil: Vigil, ranks: Callable[[], Collection[int]], note: Note) -> None:
        self.vigil = vigil
        self.note = note
        """What the thread handles, for those who look."""
        self.ranks = ranks
        """The workers that messages are expected from."""
        self.arrived: deque[tuple[Line, Envelope]] = deque()
        self.waits = False
        """The thread waits for messages."""
        self.turn = 0
        """Counts the times that it has begun to do something else."""
        self.seen = -1
        """The turn that the last tick has found it at."""
        self.known_ranks: Collection[int] = ()
        self.known: list[Calling] = []
        """The lines to those workers, as they were at the last wait."""
        self.lock = threading.Lock()
        # Guarded by lock:
        self.away = False
        self.lines: list[Calling] = []
        """What is read for it while it is away."""
        self._thread = threading.get_ident()

    def add(self, line: Line, envelope: Envelope) -> bool:
        """A message has come, read by whichever thread. False if the thread is away."""
        with self.lock:
            if self.away:
                return False
            self.arrived.append((line, envelope))
        self.wake()
        return True

    def wake(self) -> None:
        """End the wait of the thread."""
        if threading.get_ident() != self._thread:
            self.vigil.wake()

    def is_mine(self) -> bool:
        """Whether the calling thread is the one that listens."""
        return threading.get_ident() == self._thread


class Listeners:
    """The threads of a worker that listen, each for messages about one thing. Thread-safe."""

    def __init__(
        self,
        serving: Serving,
        watch: Watch,
        vigils: Vigils,
        lines_to: Callable[[Iterable[int]], list[Calling]],
        handlers: Mapping[type[Any], Handler],
    ) -> None:
        """``lines_to(ranks)`` are the open lines to these workers; ``handlers`` is the table of the agent."""
        self._serving = serving
        self._watch = watch
        self._vigils = vigils
        self._lines_to = lines_to
        self._handlers = handlers
        self._observers = serving.observers
        self._listeners: dict[int, Listener] = {}

    @contextmanager
    def listen(self, about: int, ranks: Callable[[], Collection[int]]) -> Iterator[Listener]:
        """Inside, the calling thread gets the messages of these workers about this that come where replies do."""
        vigil = self._vigils.take()
        listener = self._listeners[about] = Listener(vigil, ranks, self._serving.state.note)
        if self._watch.asleep:
            self._watch.wake()  # to notice if the thread stays away
        try:
            yield listener
        finally:
            del self._listeners[about]
            self._come_back(listener)
            self._vigils.give_back(vigil)
            if self._observers:
                for _ in listener.arrived:
                    self._observers.emit(Stops(began=False))

    def hear(self, listener: Listener) -> None:
        """Handle what has arrived, one message after the other."""
        note = listener.note
        before = note.handles  # its run waits for what has arrived, if there is one
        while listener.arrived:
            try:
                line, envelope = listener.arrived.popleft()
            except IndexError:  # a tick has just given them to the pool
                return
            note.handles = (line.peer, envelope, monotonic(), before)
            try:
                if self._observers:
                    self._handle_observed(line, envelope)
                else:
                    self._serving.handle(line, envelope)
            finally:
                note.handles = before

    def _handle_observed(self, line: Line, envelope: Envelope) -> None:
        self._observers.emit(Starts(**named(line, envelope)))
        self._serving.handle(line, envelope)
        self._observers.emit(Stops())

    def wait(self, listener: Listener, done: Callable[[], bool], seconds: float) -> None:
        """Wait until something comes for the thread that listens, it is woken, or time is up.

        The thread reads everything that comes; messages that it listens for are in ``listener.arrived`` then. Returns
        at once if ``done()``.
        """
        if listener.away:
            self._come_back(listener)
        listener.waits = True
        try:
            ranks = listener.ranks()
            lines: Collection[Calling] = listener.known
            if ranks != listener.known_ranks or not all(line.lost is None for line in lines):
                lines = listener.known = self._lines_to(ranks)
                listener.known_ranks = ranks if len(lines) == len(ranks) else ()
            if self._watch.unread:
                lines = {*lines, *self._watch.unread}
            listener.vigil.wait(lines, lambda: bool(listener.arrived) or done(), seconds)
        finally:
            listener.turn += 1
            listener.waits = False
        if self._watch.unread:
            self._watch.take_over()
        if self._watch.asleep:
            self._watch.wake()  # to notice if the thread stays away

    def opened(self, line: Calling) -> None:
        """A line has been opened: threads that listen for that peer read it, too, also those that wait already."""
        for listener in list(self._listeners.values()):
            if line.peer.id not in listener.ranks():
                continue
            with listener.lock:
                away = listener.away
                if away:
                    listener.lines.append(line)
                    self._watch.keep_reading(line)
            if not away:
                listener.wake()

    def step_away(self, listener: Listener) -> None:
        """The thread that listens does something else now, perhaps for long: others handle its messages."""
        with listener.lock:
            if listener.away:
                return
            listener.away = True
            lines = listener.lines = self._lines_to(listener.ranks())
            arrived = list(listener.arrived)
            listener.arrived.clear()
            for line in lines:
                self._watch.keep_reading(line)
        for each, envelope in arrived:
            self._serving.hand_over(each, envelope)

    def _come_back(self, listener: Listener) -> None:
        with listener.lock:
            listener.away = False
            for line in listener.lines:
                self._watch.stop_reading(line)
            listener.lines = []

    def tick(self) -> bool:
        """Called by the watch thread: notice listeners that are away. False if there is none that could be."""
        active = False
        for listener in list(self._listeners.values()):
            if listener.waits or listener.away:
                continue
            active = True
            if listener.seen == listener.turn:
                self.step_away(listener)
            listener.seen = listener.turn
        return active

    def read_later(self, ranks: Iterable[int]) -> None:
        """Messages may come from these workers that no thread listens for any more: have them read all the same."""
        for line in self._lines_to(ranks):
            self._watch.read_once(line)

    def deliver(self, line: Line, envelope: Envelope) -> None:
        """Give a message that came among replies to the thread that listens for it, or to the pool."""
        backward = getattr(envelope.message, "backward", None)
        listener = None if backward is None else self._listeners.get(backward.id)
        if listener is not None:
            if self._serving.guard is not None:
                self._serving.guard(line, envelope)
            if self._observers:
                self._observers.emit(Queued())
            if not listener.add(line, envelope):
                self._serving.hand_over(line, envelope)
            return
        if type(envelope.message) not in self._handlers:
            raise ProtocolError(f"a {type(envelope.message).__name__} where requests are expected")
        self._serving.run_apart(line, envelope)
