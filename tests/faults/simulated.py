"""Simulated threads: of all threads of a program one runs at a time, and a seed decides which one is next.

A `World` replaces what the platform gives to the modules of the package: threads, locks, clocks, descriptors that are
waited for, and random numbers. The code of the package itself is left as it is. So a program that runs in a world makes
the same steps in the same order whenever it is run with the same seed, on any machine and under any load.

- A thread runs until it waits, or until a lock is about to be taken and the seed says that another thread goes first.
- Time stands still while threads run, but for a moment at each step. When all threads wait, the clock jumps to the next
  deadline. So nothing takes longer than the processor needs for it, also if it waits for ten seconds.
- When all threads wait and no deadline will come, the program stands still for good: `StandStill` is raised in the
  thread that made the world, with all stacks.
- The garbage collector runs only when the program calls it, since finalizers send messages.

Torch's engine runs a backward pass of tensors on the CPU on the thread that calls it, so it needs nothing here. Not
simulated are stores that wait (`HashStore.get` of a missing key) and event loops; a thread that blocks there keeps all
others from running. Who runs programs has to limit their time, as `chaos` does.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import os
import secrets
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from threading import get_ident
from types import ModuleType, TracebackType
from typing import Any

import torch

from backhaul.agent.line import Line

_STEP = 2e-6  # of the clock, for each switch and each look at it
_LULL = 0.004  # the longest that a thread does not get the processor although it could run
_LULLS = 40  # there is one in so many switches
_LONGEST_TURN = 60  # so many locks a thread takes at most before another one may be next
_MOST_SWITCHES = 400_000
_FIRST_DESCRIPTOR = 1 << 20

_allocate: Callable[[], Any] = threading.Lock  # the real one


class StandStill(AssertionError):
    """All threads wait, and nothing will wake one of them; or they go on and on."""


class Over(BaseException):
    """Raised in threads that are left when the program is over."""


class _Actor:
    """A thread of a program."""

    __slots__ = ("blocked", "done", "go", "ident", "joiners", "name", "number", "serial", "woken")

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.ident = 0
        self.go = _allocate()
        self.go.acquire()
        self.blocked = False
        self.woken = False
        self.serial = 0  # of its waits: a timer of an earlier one is void
        self.done = False
        self.joiners: list[_Actor] = []


class World:
    """See the module's docstring. ``with World(seed):`` makes the calling thread its first one.

    One at a time, and inside `installed`.
    """

    def __init__(self, seed: int) -> None:
        self.now = 1000.0
        self.switches = 0
        self.trace: list[tuple[int, int]] = []
        """Which thread has run when: its number, and microseconds."""
        self.over = False
        self.random = Random(f"world {seed}")
        self._ready: list[_Actor] = []
        self._timers: list[tuple[float, int, _Actor, int]] = []
        self._ids = itertools.count()
        self.number = itertools.count().__next__
        self._numbers = itertools.count()
        self._descriptors = itertools.count(_FIRST_DESCRIPTOR)
        self.files: dict[int, _File] = {}
        self._turn = _LONGEST_TURN
        self._actors: dict[_Actor, Thread | None] = {}
        self._main = _Actor(next(self._numbers), "main")
        self.running = self._main
        self._failure: str | None = None
        self._ended: list[Thread] = []
        self._collects = False

    def __enter__(self) -> World:
        global _world
        if _world is not None:
            raise RuntimeError("there is a world already")
        self._main.ident = get_ident()
        self._actors[self._main] = None
        self._collects = gc.isenabled()
        gc.disable()
        _world = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the threads that are left."""
        global _world
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
        gc.collect()  # what is left of this program must not be found by the next one
        _world = None
        if self._collects:
            gc.enable()

    # For threads.

    def clock(self) -> float:
        self.now += _STEP
        return self.now

    def block(self, deadline: float | None) -> bool:
        """Wait until another thread wakes this one: True; or until the deadline: False."""
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

    def wake(self, actor: _Actor) -> None:
        if actor.blocked:
            actor.blocked = False
            actor.woken = True
            actor.serial += 1
            self._ready.append(actor)

    def may_pause(self) -> None:
        """Let another thread run, if it is time."""
        self._turn -= 1
        if self._turn <= 0 and not self.over:
            self._turn = 1 + int(self.random.random() * _LONGEST_TURN)
            if self._ready:
                self._ready.append(self.running)
                self._switch(self.running)

    def spawn(self, thread: Thread) -> _Actor:
        actor = _Actor(next(self._numbers), thread.name)
        self._actors[actor] = thread
        self._ready.append(actor)
        return actor

    def finish(self, actor: _Actor) -> None:
        """The thread of this actor ends now, and has the turn."""
        actor.done = True
        thread = self._actors.pop(actor)
        assert thread is not None
        self._ended.append(thread)
        for joiner in actor.joiners:
            self.wake(joiner)
        following = self._main if self.over else self._next()
        self.running = following
        following.go.release()

    def join(self, actor: _Actor, deadline: float | None) -> bool:
        while not actor.done:
            actor.joiners.append(self.running)
            if not self.block(deadline) and not _was_chosen(actor.joiners, self.running):
                return False
        return True

    def descriptor(self, file: _File) -> int:
        number = next(self._descriptors)
        self.files[number] = file
        return number

    # The next one.

    def _switch(self, me: _Actor) -> None:
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

    def _next(self) -> _Actor:
        self.switches += 1
        self.now += _STEP
        ready, timers = self._ready, self._timers
        if ready and self.random.random() * _LULLS < 1:
            self.now += _LULL * self.random.random()
        while timers and timers[0][0] <= self.now:
            self._ring(heapq.heappop(timers))
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

    def _ring(self, timer: tuple[float, int, _Actor, int]) -> bool:
        """Have the thread of a timer go on. False if it has done so already."""
        _, _, actor, serial = timer
        if not actor.blocked or actor.serial != serial:
            return False
        actor.blocked = False
        self._ready.append(actor)
        return True

    def _stand_still(self) -> _Actor:
        what = f"after {self.switches} switches all threads wait for each other" if not self._ready else "no end"
        self._failure = f"{what}, at {self.now:.3f} s:\n{self.describe()}"
        self.switches = 0
        main = self._main
        if main in self._ready:
            self._ready.remove(main)
        main.blocked = False
        main.serial += 1
        return main

    def describe(self) -> str:
        """Where each thread is, for people."""
        frames = sys._current_frames()
        texts = []
        for actor in self._actors:
            frame = frames.get(actor.ident)
            stack = "" if frame is None else "".join(traceback.format_stack(frame)[-9:])
            texts.append(f"{actor.number} {actor.name}{'' if actor.blocked else ' (could run)'}\n{stack}")
        return "\n".join(texts)


