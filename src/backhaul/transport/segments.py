"""Segments: memory that two processes of one host share, for large tensors between them.

The sender copies a tensor into a segment, and the receiver's tensor uses that memory directly: one copy in, none out.
This is fast because the memory is *warm*: touching a page for the first time costs more than copying it. So segments
are kept and used again.

A segment is a sealed ``memfd`` that its maker passes to one peer, as a descriptor over their unix socket, along with
the first frame that uses it. Both sides number the segments of a direction in the order in which they are passed. After
the data comes a page of control bytes. They say, without a message, which side owns the segment::

    byte  value
    0     1 while the receiver has a tensor there; it writes 0 when the tensor is gone
    1     1 after the sender has given the segment up: the receiver unmaps it with its last tensor

`Lending` is the sender's end of one channel, `Borrowing` the receiver's end, and all channels of a worker share one
`Budget`. Segments are much larger than their data, since only touched pages take memory; the budget counts these pages.
The memory of idle segments is given back to the system by punching a hole, which needs no message to the receiver
either. If the receiver keeps a tensor for long, the sender gives that segment up and makes another.

Neither end keeps a descriptor: mappings do not need one, and the number of a process's descriptors is limited. The
sender closes its descriptor when the frame that carries it is sent.

When a process forks, its received tensors become private memory in the child, like all other memory, and the segments
are not used again.
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
"""Buffers of at least this size go through segments."""

MAX_PASSED = 16
"""The most descriptors that may come with one frame."""

_MAX_LIVING = 256  # the most segments that one end of a channel has at a time
_MAX_SEGMENTS = 8192  # the most that it passes in all: the receiver may keep their tensors, and so all mappings
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
    """Whether this system supports segments."""
    return hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")


class _Mapping:
    """The mapping of a segment in one process."""

    __slots__ = ("_size", "_unmap", "address", "capacity", "control")

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = 0
        # The module mmap is not used here, because each of its objects keeps a descriptor.
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
    """A segment, at its maker."""

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
        self.descriptor: int | None = descriptor  # None after it was passed
        self.warm = 0  # the number of touched bytes
        self.used_at = 0.0

    @property
    def is_free(self) -> bool:
        return not self.mapping.control[0]

    def cool(self) -> None:
        """Give its memory back to the system. The segment must be free."""
        _libc.madvise(self.mapping.address, self.mapping.capacity, _MADV_REMOVE)
        self.warm = 0

    def forget(self) -> None:
        self.mapping.control[1] = 1
        if self.is_free:  # the receiver may have freed it just before, without seeing that it is given up
            self.cool()


class Budget:
    """The memory that the segments of all channels of a worker may take. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.on_use: Callable[[], None] = lambda: None
        """Called when memory is in use again, so that `trim` must be called later. The lock is held."""
        self.lock = threading.Lock()
        # Guarded by lock:
        self.warm = 0
        self.lendings: weakref.WeakSet[Lending] = weakref.WeakSet()
        self._device_lendings: weakref.WeakSet[DeviceLending] = weakref.WeakSet()
        self._warnings: set[str] = set()

    def segments(self) -> list[_Segment]:
        """The segments of all channels. The caller holds the lock."""
        return [segment for lending in list(self.lendings) for segment in lending.segments]

    def memory(self) -> dict[str, int]:
        """The number of touched bytes of all segments, and the number of segments."""
        with self.lock:
            return {"bytes": self.warm, "segments": len(self.segments())}

    def trim(self) -> float:
        """Free segments that were not used for a while. Returns the seconds until the next call is due, or infinity."""
        now = time.monotonic()
        with self.lock:
            soonest = min((lending.trim(now) for lending in list(self.lendings)), default=float("inf"))
            devices = list(self._device_lendings)
        return min([soonest, *(lending.trim(now) for lending in devices)])

    def lend_device_memory(self, limit: int) -> DeviceLending:
        """Segments of device memory for one end of a channel, of up to ``limit`` bytes. `trim` trims them too."""
        lending = DeviceLending(limit, self._warn, self.on_use)
        with self.lock:
            self._device_lendings.add(lending)
        return lending

    def _warn(self, text: str) -> None:
        """Log a warning, but not again for the other channels."""
        if text not in self._warnings:
            self._warnings.add(text)
            _log.warning("%s", text)


