"""Simulated threads: one thread of a program runs at a time, and a seed decides which one is next.

A `World` replaces what the platform provides to the modules of the package: threads, locks, clocks, polled descriptors
and random numbers. The code of the package itself is unchanged. So a program in a world makes the same steps in the
same order whenever it is run with the same seed, on any machine and under any load.

- A thread runs until it waits, or until a lock is about to be taken and the seed says that another thread goes first.
- Time stands still while threads run, but for a moment at each step. When all threads wait, the clock jumps to the next
  deadline. So nothing takes longer than the processor needs for it, also if it waits for ten seconds.
- When all threads wait and no deadline will come, the program stands still for good: `StandStill` is raised in the
  thread that made the world, with all stacks.
- The garbage collector runs only when the program calls it, since finalizers send messages.

Torch's engine runs a backward pass of tensors on the CPU on the thread that calls it, so it needs nothing here. Not
simulated are stores that wait (`HashStore.get` of a missing key) and event loops; a thread that blocks there keeps all
others from running. So limit the time of programs, as `chaos` does.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import turns_files as files
import turns_world
from turns_threads import Condition, Event, Lock, RLock, Thread, Timer
from turns_world import StandStill, World, here

from backhaul.agent.line import Line

__all__ = ["StandStill", "World", "installed"]


class _Place:
    """A module of the platform, with some names replaced."""

    def __init__(self, real: ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _clock() -> float:
    return time.monotonic() if turns_world.current is None else turns_world.current.clock()


def _nanoseconds() -> int:
    return int(_clock() * 1e9)


def _sleep(seconds: float) -> None:
    world = here()
    world.block(world.now + seconds)


_PLACES: dict[ModuleType, Any] = {
    threading: _Place(threading, Lock=Lock, RLock=RLock, Condition=Condition, Event=Event, Thread=Thread, Timer=Timer),
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
    select: _Place(select, poll=files.Poll, epoll=files.Epoll),
    socket: _Place(socket, socketpair=files.socketpair),
    os: _Place(
        os, eventfd=files.eventfd, eventfd_read=files.eventfd_read, eventfd_write=files.eventfd_write, close=files.close
    ),
    secrets: _Place(
        secrets,
        token_hex=lambda size: here().random.randbytes(size).hex(),
        token_bytes=lambda size: here().random.randbytes(size),
        randbits=lambda bits: here().random.getrandbits(bits),
    ),
}


def _hash_of_line(line: Line) -> int:
    """A hash that does not depend on the address, so that sets of lines have the same order each time."""
    return line.descriptor


@contextmanager
def installed(*packages: str) -> Iterator[None]:
    """Make the modules of these packages use the simulation instead of the platform. All of them must be loaded."""
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
        """Wait in the simulation. Torch's own wait would not let another thread run."""
        world = turns_world.current
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
