"""Listener: a thread that waits for messages about one topic, on whatever line they come.

The thread reads the lines of the workers that it expects messages from, and handles the messages itself. While it is
busy with something long, such as a run of torch's engine, it is **away**: the watch thread reads those lines, and the
pool handles the messages. A thread that is about to block calls `Listeners.step_away`. Otherwise the ticks of the watch
thread notice that it is away.
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
    from backhaul.agent.reading import Reading
    from backhaul.agent.serving import Handler, Serving
    from backhaul.agent.watch import Watch


class Listener:
    """The messages that have arrived for one thread, and the thread's state. Any thread may call `add` and `wake`."""

    def __init__(self, vigil: Vigil, ranks: Callable[[], Collection[int]], note: Note) -> None:
        self.vigil = vigil
        self.note = note
        """What the thread is handling, for inspection."""
        self.ranks = ranks
        """Returns the ranks of the workers that messages are expected from."""
        self.arrived: deque[tuple[Line, Envelope]] = deque()
        self.waits = False
        """The thread is waiting for messages."""
        self.turn = 0
        """How often the thread has stopped waiting to do something else."""
        self.seen = -1
        """The turn at the last tick."""
        self.known_ranks: Collection[int] = ()
        self.known: list[Reading] = []
        """The lines to the workers in ``known_ranks``, as they were at the last wait."""
        self.lock = threading.Lock()
        # Guarded by lock:
        self.away = False
        self.lines: list[Reading] = []
        """The lines that the watch thread reads while the listener is away."""
        self._thread = threading.get_ident()

    def add(self, line: Line, envelope: Envelope) -> bool:
        """Hand a message to the listening thread. False if that thread is away. Any thread may call this."""
        with self.lock:
            if self.away:
                return False
            self.arrived.append((line, envelope))
        self.wake()
        return True

    def wake(self) -> None:
        """End the wait of the listening thread. Does nothing on that thread itself."""
        if threading.get_ident() != self._thread:
            self.vigil.wake()

    def is_mine(self) -> bool:
        """Whether the calling thread is the listening thread."""
        return threading.get_ident() == self._thread


class Listeners:
    """The listening threads of a worker, each for messages about one topic. Thread-safe."""

    def __init__(
        self,
        serving: Serving,
        watch: Watch,
        vigils: Vigils,
        lines_to: Callable[[Iterable[int]], list[Reading]],
        handlers: Mapping[type[Any], Handler],
    ) -> None:
        """``lines_to(ranks)`` returns the open lines to these workers. ``handlers`` is the agent's table."""
        self._serving = serving
        self._watch = watch
        self._vigils = vigils
        self._lines_to = lines_to
        self._handlers = handlers
        self._observers = serving.observers
        self._listeners: dict[int, Listener] = {}

    @contextmanager
    def listen(self, about: int, ranks: Callable[[], Collection[int]]) -> Iterator[Listener]:
        """A context in which the calling thread gets the messages about one topic that come on the calling lines.

        ``ranks()`` are the workers that send them. Call `wait` and `hear` in turn.
        """
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
        """Handle the messages that have arrived, one after the other."""
        note = listener.note
        before = note.handles  # the request that this thread runs, if any; it waits for these messages
        while listener.arrived:
            try:
                line, envelope = listener.arrived.popleft()
            except IndexError:  # a tick has just handed the messages to the pool
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
        """Wait until a message comes for the listening thread, the thread is woken, or time is up.

        The thread reads everything that comes. The messages that it listens for are then in ``listener.arrived``: call
        `hear` next. Returns at once if ``done()``.
        """
        if listener.away:
            self._come_back(listener)
        listener.waits = True
        try:
            ranks = listener.ranks()
            lines: Collection[Reading] = listener.known
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

    def opened(self, line: Reading) -> None:
        """Have all threads that listen for a peer read its new line, including threads that already wait."""
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
        """Let other threads handle the messages: the listening thread is now busy, perhaps for long."""
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
        """Notice listeners that are away. False if no listener is busy. The watch thread calls this."""
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
        """Have late messages from these workers read, although no thread listens for them any more."""
        for line in self._lines_to(ranks):
            self._watch.read_once(line)

    def deliver(self, line: Line, envelope: Envelope) -> None:
        """Give a message that came among replies to the thread that listens for it, or to the pool.

        Raises `ProtocolError` if no handler takes such a message.
        """
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
