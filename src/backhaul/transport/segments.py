"""Segments: memory that two processes of one host share, for large tensors between them.

The sender copies a tensor into a segment, and the receiver's tensor lies right there: one copy in, none out. What
makes that fast is that the memory is *warm*, since touching a page for the first time costs more than copying
it. So segments are kept and used again.

A segment is a sealed ``memfd`` that its maker passes to one peer, as a descriptor over their unix socket, along with
the first frame that lies in it. Both number the segments of a direction in the order in which they are passed. After
its data comes a page of control bytes that says, without a message, whose it is::

    byte  value
    0     1 while the receiver has a tensor there; it writes 0 when that is gone
    1     1 once the sender has given the segment up: the receiver's mapping goes with its last tensor

`Lending` is the sender's end of one channel, `Borrowing` the receiver's, and `Budget` what all channels of a worker
share. Segments are much larger than what lies in them, since only touched pages take memory: those are what the budget
counts. Idle ones are given back to the system by punching a hole, which needs no word to the receiver either. A tensor
that the receiver keeps for long is its own in the end: the sender forgets that segment and makes another.

Neither end keeps a descriptor: mappings do not need one, and a process has few. The sender closes its own once the
frame that it goes with is out.

When a process forks, its received tensors become private memory in the child, as all others are, and the
segments are not used again.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backhaul.devices.segments import DeviceBorrowing, DeviceLending, is_page
from backhaul.errors import ProtocolError
from backhaul.wire.frames import Frame, place

_log = logging.getLogger(__name__)

THRESHOLD = 256 * 1024
"""Buffers from this size on go through segments."""

MAX_PASSED = 16
"""Descriptors that may come with one frame."""

_MAX_LIVING = 256  # segments that one end of a channel has
_MAX_SEGMENTS = 8192  # that it has ever passed: the receiver may keep what lies there, and have them all mapped
_CONTROL = mmap.PAGESIZE
_SMALLEST = 16 << 20
_IDLE_SECONDS = 4.0
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_REMOVE = 9  # punches a hole

# The functions of the C library and their types: constants.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def are_possible() -> bool:
    """Whether this system has what segments need."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class _Mapping:
    """A segment as one process sees it."""

    __slots__ = ("_size", "_unmap", "address", "capacity", "control")

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = 0
        # Not with the module mmap: its objects keep a descriptor each.
        place = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if place == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._size = size
        self._unmap = _libc.munmap
        self.address: int = place
        self.capacity = size - _CONTROL
        self.control = (ctypes.c_ubyte * 2).from_address(place + self.capacity)

    def __del__(self) -> None:
        if self._size:
            self._unmap(self.address, self._size)