_world: World | None = None


def _here() -> World:
    if _world is None:
        raise RuntimeError("a simulated thing is used outside of a world")
    return _world


def _deadline(world: World, timeout: float | None) -> float | None:
    return None if timeout is None else world.now + max(0.0, timeout)


def _was_chosen(waiters: list[_Actor], actor: _Actor) -> bool:
    """Whether a thread that stops waiting at its deadline was to be woken at the same moment. Else it waits no more."""
    if actor not in waiters:
        return True
    waiters.remove(actor)
    return False


# Locks.


class Lock:
    """As `threading.Lock`. Without a world, and when it is over, nobody waits for it."""

    __slots__ = ("__weakref__", "_held", "_waiters")

    def __init__(self) -> None:
        self._held = False
        self._waiters: list[_Actor] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = _world
        if world is None or world.over:
            self._held = True
            return True
        if blocking:
            world.may_pause()
            deadline = None if timeout < 0 else world.now + timeout
            while self._held:
                me = world.running
                self._waiters.append(me)
                if not world.block(deadline) and not _was_chosen(self._waiters, me) and self._held:
                    return False
        elif self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            if _world is None or _world.over:
                return
            raise RuntimeError("release unlocked lock")
        self._held = False
        if self._waiters and _world is not None:
            _world.wake(self._waiters.pop(0))

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        world = _world
        if world is not None:
            world.may_pause()
        if not self._held:
            self._held = True
            return True
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def save(self) -> int:
        self.release()
        return 1

    def restore(self, _: int) -> None:
        self.acquire()


