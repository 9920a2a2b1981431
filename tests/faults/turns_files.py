"""Descriptors of a simulated world, and waits for them; see `turns`."""

from __future__ import annotations

import os
import select

import turns_world
from turns_world import FIRST_DESCRIPTOR, Actor, here


class File:
    """The object behind a descriptor."""

    def __init__(self) -> None:
        self.number = here().descriptor(self)
        self.pending = 0
        self.hung_up = False
        self.pollers: list[Poller] = []

    def events(self) -> int:
        return (select.EPOLLIN if self.pending or self.hung_up else 0) | (select.EPOLLRDHUP if self.hung_up else 0)

    def changed(self) -> None:
        for poller in self.pollers:
            poller.notice(self.number)

    def close(self) -> None:
        if self.number >= 0:
            for poller in list(self.pollers):
                poller.forget(self)
            if turns_world.current is not None:
                turns_world.current.files.pop(self.number, None)
            self.number = -1


class _Socket:
    """One end of a socket pair, with the methods that a bell needs."""

    def __init__(self) -> None:
        self.file = File()
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


def socketpair() -> tuple[_Socket, _Socket]:
    a, b = _Socket(), _Socket()
    a.peer, b.peer = b, a
    return a, b


class Poller:
    """The base of poll and epoll."""

    def __init__(self) -> None:
        self._wanted: dict[int, int] = {}
        self._sleeper: Actor | None = None

    def register(self, descriptor: int, events: int = select.POLLIN) -> None:
        file = here().files.get(descriptor)
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
        file = None if turns_world.current is None else turns_world.current.files.get(descriptor)
        if file is not None:
            file.pollers.remove(self)

    def forget(self, file: File) -> None:
        """Called when its descriptor is closed."""
        self._wanted.pop(file.number, None)
        file.pollers.remove(self)

    def notice(self, descriptor: int) -> None:
        if self._sleeper is not None and turns_world.current is not None and self._look_at(descriptor):
            turns_world.current.wake(self._sleeper)

    def close(self) -> None:
        for descriptor in list(self._wanted):
            self.unregister(descriptor)

    def _look_at(self, descriptor: int) -> int:
        file = here().files.get(descriptor)
        return 0 if file is None else file.events() & self._wanted.get(descriptor, 0)

    def _look(self) -> list[tuple[int, int]]:
        files = here().files
        return [
            (number, found)
            for number, events in self._wanted.items()
            if events and (file := files.get(number)) is not None and (found := file.events() & events)
        ]

    def _wait(self, timeout: float | None) -> list[tuple[int, int]]:
        found = self._look()
        if not found and (timeout is None or timeout > 0):
            self._sleep(timeout)
            found = self._look()
        return found

    def _sleep(self, timeout: float | None) -> None:
        world = here()
        self._sleeper = world.running
        try:
            world.block(world.deadline(timeout))
        finally:
            self._sleeper = None


class Poll(Poller):
    """Files know of a poll only while a thread sleeps in it, because it is never closed."""

    def register(self, descriptor: int, events: int = select.POLLIN) -> None:
        self._wanted[descriptor] = events

    def poll(self, milliseconds: float | None = None) -> list[tuple[int, int]]:
        return self._wait(None if milliseconds is None or milliseconds < 0 else milliseconds / 1000)

    def forget(self, file: File) -> None:
        """A closed descriptor counts as an event."""
        file.pollers.remove(self)
        if self._sleeper is not None and turns_world.current is not None:
            turns_world.current.wake(self._sleeper)

    def _sleep(self, timeout: float | None) -> None:
        files = [file for number in self._wanted if (file := here().files.get(number)) is not None]
        for file in files:
            file.pollers.append(self)
        try:
            super()._sleep(timeout)
        finally:
            for file in files:
                if self in file.pollers:
                    file.pollers.remove(self)


class _Ready(File):
    """The descriptor of an epoll: readable while one of its files has an event."""

    def __init__(self, epoll: Epoll) -> None:
        super().__init__()
        self._epoll = epoll

    def events(self) -> int:
        return select.EPOLLIN if self._epoll.is_ready() else 0


class Epoll(Poller):
    def __init__(self) -> None:
        super().__init__()
        self._file: _Ready | None = None  # made when another poll wants to watch this one

    def fileno(self) -> int:
        if self._file is None:
            self._file = _Ready(self)
        return self._file.number

    def is_ready(self) -> bool:
        return bool(self._look())

    def notice(self, descriptor: int) -> None:
        super().notice(descriptor)
        if self._file is not None and turns_world.current is not None and self._look_at(descriptor):
            self._file.changed()

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Epoll:
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


def eventfd(_: int, __: int = 0) -> int:
    return File().number


def eventfd_write(descriptor: int, value: int) -> None:
    file = here().files[descriptor]
    file.pending += value
    file.changed()


def eventfd_read(descriptor: int) -> int:
    file = here().files[descriptor]
    if not file.pending:
        raise BlockingIOError("nothing is there")
    value, file.pending = file.pending, 0
    return value


def close(descriptor: int) -> None:
    if descriptor < FIRST_DESCRIPTOR:
        os.close(descriptor)
    elif turns_world.current is not None and (file := turns_world.current.files.get(descriptor)) is not None:
        file.close()