class _Segment:
    """A segment at its maker."""

    __slots__ = ("descriptor", "id", "mapping", "used_at", "warm")

    def __init__(self, id: int, capacity: int) -> None:
        size = capacity + _CONTROL
        self.id = id
        descriptor = os.memfd_create("backhaul", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.mapping = _Mapping(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor: int | None = descriptor  # until it is passed
        self.warm = 0  # bytes that have been touched
        self.used_at = 0.0

    @property
    def is_free(self) -> bool:
        return not self.mapping.control[0]

    def cool(self) -> None:
        """Give its memory back to the system. It must be free."""
        _libc.madvise(self.mapping.address, self.mapping.capacity, _MADV_REMOVE)
        self.warm = 0

    def forget(self) -> None:
        self.mapping.control[1] = 1
        if self.is_free:  # since a moment ago, perhaps: the receiver has not seen that the segment is given up
            self.cool()


class Budget:
    """How much memory the segments of all channels of a worker may take. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.on_use: Callable[[], None] = lambda: None
        """Called when there is something to `trim` again. The lock is held."""
        self.lock = threading.Lock()
        # Guarded by lock:
        self.warm = 0
        self.lendings: weakref.WeakSet[Lending] = weakref.WeakSet()
        self._device_lendings: weakref.WeakSet[DeviceLending] = weakref.WeakSet()

    def segments(self) -> list[_Segment]:
        """All of them. Under the lock."""
        return [segment for lending in list(self.lendings) for segment in lending.segments]

    def memory(self) -> dict[str, int]:
        """Bytes of the segments that have been touched, and how many segments there are."""
        with self.lock:
            return {"bytes": self.warm, "segments": len(self.segments())}

    def trim(self) -> float:
        """Free what has not been used for a while; after how many seconds there will be more, or infinity."""
        now = time.monotonic()
        with self.lock:
            soonest = min((lending.trim(now) for lending in list(self.lendings)), default=float("inf"))
            devices = list(self._device_lendings)
        return min([soonest, *(lending.trim(now) for lending in devices)])

    def lend_device_memory(self, limit: int) -> DeviceLending:
        """Segments of device memory for one end of a channel, of up to that many bytes. They are trimmed, too."""
        lending = DeviceLending(limit, _log.warning, self.on_use)
        with self.lock:
            self._device_lendings.add(lending)
        return lending


class Lending:
    """The segments that one end of a channel makes. One thread at a time may `place`."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._count = 0
        self.segments: list[_Segment] = []  # guarded by the budget's lock
        self._expected = 0  # the largest buffer that was sent without a segment
        self._passed: list[int] = []  # descriptors that go, or went, with the last frame
        self._process = os.getpid()
        with budget.lock:
            budget.lendings.add(self)

    def place(self, frame: Frame) -> tuple[Frame, list[int]]:
        """The frame with its large buffers in segments, as far as there are any, and descriptors to be passed with it.

        The descriptors are this object's own, and open until the next call: the frame has to be out by then.
        """
        self._close_passed()
        ids = []
        passed: list[int] = []
        for piece in frame.pieces[1:]:
            size = len(piece)
            segment = self._take(size) if size >= THRESHOLD and len(passed) < MAX_PASSED else None
            if segment is None:
                ids.append(0)
                continue
            if segment.descriptor is not None:
                passed.append(segment.descriptor)
                self._passed.append(segment.descriptor)
                segment.descriptor = None
            source = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            ctypes.memmove(segment.mapping.address, source, size)
            ids.append(segment.id)
        return (place(frame, ids), passed) if any(ids) else (frame, passed)

    def _take(self, size: int) -> _Segment | None:
        """A segment with room for that much, which is now in use."""
        with self._budget.lock:
            free = [each for each in self.segments if each.is_free and each.mapping.capacity >= size]
            # The one that is warm enough and no warmer; else the one that is warmest.
            warm = [each for each in free if each.warm >= size]
            segment = min(warm, key=_warmth) if warm else max(free, key=_warmth, default=None)
            if segment is None and size > self._expected:
                # Fresh memory is slower than the stream: the first one of its size does not come back, perhaps.
                self._expected = size
                return None
            if size > (0 if segment is None else segment.warm) and not self._reserve(size, segment):
                return None
            if segment is None:
                segment = self._make(size)
                if segment is None:
                    return None
            if not self._budget.warm:
                self._budget.on_use()
            self._budget.warm += max(0, size - segment.warm)
            segment.warm = max(segment.warm, size)
            segment.mapping.control[0] = 1
            segment.used_at = time.monotonic()
            return segment

    def _reserve(self, size: int, segment: _Segment | None) -> bool:
        """See that the budget has room for a segment to grow warm, or for a new one."""
        more = size - (0 if segment is None else segment.warm)
        for other in sorted(self._budget.segments(), key=_last_use):
            if self._budget.warm + more <= self._budget.size:
                break
            if other is not segment and other.warm and other.is_free:
                self._budget.warm -= other.warm
                other.cool()
        return self._budget.warm + more <= self._budget.size

    def _make(self, size: int) -> _Segment | None:
        if len(self.segments) >= _MAX_LIVING or self._count >= _MAX_SEGMENTS:
            return None
        capacity = _SMALLEST
        while capacity < size:
            capacity *= 4
        try:
            segment = _Segment(self._count + 1, capacity)
        except OSError:  # out of descriptors or memory: the stream will do
            return None
        self._count += 1
        self.segments.append(segment)
        return segment

    def trim(self, now: float) -> float:
        """See `Budget.trim`, whose lock is held."""
        soonest = float("inf")
        for segment in list(self.segments):
            if not segment.warm:
                continue
            left = segment.used_at + _IDLE_SECONDS - now
            if left > 0:
                soonest = min(soonest, left)
                continue
            self._budget.warm -= segment.warm
            if segment.is_free:
                segment.cool()
            else:
                self.segments.remove(segment)
                segment.forget()
        return soonest

    def _close_passed(self) -> None:
        for descriptor in self._passed:
            os.close(descriptor)
        self._passed = []

    def close(self) -> None:
        """Forget all segments: the peer is gone, or keeps what it has."""
        self._close_passed()
        if os.getpid() != self._process:
            # A forked child lets go of what is its parent's. The lock may be held by a thread that it does not have.
            self.segments = []
            return
        with self._budget.lock:
            self._budget.lendings.discard(self)
            for segment in self.segments:
                self._budget.warm -= segment.warm
                segment.forget()
            self.segments = []


def _warmth(segment: _Segment) -> int:
    return segment.warm


def _last_use(segment: _Segment) -> float:
    return segment.used_at


class _Lease:
    """A buffer in a segment, for as long as somebody has it."""

    __slots__ = ("__weakref__", "_borrowing", "_id", "_mapping", "retired", "size")

    def __init__(self, mapping: _Mapping, size: int, borrowing: Borrowing, id: int) -> None:
        self._mapping = mapping
        self._borrowing = borrowing
        self._id = id
        self.size = size
        self.retired = False
        """A forked process has it too: it is not given back."""
        _leases[builtins.id(self)] = weakref.ref(self)

    @property
    def address(self) -> int:
        return self._mapping.address

    def __del__(self) -> None:
        _leases.pop(builtins.id(self), None)
        control = self._mapping.control
        if not self.retired:
            control[0] = 0
        # If the sender has used it again before it gave it up, another lease is to come.
        if self.retired or (control[1] and not control[0]):
            self._borrowing.forget(self._id)


_leases: dict[int, weakref.ref[_Lease]] = {}
"""All of this process. Its operations are atomic: a finalizer may come in between."""


def _living() -> list[_Lease]:
    found = (reference() for reference in list(_leases.values()))
    return [lease for lease in found if lease is not None]


class Borrowing:
    """The segments that the peer of a channel has passed. For one thread at a time."""

    def __init__(self) -> None:
        self._count = 0
        self._mappings: dict[int, _Mapping] = {}
        self._devices = DeviceBorrowing()

    def add(self, descriptors: Iterable[int]) -> None:
        """Segments that have come, and are now this object's. Raises `ProtocolError`."""
        mine = list(descriptors)
        try:
            while mine:
                descriptor = mine[0]
                if is_page(descriptor):
                    if len(mine) < 2:
                        raise ProtocolError("a segment of device memory without its memory")
                    page, memory = mine[:2]
                    del mine[:2]
                    self._devices.add(page, memory)
                    continue
                self._count += 1
                if self._count > _MAX_SEGMENTS:
                    raise ProtocolError(f"more than {_MAX_SEGMENTS} segments")
                self._mappings[self._count] = _map(descriptor)
                os.close(mine.pop(0))
        finally:
            for descriptor in mine:
                os.close(descriptor)

    def lend(self, id: int, size: int) -> Any:
        """An object over the first bytes of a segment, which has them as its buffer. Raises `ProtocolError`."""
        mapping = self._mappings.get(id)
        if mapping is None or size > mapping.capacity:
            raise ProtocolError(f"{size} bytes in segment {id}, which has not been passed or is smaller")
        array = (ctypes.c_ubyte * size).from_address(mapping.address)
        array.lease = _Lease(mapping, size, self, id)  # type: ignore[attr-defined]
        return array

    def lend_device(self, id: int, size: int) -> Any:
        """Data in a segment of device memory. Raises `ProtocolError`."""
        return self._devices.lend(id, size)

    def forget(self, id: int) -> None:
        self._mappings.pop(id, None)


def _map(descriptor: int) -> _Mapping:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        # One that could shrink would kill whoever reads it.
        if seals & _SEALS != _SEALS or size <= _CONTROL:
            raise ProtocolError("a descriptor that is no sealed segment")
        return _Mapping(descriptor, size)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"a descriptor that is no segment: {error}") from error


class _Fork(threading.local):
    """The fork that a thread is about to make: what its leases have at that time."""

    copies: Mapping[_Lease, bytes] = {}


_fork = _Fork()  # of a thread: a fork copies the process


def _before_fork() -> None:
    """What both processes will have is not to be used again.

    It is copied here, since the parent may write to its own before the child has had a look.
    """
    copies = {}
    for lease in _living():
        lease.retired = True
        with contextlib.suppress(MemoryError):
            copies[lease] = ctypes.string_at(lease.address, lease.size)
    _fork.copies = copies


def _after_fork_in_parent() -> None:
    _fork.copies = {}


def _after_fork_in_child() -> None:
    """Put memory of its own in the place of what it shares."""
    copies, _fork.copies = _fork.copies, {}
    for lease in _living():
        lease.retired = True  # also one that came since
        with contextlib.suppress(MemoryError):
            data = copies.get(lease) or ctypes.string_at(lease.address, lease.size)
            size = -(-lease.size // mmap.PAGESIZE) * mmap.PAGESIZE
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            place = _libc.mmap(lease.address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if place != _MAP_FAILED:
                ctypes.memmove(lease.address, data, lease.size)


if are_possible():
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
