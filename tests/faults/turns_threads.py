"""Threads and locks of a simulated world; see `turns`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any

import turns_world
from turns_world import Actor, Over, here, was_chosen


class Lock:
    """As `threading.Lock`. Without a world, and after its end, no thread waits for it."""

    __slots__ = ("__weakref__", "_held", "_waiters")

    def __init__(self) -> None:
        self._held = False
        self._waiters: list[Actor] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = turns_world.current
        if world is None or world.over:
            self._held = True
            return True
        if blocking:
            world.turn -= 1
            if world.turn <= 0:
                world.pause()
            deadline = None if timeout < 0 else world.now + timeout
            while self._held:
                me = world.running
                self._waiters.append(me)
                if not world.block(deadline) and not was_chosen(self._waiters, me) and self._held:
                    return False
        elif self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        if not self._held:
            if turns_world.current is None or turns_world.current.over:
                return
            raise RuntimeError("release unlocked lock")
        self._held = False
        if self._waiters and turns_world.current is not None:
            turns_world.current.wake(self._waiters.pop(0))

    def locked(self) -> bool:
        return self._held

    def __enter__(self) -> bool:
        """A fast `acquire`, because programs mostly use locks this way."""
        world = turns_world.current
        if world is not None:
            world.turn -= 1
            if world.turn <= 0:
                world.pause()
            if self._held:
                self.acquire()
        self._held = True
        return True

    def __exit__(self, *_: object) -> None:
        if self._waiters or not self._held:
            self.release()
        else:
            self._held = False

    def save(self) -> int:
        self.release()
        return 1

    def restore(self, _: int) -> None:
        self.acquire()


class RLock(Lock):
    """As `threading.RLock`."""

    __slots__ = ("_count", "_owner")

    def __init__(self) -> None:
        super().__init__()
        self._owner: Actor | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = None if turns_world.current is None else turns_world.current.running
        if self._count and self._owner is me:
            self._count += 1
            return True
        if not super().acquire(blocking, timeout):
            return False
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if self._count <= 0:
            self._count = 0
            self._owner = None
            super().release()

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

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiters: list[Actor] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = here()
        me = world.running
        deadline = world.deadline(timeout)
        count = self._lock.save()
        self._waiters.append(me)
        woken = world.block(deadline) or was_chosen(self._waiters, me)
        self._lock.restore(count)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        world = here()
        deadline = world.deadline(timeout)
        while not (found := predicate()):
            if deadline is not None and world.now >= deadline:
                break
            self.wait(None if deadline is None else deadline - world.now)
        return found

    def notify(self, n: int = 1) -> None:
        woken, self._waiters = self._waiters[:n], self._waiters[n:]
        if turns_world.current is not None:
            for actor in woken:
                turns_world.current.wake(actor)

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Actor] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        woken, self._waiters = self._waiters, []
        if turns_world.current is not None:
            for actor in woken:
                turns_world.current.wake(actor)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            world = here()
            me = world.running
            self._waiters.append(me)
            if not world.block(world.deadline(timeout)):
                was_chosen(self._waiters, me)
        return self._set


class Thread(threading.Thread):
    """A real thread, which runs when it has the turn."""

    _actor: Actor | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = here().number()
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        """A hash that does not depend on the address, so that sets of threads have the same order each time."""
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    def start(self) -> None:
        self._actor = here().spawn(self)
        super().start()

    def run(self) -> None:
        world, actor = here(), self._actor
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
        world = turns_world.current
        if world is None or world.over or world.join(self._actor, world.deadline(timeout)):
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
