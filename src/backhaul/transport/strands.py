"""Strands: further connections of a channel between two hosts, which carry parts of large tensors.

Theory of operation
-------------------
A channel has one connection, on which every frame begins and ends. A *wide* channel also has strands. Each strand has a
thread, so that several processors encrypt, copy and decrypt one tensor. A slice on a strand is announced on the
channel's own connection (`wire.frames`), in its place among the other slices. So the receiver knows the memory for a
slice before it reads the bytes, and reads them directly into that memory.

On a strand, all numbers little-endian::

    "d"  size (8)  bytes       a slice
    "a"  0 (8)                 acknowledges a slice: one for each slice, in their order

The sender keeps the end of a frame back until all of its slices are acknowledged. So a frame is complete when its last
byte has come, small messages can pass between its slices, and at most one frame has slices on strands.

The side that opened the channel opens the strands, when it sends or receives the first large frame. The peer recognises
them by the token from its welcome (`greeting`). A strand that cannot be opened, or that ends while it is idle, is not
used. If a strand breaks otherwise, bytes are missing, and the channel ends.

A strand's thread never waits for one direction only, so two workers that send to each other cannot deadlock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Literal

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.transport.base import ChannelClosed, Way
from backhaul.transport.pipe import Pipe
from backhaul.transport.sockets import way_of

_log = logging.getLogger(__name__)

WIDE = 4 << 20
"""The smallest frame, in bytes, that uses strands."""

_HEAD = struct.Struct("<cQ")
_SLICE, _ACKNOWLEDGED = b"d", b"a"
_QUEUED = 3  # the most slices that a strand has: one is arriving, one is being sent, one is next
_CHUNK = 256 * 1024  # bytes to drop at once
_FORKED = 1.0  # seconds to wait for a lock: in a forked child, a thread that does not exist there may hold it
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL


class Bell:
    """Wakes a thread that polls it. Thread-safe, also during `close`. Call `open` before a thread polls it."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._lock = threading.Lock()

    def open(self) -> None:
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def ring(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.eventfd_write(self._descriptor, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)

    def close(self) -> None:
        held = self._lock.acquire(timeout=_FORKED)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        if held:
            self._lock.release()


State = Literal["new", "open", "gone"]


class Strand:
    """One further connection, and its thread."""

    def __init__(self, number: int, arrived: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        self._number = number
        self._arrived = arrived
        self._broke = broke
        self._lock = threading.Lock()
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        self._pipe: Pipe | None = None
        self._ends = False
        # Guarded by _lock:
        self._abandoned = False  # whether its thread, which is still opening the connection, must free everything
        self.state: State = "new"
        self._outgoing: deque[memoryview] = deque()
        self._kept: deque[object] = deque()  # keeps the memory of unacknowledged slices alive
        self._expected: deque[tuple[memoryview | None, int]] = deque()
        self._filled = 0
        self._announced = 0
        # Used only by its thread:
        self._head = memoryview(bytearray(_HEAD.size))
        self._head_size = 0
        self._left = 0  # bytes of a slice that have not come yet
        self._place: memoryview | None = None
        self._starved = False  # whether a slice comes that was not announced yet

    # The next methods are for the threads that write and read the channel.

    def start(self, open_pipe: Callable[[int], Pipe]) -> bool:
        """Open the connection on a new thread, and serve it. Returns False if there is no thread or descriptor left."""
        name = f"backhaul-strand-{self._number}"
        thread = threading.Thread(target=self._run, args=(open_pipe,), name=name, daemon=True)
        try:
            self._bell.open()
            thread.start()
        except (RuntimeError, OSError) as error:
            _log.warning("a further connection, for large tensors, was not opened: %s", error)
            self.state = "gone"
            return False
        self._thread = thread
        return True

    @property
    def started(self) -> bool:
        return self._thread is not None

    @property
    def free(self) -> bool:
        return self.state == "open" and len(self._kept) < _QUEUED

    @property
    def idle(self) -> bool:
        """Whether all slices that it was given have arrived."""
        return not self._kept

    def give(self, data: memoryview, keep: object) -> None:
        """Send a slice. Its memory must not change before it is acknowledged."""
        with self._lock:
            self._kept.append(keep)
            self._outgoing += (memoryview(_HEAD.pack(_SLICE, len(data))), data)
        if self.state == "gone":
            self._broke(ChannelClosed("the connection has ended"))
        self._bell.ring()

    def copy(self) -> None:
        """Copy the slices that are not sent yet, so that the memory of their tensors may change."""
        with self._lock:
            self._outgoing = deque(memoryview(bytes(each)) for each in self._outgoing)

    def expect(self, place: memoryview | None, size: int) -> None:
        with self._lock:
            self._announced += 1
            self._expected.append((place, size))
        if self.state == "gone":
            self._broke(ChannelClosed("the peer announced a part of a tensor on a connection that has ended"))
        self._bell.ring()

    @property
    def filled(self) -> bool:
        """Whether all expected slices have come."""
        return self._filled == self._announced

    def way(self) -> Way:
        pipe = self._pipe
        return Way() if pipe is None or self.state != "open" else way_of(pipe.socket)

    def shutdown(self) -> None:
        self._ends = True
        pipe = self._pipe
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.socket.shutdown(socket.SHUT_RDWR)
        self._bell.ring()

    def join(self) -> None:
        """End its thread. A forked child has no such thread, and leaves the connection to the parent."""
        thread = self._thread
        if thread is not None and thread.is_alive():
            with self._lock:
                self._abandoned = self._pipe is None
            self.shutdown()
            if not self._abandoned:
                thread.join()

    def close(self) -> None:
        """Free the connection. Call `join` first."""
        if not self._abandoned:
            self._free()

    def _free(self) -> None:
        if self._pipe is not None:
            self._pipe.socket.close()
        self._bell.close()

    # The next methods run on its thread.

    def _run(self, open_pipe: Callable[[int], Pipe]) -> None:
        pipe: Pipe | None = None
        problem: Exception | None = None
        try:
            pipe = open_pipe(self._number)
        except (OSError, ChannelClosed, AuthenticationError, ProtocolError) as error:
            problem = error
        with self._lock:
            self._pipe = pipe
            if self._abandoned:
                self._free()
                return
            if pipe is not None:
                self.state = "open"
        if pipe is None:
            if not self._ends:
                _log.warning("a further connection, for large tensors, was not opened: %s", problem)
            self._end(ChannelClosed(f"the connection was not opened: {problem}"))
            return
        try:
            while not self._ends:
                sent, received = self._send(pipe), self._receive(pipe)
                if not sent and not received:
                    self._wait(pipe)
        except (OSError, ValueError, ChannelClosed, ProtocolError) as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Stop using this strand. If slices were on their way, the channel is broken."""
        with self._lock:
            self.state = "gone"
            broken = bool(self._kept or self._expected or self._left)
        if isinstance(error, ProtocolError) or broken:
            self._broke(error)

    def _send(self, pipe: Pipe) -> bool:
        """Write as much as possible. Returns False if nothing could be written."""
        if not pipe.flush():
            return False
        with self._lock:
            if not self._outgoing:
                return False
            data = self._outgoing[0]
            taken = pipe.write(data)
            if taken == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = data[taken:]
        return taken > 0

    def _receive(self, pipe: Pipe) -> bool:
        """Read what has come. Returns False if nothing came, or if it cannot be read yet."""
        if self._left:
            return self._receive_slice(pipe)
        count = pipe.read(self._head[self._head_size :]) if self._head_size < _HEAD.size else 0
        self._head_size += count
        if self._head_size < _HEAD.size:
            return count > 0
        kind, size = _HEAD.unpack(self._head)
        if kind == _ACKNOWLEDGED:
            with self._lock:
                if not self._kept:
                    raise ProtocolError("the peer acknowledged more slices than were sent")
                self._kept.popleft()
            self._head_size = 0
            self._arrived()
            return True
        if kind != _SLICE:
            raise ProtocolError(f"unknown kind {kind!r} on a connection for large tensors")
        with self._lock:
            self._starved = not self._expected
            if self._starved:
                return False
            self._place, expected = self._expected[0]
        if size != expected or not size:
            raise ProtocolError(f"a slice of {size} bytes, where the peer announced one of {expected}")
        self._left, self._head_size = size, 0
        return True

    def _receive_slice(self, pipe: Pipe) -> bool:
        place = self._place
        if place is None:  # the decoder does not want the bytes: discard them
            place = memoryview(bytearray(min(self._left, _CHUNK)))
            count = pipe.read(place)
        else:
            count = pipe.read(place)
            self._place = place[count:]
        self._left -= count
        if not self._left:
            self._place = None
            with self._lock:
                self._expected.popleft()
                self._filled += 1
                self._outgoing.append(memoryview(_HEAD.pack(_ACKNOWLEDGED, 0)))
        return count > 0

    def _wait(self, pipe: Pipe) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        writes = bool(self._outgoing) or not pipe.flush()
        events = (0 if self._starved else select.POLLIN) | (select.POLLOUT if writes else 0)
        if events:
            poll.register(pipe.socket, events)
        poll.poll()
        self._bell.hush()


class Strands:
    """All strands of one channel, numbered from 1. They fill memory of the decoder with the slices that come."""

    def __init__(self, count: int, open_pipe: Callable[[int], Pipe] | None = None) -> None:
        """``open_pipe`` opens the connection with a given number. Without it the peer opens them: see `attach`."""
        self.problem: Exception | None = None
        """Why the channel is broken."""
        self.on_announced: Callable[[int], None] = lambda size: None
        self.on_broken: Callable[[], None] = lambda: None
        self.on_closed: Callable[[], None] = lambda: None
        self._open_pipe = open_pipe
        self._progress = Bell()
        self._lock = threading.Lock()  # held while strands are started or closed
        self._closed = False
        self._all = [Strand(number, self._progress.ring, self._broke) for number in range(1, count + 1)]

    def attach(self, number: int, pipe: Pipe) -> bool:
        """Use a connection that the peer has opened. False if the number is invalid, or has a connection already."""
        with self._lock:
            if self._closed or not 0 < number <= len(self._all) or self._all[number - 1].started:
                return False
            self._progress.open()
            return self._all[number - 1].start(lambda _: pipe)

    def want(self) -> None:
        """Open the strands, because a large frame leaves or has come. The next large frame can use them."""
        opens, self._open_pipe = self._open_pipe, None
        if opens is None:
            return
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # no descriptors left: the strands log that
                    self._progress.open()
                for strand in self._all:
                    strand.start(opens)

    # Sending.

    def free(self) -> tuple[int, Strand] | None:
        """A strand that can take another slice, with its number; None if there is none."""
        for number, strand in enumerate(self._all, 1):
            if strand.free:
                return number, strand
        return None

    @property
    def idle(self) -> bool:
        """Whether all slices have arrived."""
        return all(strand.idle for strand in self._all)

    def await_progress(self, sock: socket.socket, *, read: bool, timeout: float | None) -> bool:
        """Wait until a slice has arrived or, if ``read``, ``sock`` is readable. Returns False at the timeout."""
        poll = select.poll()
        poll.register(self._progress, select.POLLIN)
        try:
            poll.register(sock, select.POLLIN if read else 0)
        except (OSError, ValueError) as error:
            raise ChannelClosed("closed here") from error
        found = dict(poll.poll(None if timeout is None else timeout * 1000))
        self.check()
        if found.get(sock.fileno(), 0) & _ENDED:
            raise ChannelClosed("the connection ended")
        self._progress.hush()
        return bool(found)

    def check(self) -> None:
        """Raise `ChannelClosed` if a strand has broken."""
        if self.problem is not None:
            raise ChannelClosed(f"one of the connections for large tensors has broken: {self.problem}")

    def copy(self) -> None:
        for strand in self._all:
            strand.copy()

    def way(self, own: Way) -> Way:
        ways = [own, *(strand.way() for strand in self._all)]
        return Way(sum(way.arrived for way in ways), sum(way.outstanding for way in ways))

    # Receiving.

    def expect(self, strand: int, place: memoryview | None, size: int) -> None:
        if strand > len(self._all):
            raise ProtocolError(f"a slice on connection {strand}, and there are {len(self._all)} besides this one")
        self.on_announced(size)
        self._all[strand - 1].expect(place, size)

    def finish(self, size: int) -> None:
        if not all(strand.filled for strand in self._all):
            raise ProtocolError("a message that ends before its slices on other connections")
        if size >= WIDE:
            self.want()

    # The end.

    def _broke(self, error: Exception) -> None:
        self.problem = self.problem or error
        self.on_broken()
        self._progress.ring()

    def shutdown(self) -> None:
        for strand in self._all:
            strand.shutdown()
        self._progress.ring()

    def close(self) -> None:
        """End and free all strands. The threads of the strands must not call it."""
        held = self._lock.acquire(timeout=_FORKED)
        self._closed = True
        if held:
            self._lock.release()
        self.on_closed()
        for strand in self._all:
            strand.join()
        for strand in self._all:  # only now, when no other strand's thread can wake it
            strand.close()
        self._progress.close()
