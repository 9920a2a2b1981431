"""World: one thread of a program runs at a time, and a seed decides which one is next. See `turns`."""

from __future__ import annotations

import gc
import heapq
import itertools
import sys
import threading
import traceback
from random import Random
from threading import get_ident
from types import TracebackType
from typing import Any

_STEP = 2e-6  # the clock's advance for each switch and each reading of the clock
_LULL = 0.004  # the longest time that a runnable thread does not run
_LULLS = 60  # one lull in this many switches, on average
_LONGEST_TURN = 80  # a thread takes at most this many locks before another thread may run
_BUSY = (0.06, 5, 10)  # the same three values on a busy machine
_MOST_SWITCHES = 400_000
FIRST_DESCRIPTOR = 1 << 20


class StandStill(AssertionError):
    """All threads wait and nothing will wake one of them, or they run endlessly."""


class Over(BaseException):
    """Raised in the remaining threads when the program is over."""


class Actor:
    """A thread of a program."""

    __slots__ = ("blocked", "done", "go", "ident", "joiners", "name", "number", "serial", "woken")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.ident = 0
        self.go = threading.Lock()
        self.go.acquire()
        self.blocked = False
        self.woken = False
        self.serial = 0  # the number of its wait: timers of earlier waits are void
        self.done = False
        self.joiners: list[Actor] = []