class RLock:
    """As `threading.RLock`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: _Actor | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = None if _world is None else _world.running
        if self._count and self._owner is me:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._count = 0
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def save(self) -> int:
        count, self._count = self._count, 1
        self.release()
        return count

    def restore(self, count: int) -> None:
        self.acquire()
        self._count = count


class Condition:
    """As `threading.Condition`."""

    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiters: list[_Actor] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = _here()
        me = world.running
        deadline = _deadline(world, timeout)
        count = self._lock.save()
        self._waiters.append(me)
        woken = world.block(deadline) or _was_chosen(self._waiters, me)
        self._lock.restore(count)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        world = _here()
        deadline = _deadline(world, timeout)
        while not (found := predicate()):
            if deadline is not None and world.now >= deadline:
                break
            self.wait(None if deadline is None else deadline - world.now)
        return found

    def notify(self, n: int = 1) -> None:
        woken, self._waiters = self._waiters[:n], self._waiters[n:]
        if _world is not None:
            for actor in woken:
                _world.wake(actor)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[_Actor] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        woken, self._waiters = self._waiters, []
        if _world is not None:
            for actor in woken:
                _world.wake(actor)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            world = _here()
            me = world.running
            self._waiters.append(me)
            if not world.block(_deadline(world, timeout)):
                _was_chosen(self._waiters, me)
        return self._set


# Threads.


class Thread(threading.Thread):
    """A real thread, which runs when it has the turn."""

    _actor: _Actor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = _here().number()
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        """Not its address: sets of threads have the same order each time."""
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    def start(self) -> None:
        self._actor = _here().spawn(self)
        super().start()

    def run(self) -> None:
        world, actor = _here(), self._actor
        assert actor is not None
        actor.ident = get_ident()
        actor.go.acquire()
        try:
            if not world.over:
                super().run()
        except Over:
            pass
        finally:
            world.finish(actor)

    def join(self, timeout: float | None = None) -> None:
        if self._actor is None:
            raise RuntimeError("cannot join thread before it is started")
        world = _world
        if world is None or world.over or world.join(self._actor, _deadline(world, timeout)):
            super().join(timeout)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.done


class Timer(Thread):
    """As `threading.Timer`."""

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        super().__init__(target=self._wait, name="timer")
        self._interval = interval
        self._function = function
        self._finished = Event()

    def cancel(self) -> None:
        self._finished.set()

    def _wait(self) -> None:
        if not self._finished.wait(self._interval):
            self._function()


# Descriptors.


class _File:
    """What a descriptor stands for."""

    def __init__(self) -> None:
        self.number = _here().descriptor(self)
        self.pending = 0
        self.hung_up = False
        self.pollers: list[_Poller] = []

    def events(self) -> int:
        return (select.EPOLLIN if self.pending or self.hung_up else 0) | (select.EPOLLRDHUP if self.hung_up else 0)

    def changed(self) -> None:
        for poller in self.pollers:
            poller.notice(self.number)

    def close(self) -> None:
        if self.number >= 0:
            for poller in list(self.pollers):
                poller.forget(self)
            if _world is not None:
                _world.files.pop(self.number, None)
            self.number = -1


class _Socket:
    """One end of a pair: as much of it as a bell needs."""

    def __init__(self) -> None:
        self.file = _File()
        self.peer: _Socket

    def setblocking(self, blocking: bool) -> None:
        if blocking:
            raise NotImplementedError("a simulated socket does not wait")

    def fileno(self) -> int:
        return self.file.number

    def send(self, data: bytes) -> int:
        file = self.peer.file
        if file.number < 0 or file.hung_up:
            raise BrokenPipeError("the other end is closed")
        file.pending += len(data)
        file.changed()
        return len(data)

    def recv(self, size: int) -> bytes:
        if not self.file.pending:
            if self.file.hung_up:
                return b""
            raise BlockingIOError("nothing is there")
        taken = min(size, self.file.pending)
        self.file.pending -= taken
        return b"!" * taken

    def shutdown(self, _: int) -> None:
        self.peer.file.hung_up = True
        self.peer.file.changed()

    def close(self) -> None:
        self.file.close()
        self.peer.file.hung_up = True
        self.peer.file.changed()


def _socketpair() -> tuple[_Socket, _Socket]:
    a, b = _Socket(), _Socket()
    a.peer, b.peer = b, a
    return a, b


class _Poller:
    """What poll and epoll have in common."""

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}
        self._sleeper: _Actor | None = None

    def register(self, descriptor: int, events: int = select.POLLIN) -> None:
        file = _here().files.get(descriptor)
        if file is None:
            raise OSError(9, f"there is no descriptor {descriptor}")
        if self not in file.pollers:
            file.pollers.append(self)
        self._wanted[descriptor] = events
        self.notice(descriptor)

    def modify(self, descriptor: int, events: int) -> None:
        if descriptor not in self._wanted:
            raise FileNotFoundError(2, f"descriptor {descriptor} is not registered")
        self._wanted[descriptor] = events
        self.notice(descriptor)

    def unregister(self, descriptor: int) -> None:
        del self._wanted[descriptor]
        file = None if _world is None else _world.files.get(descriptor)
        if file is not None:
            file.pollers.remove(self)

    def forget(self, file: _File) -> None:
        """Its descriptor is being closed."""
        self._wanted.pop(file.number, None)
        file.pollers.remove(self)

    def notice(self, descriptor: int) -> None:
        if self._sleeper is not None and _world is not None and self._look_at(descriptor):
            _world.wake(self._sleeper)

    def close(self) -> None:
        for descriptor in list(self._wanted):
            self.unregister(descriptor)

    def _look_at(self, descriptor: int) -> int:
        file = _here().files.get(descriptor)
        return 0 if file is None else file.events() & self._wanted.get(descriptor, 0)

    def _look(self) -> list[tuple[int, int]]:
        return [(number, found) for number in list(self._wanted) if (found := self._look_at(number))]

    def _wait(self, timeout: float | None) -> list[tuple[int, int]]:
        world = _here()
        found = self._look()
        if not found and (timeout is None or timeout > 0):
            self._sleeper = world.running
            try:
                world.block(_deadline(world, timeout))
            finally:
                self._sleeper = None
            found = self._look()
        return found


class _Poll(_Poller):
    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        gone = milliseconds is None or milliseconds < 0
        return self._wait(None if gone else milliseconds / 1000)  # type: ignore[operator]

    def forget(self, file: _File) -> None:
        """A closed descriptor is an event."""
        super().forget(file)
        if self._sleeper is not None and _world is not None:
            _world.wake(self._sleeper)


class _Epoll(_Poller):
    def __enter__(self) -> _Epoll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(self, descriptor: int, events: int = select.EPOLLIN) -> None:
        if descriptor in self._wanted:
            raise FileExistsError(17, f"descriptor {descriptor} is registered")
        super().register(descriptor, events)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        found = self._wait(None if timeout is None or timeout < 0 else timeout)
        for number, _ in found:
            if self._wanted[number] & select.EPOLLONESHOT:
                self._wanted[number] = 0
        return found


# What modules of the package see.


class _Place:
    """A module of the platform, with some names replaced."""

    def __init__(self, real: ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _clock() -> float:
    return time.monotonic() if _world is None else _world.clock()


def _nanoseconds() -> int:
    return int(_clock() * 1e9)


def _sleep(seconds: float) -> None:
    world = _here()
    world.block(world.now + seconds)


def _current_thread() -> threading.Thread:
    return threading.current_thread()


def _eventfd(_: int, __: int = 0) -> int:
    return _File().number


def _eventfd_write(descriptor: int, value: int) -> None:
    file = _here().files[descriptor]
    file.pending += value
    file.changed()


def _eventfd_read(descriptor: int) -> int:
    file = _here().files[descriptor]
    if not file.pending:
        raise BlockingIOError("nothing is there")
    value, file.pending = file.pending, 0
    return value


def _close(descriptor: int) -> None:
    if descriptor < _FIRST_DESCRIPTOR:
        os.close(descriptor)
    elif _world is not None and (file := _world.files.get(descriptor)) is not None:
        file.close()


_PLACES: dict[ModuleType, Any] = {
    threading: _Place(
        threading, Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Thread=Thread, Timer=Timer
    ),
    time: _Place(
        time,
        monotonic=_clock,
        perf_counter=_clock,
        time=_clock,
        perf_counter_ns=_nanoseconds,
        monotonic_ns=_nanoseconds,
        time_ns=_nanoseconds,
        sleep=_sleep,
    ),
    select: _Place(select, poll=_Poll, epoll=_Epoll),
    socket: _Place(socket, socketpair=_socketpair),
    os: _Place(os, eventfd=_eventfd, eventfd_read=_eventfd_read, eventfd_write=_eventfd_write, close=_close),
    secrets: _Place(
        secrets,
        token_hex=lambda size: _here().random.randbytes(size).hex(),
        token_bytes=lambda size: _here().random.randbytes(size),
        randbits=lambda bits: _here().random.getrandbits(bits),
    ),
}


def _hash_of_line(line: Line) -> int:
    """Not its address: sets of lines have the same order each time."""
    return line.descriptor


@contextmanager
def installed(*packages: str) -> Iterator[None]:
    """Have the modules of these packages use what is here instead of the platform. All of them have to be loaded."""
    changed: list[tuple[dict[str, Any], str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in packages or module is None:
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, ModuleType) and value in _PLACES:
                changed.append((vars(module), key, value))
                vars(module)[key] = _PLACES[value]
    Line.__hash__ = _hash_of_line  # type: ignore[method-assign]
    wait = torch.futures.Future.wait

    def wait_simulated(self: Any) -> Any:
        """Torch would wait where no other thread gets the turn."""
        world = _world
        if world is not None and not world.over and not self.done():
            done = Event()
            torch._C.Future.add_done_callback(self, lambda _: done.set())
            done.wait()
        return wait(self)

    torch.futures.Future.wait = wait_simulated  # type: ignore[method-assign]
    try:
        yield
    finally:
        del Line.__hash__
        torch.futures.Future.wait = wait  # type: ignore[method-assign]
        for names, key, value in changed:
            names[key] = value