class Lending:
    """The segments that one end of a channel lends to the other. One thread at a time may call `place`."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._count = 0
        self.segments: list[_Segment] = []  # guarded by the budget's lock
        self._expected = 0  # the size of the largest buffer that was sent without a segment
        self._passed: list[int] = []  # the descriptors of the last frame
        self._process = os.getpid()
        with budget.lock:
            budget.lendings.add(self)

    def place(self, frame: Frame) -> tuple[Frame, list[int]]:
        """The frame, with its large buffers in segments as far as segments are available, and the descriptors to pass.

        This object closes the descriptors at the next call, so the frame must be sent by then.
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
        """A segment with room for ``size`` bytes, marked as used; None if none is available."""
        with self._budget.lock:
            free = [each for each in self.segments if each.is_free and each.mapping.capacity >= size]
            # The least warm segment that is warm enough; otherwise the warmest.
            warm = [each for each in free if each.warm >= size]
            segment = min(warm, key=_warmth) if warm else max(free, key=_warmth, default=None)
            if segment is None and size > self._expected:
                # New memory is slower than the stream, so the first buffer of a size takes the stream: it may be the
                # only one.
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
        """Make room in the budget for a segment, or a new one, of ``size`` warm bytes. False if there is no room."""
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
        except OSError:  # out of descriptors or memory: use the stream
            return None
        self._count += 1
        self.segments.append(segment)
        return segment

    def trim(self, now: float) -> float:
        """See `Budget.trim`. The caller holds the budget's lock."""
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
        """Give all segments up: the peer is gone, or keeps what it has."""
        self._close_passed()
        if os.getpid() != self._process:
            # A forked child drops the parent's segments. It must not take the lock: a thread that exists only in the
            # parent may hold it.
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
    """A buffer in a segment. Deleting the lease frees the segment."""

    __slots__ = ("__weakref__", "_borrowing", "_id", "_mapping", "retired", "size")

    def __init__(self, mapping: _Mapping, size: int, borrowing: Borrowing, id: int) -> None:
        self._mapping = mapping
        self._borrowing = borrowing
        self._id = id
        self.size = size
        self.retired = False
        """Whether a forked process has the buffer too, so that the segment must not be used again."""
        _leases[builtins.id(self)] = weakref.ref(self)

    @property
    def address(self) -> int:
        return self._mapping.address

    def __del__(self) -> None:
        _leases.pop(builtins.id(self), None)
        control = self._mapping.control
        if not self.retired:
            control[0] = 0
        # If the sender has used the segment again before it gave it up, another lease will follow.
        if self.retired or (control[1] and not control[0]):
            self._borrowing.forget(self._id)


_leases: dict[int, weakref.ref[_Lease]] = {}
"""The leases of this process. Only atomic operations are used on it, because a finalizer may run at any time."""


def _living() -> list[_Lease]:
    found = (reference() for reference in list(_leases.values()))
    return [lease for lease in found if lease is not None]


class Borrowing:
    """The segments that the peer of a channel has passed. Not thread-safe."""

    def __init__(self) -> None:
        self._count = 0
        self._mappings: dict[int, _Mapping] = {}
        self._devices = DeviceBorrowing()

    def add(self, descriptors: Iterable[int]) -> None:
        """Take over the descriptors of received segments, map them, and close them. Raises `ProtocolError`."""
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
        """An object whose buffer is the first ``size`` bytes of a segment. Raises `ProtocolError`."""
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

    def close(self) -> None:
        """Unmap the segments that are not in use. The others go with their tensors."""
        self._mappings = {}
        self._devices = DeviceBorrowing()


def _map(descriptor: int) -> _Mapping:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        # A segment that could shrink would kill this process when it reads there (SIGBUS).
        if seals & _SEALS != _SEALS or size <= _CONTROL:
            raise ProtocolError("a descriptor that is not a sealed segment")
        return _Mapping(descriptor, size)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"a descriptor that is not a segment: {error}") from error


class _Fork(threading.local):
    """The fork that a thread is making: the contents of all leases at that time."""

    copies: Mapping[_Lease, bytes] = {}


_fork = _Fork()  # for each thread, since only the thread that forks may use it


def _before_fork() -> None:
    """Retire all leases, which both processes will have, and copy their contents for the child.

    They are copied before the fork, because the parent may write to its memory before the child reads it.
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
    """Replace shared memory by private memory with the same contents, at the same addresses."""
    copies, _fork.copies = _fork.copies, {}
    for lease in _living():
        lease.retired = True  # also a lease that was made since _before_fork
        with contextlib.suppress(MemoryError):
            data = copies.get(lease) or ctypes.string_at(lease.address, lease.size)
            size = -(-lease.size // mmap.PAGESIZE) * mmap.PAGESIZE
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            place = _libc.mmap(lease.address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            if place != _MAP_FAILED:
                ctypes.memmove(lease.address, data, lease.size)


if are_possible():
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