class World:
    """See the module's docstring. ``with World(seed):`` makes the calling thread its first one.

    Only one world can exist at a time, inside `installed`.
    """

    def __init__(self, seed: int, *, busy: bool = False) -> None:
        """``busy``: runnable threads often have to wait, as on an overloaded machine."""
        self._lull, self._lulls, self._longest_turn = _BUSY if busy else (_LULL, _LULLS, _LONGEST_TURN)
        self.now = 1000.0
        self.switches = 0
        self.trace: list[tuple[int, int]] = []
        """The turns: the number of each thread that ran, and the time in microseconds."""
        self.over = False
        self.random = Random(f"world {seed}")
        self._ready: list[Actor] = []
        self._lingering: list[Actor] = []
        self._timers: list[tuple[float, int, Actor, int]] = []
        self._ids = itertools.count()
        self.number = itertools.count().__next__
        self._numbers = itertools.count()
        self._descriptors = itertools.count(FIRST_DESCRIPTOR)
        self.files: dict[int, Any] = {}
        self.turn = self._longest_turn
        """How many more locks the running thread may take before another thread may run."""
        self._actors: dict[Actor, threading.Thread | None] = {}
        self._main = Actor(next(self._numbers), "main")
        self.running = self._main
        self._failure: str | None = None
        self._ended: list[threading.Thread] = []
        self._collects = False

    def __enter__(self) -> World:
        global current
        if current is not None:
            raise RuntimeError("there is a world already")
        self._main.ident = get_ident()
        self._actors[self._main] = None
        self._collects = gc.isenabled()
        gc.disable()
        current = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the remaining threads."""
        global current
        self.over = True
        for actor in list(self._actors):
            if actor is not self._main:
                self.running = actor
                actor.go.release()
                self._main.go.acquire()
        self.running = self._main
        for thread in self._ended:
            threading.Thread.join(thread)
        if error is not None:
            traceback.clear_frames(error.__traceback__)
        gc.collect()  # the next program must not find remains of this one
        current = None
        if self._collects:
            gc.enable()

    # For threads.

    def deadline(self, timeout: float | None) -> float | None:
        return None if timeout is None else self.now + max(0.0, timeout)

    def clock(self) -> float:
        self.now += _STEP
        return self.now

    def block(self, deadline: float | None) -> bool:
        """Wait until another thread wakes this one, and return True; or until the deadline, and return False."""
        if self.over:
            raise Over
        me = self.running
        me.serial += 1
        me.blocked = True
        me.woken = False
        if deadline is not None:
            heapq.heappush(self._timers, (deadline, next(self._ids), me, me.serial))
        self._switch(me)
        return me.woken

    def wake(self, actor: Actor) -> None:
        if actor.blocked:
            actor.blocked = False
            actor.woken = True
            actor.serial += 1
            self._ready.append(actor)

    def pause(self) -> None:
        """Let another thread run, if there is one."""
        if not self.over:
            self.turn = 1 + int(self.random.random() * self._longest_turn)
            if self._ready:
                self._ready.append(self.running)
                self._switch(self.running)

    def linger(self) -> None:
        """Let others run until all of them wait. Time does not jump in between."""
        if self.over:
            raise Over
        self._lingering.append(self.running)
        self._switch(self.running)

    def spawn(self, thread: threading.Thread) -> Actor:
        actor = Actor(next(self._numbers), thread.name)
        self._actors[actor] = thread
        self._ready.append(actor)
        return actor

    def finish(self, actor: Actor) -> None:
        """End the thread of this actor, which is running now."""
        actor.done = True
        thread = self._actors.pop(actor)
        assert thread is not None
        self._ended.append(thread)
        for joiner in actor.joiners:
            self.wake(joiner)
        following = self._main if self.over else self._next()
        self.running = following
        following.go.release()

    def join(self, actor: Actor, deadline: float | None) -> bool:
        while not actor.done:
            actor.joiners.append(self.running)
            if not self.block(deadline) and not was_chosen(actor.joiners, self.running):
                return False
        return True

    def descriptor(self, file: object) -> int:
        number = next(self._descriptors)
        self.files[number] = file
        return number

    # The next one.

    def _switch(self, me: Actor) -> None:
        following = self._next()
        if following is not me:
            self.running = following
            following.go.release()
            me.go.acquire()
            if self.over:
                raise Over
        if me is self._main and self._failure is not None:
            failure, self._failure = self._failure, None
            raise StandStill(failure)

    def _next(self) -> Actor:
        self.switches += 1
        self.now += _STEP
        ready, timers = self._ready, self._timers
        if ready and self.random.random() * self._lulls < 1:
            self.now += self._lull * self.random.random()
        while timers and timers[0][0] <= self.now:
            self._ring(heapq.heappop(timers))
        if not ready and self._lingering:
            ready = self._lingering
        while not ready and timers:
            timer = heapq.heappop(timers)
            if self._ring(timer):
                self.now = max(self.now, timer[0])
        if not ready or self.switches > _MOST_SWITCHES:
            return self._stand_still()
        at = int(self.random.random() * len(ready)) if len(ready) > 1 else 0
        ready[at], ready[-1] = ready[-1], ready[at]
        chosen = ready.pop()
        self.trace.append((chosen.number, int(self.now * 1e6)))
        return chosen

    def _ring(self, timer: tuple[float, int, Actor, int]) -> bool:
        """Wake the thread of a timer. Returns False if it is awake already."""
        _, _, actor, serial = timer
        if not actor.blocked or actor.serial != serial:
            return False
        actor.blocked = False
        self._ready.append(actor)
        return True

    def _stand_still(self) -> Actor:
        what = f"after {self.switches} switches all threads wait for each other" if not self._ready else "no end"
        self._failure = f"{what}, at {self.now:.3f} s:\n{self.describe()}"
        self.switches = 0
        main = self._main
        for actors in (self._ready, self._lingering):
            if main in actors:
                actors.remove(main)
        main.blocked = False
        main.serial += 1
        return main

    def describe(self) -> str:
        """Where each thread is, as text."""
        frames = sys._current_frames()
        texts = []
        for actor in self._actors:
            frame = frames.get(actor.ident)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)[-9:])
            texts.append(f"{actor.number} {actor.name}{'' if actor.blocked else ' (could run)'}\n{stack}")
        return "\n".join(texts)


current: World | None = None


def here() -> World:
    if current is None:
        raise RuntimeError("a simulated thing is used outside of a world")
    return current


def was_chosen(waiters: list[Actor], actor: Actor) -> bool:
    """Whether a thread whose deadline has come was also woken at that moment. Otherwise it stops waiting."""
    if actor not in waiters:
        return True
    waiters.remove(actor)
    return False
