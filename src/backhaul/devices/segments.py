"""Segments of device memory: how tensors on a GPU go to another process of the same host.

A segment consists of device memory that its sender has allocated for this purpose (`memory`), two events that both
processes have, and a page of ordinary shared memory that says whether the segment is free. The sender passes it once,
as two descriptors: first the page, then the memory. `discipline` describes the order of the other steps.

A receiver cannot always open a segment: it may not see the GPU (``CUDA_VISIBLE_DEVICES``, containers), or the driver
may refuse. So the first segment on a device is passed on trial: without data, beside the next message, whatever that
is. The receiver opens it at once, and says in the page whether that worked. Until then, and if it did not, data goes
through host memory.

The page::

    offset  size  field
    0       1     1 while the segment is in use: the sender sets it, the receiver clears it
    1       1     1 after the sender has given it up
    2       1     1 if it is on trial
    3       1     what the receiver says about a segment on trial: 1 if it has opened it, 2 if it could not
    8       8     magic "BHDEVSEG"
    16      8     size of the memory, little-endian
    24      64    handle of the event *filled*
    88      64    handle of the event *drained*
    152     40    UUID of the GPU, text, padded with zeros
    192     4     number of the segment
    200     16    a random name, by which workers of the same process find the segment: a process cannot open the
                  handles of its own events
    256     2     size of the next field, little-endian
    258     1024  why the receiver could not open the segment, UTF-8
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import secrets
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from backhaul.devices import driver
from backhaul.devices.discipline import Incoming, Outgoing
from backhaul.devices.driver import DriverError, NoMemory
from backhaul.devices.memory import SharedMemory
from backhaul.errors import BackhaulError, ProtocolError

MAGIC = b"BHDEVSEG"
PAGE = mmap.PAGESIZE
_FIELDS = struct.Struct("<8sQ64s64s40sI4x16s")
_FIELDS_AT = 8
_OPENED, _FAILED = 1, 2
_REASON_AT = 256
_LONGEST_REASON = 1024
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MOST = 32
MAX_NEW = 16
"""The most new segments that one message may pass."""
_SMALLEST = 2 << 20
_IDLE_SECONDS = 10.0
_LOOK_AGAIN = 1.0


def uuid_of(device: int) -> str:
    """The UUID of a GPU, which is the same in all processes; the index may differ."""
    return str(torch.cuda.get_device_properties(device).uuid)


_here: weakref.WeakValueDictionary[bytes, _Segment] = weakref.WeakValueDictionary()
"""The segments that this process has made, by name: another worker of the process cannot open them, and uses these."""

_ends: weakref.WeakSet[_Segment | _Opened] = weakref.WeakSet()
"""The segments of this process, at their senders and at their receivers."""

_inherited: list[_Segment | _Opened] = []
"""In a forked child: the segments of the parent. They are never deleted, because the child must not call the driver."""


def _new_page(size: int, handles: tuple[bytes, bytes], uuid: str, id: int, name: bytes) -> tuple[int, mmap.mmap]:
    """The page of a new segment: its descriptor, and its memory."""
    descriptor = os.memfd_create("backhaul-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, PAGE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        page = mmap.mmap(descriptor, PAGE)
    except BaseException:
        os.close(descriptor)
        raise
    _FIELDS.pack_into(page, _FIELDS_AT, MAGIC, size, *handles, uuid.encode(), id, name)
    return descriptor, page


class _Segment:
    """A segment, at its sender."""

    def __init__(self, id: int, device: int, size: int) -> None:
        self.id = id
        self.device = device
        with torch.cuda.device(device):
            # The events come first: torch makes the GPU's context current on this thread for them, which may be new.
            filled = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            drained = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            filled.record()
            drained.record()
            handles = filled.ipc_handle(), drained.ipc_handle()  # type: ignore[no-untyped-call]
            self.memory = SharedMemory(device, size)
        self.size = self.memory.size
        self.outgoing = Outgoing(driver, self.memory.address, filled.cuda_event, drained.cuda_event)
        self.used_at = 0.0
        self.events = filled, drained
        name = secrets.token_bytes(16)
        _here[name] = self
        self._start_page(handles, uuid_of(device), name)
        try:
            self.descriptors.append(self.memory.export())
        except BaseException:
            self.forget()
            raise

    def _start_page(self, handles: tuple[bytes, bytes], uuid: str, name: bytes) -> None:
        descriptor, page = _new_page(self.size, handles, uuid, self.id, name)
        self.page: mmap.mmap | bytearray = page
        self.descriptors: list[int] = [descriptor]
        _ends.add(self)

    @property
    def is_free(self) -> bool:
        return not self.page[0]

    @property
    def trial(self) -> int:
        """What the receiver says about it: 0 if nothing yet, `_OPENED` or `_FAILED`."""
        return self.page[3]

    def reason(self) -> str:
        """Why the receiver could not open it."""
        size = min(int.from_bytes(self.page[_REASON_AT : _REASON_AT + 2], "little"), _LONGEST_REASON)
        return self.page[_REASON_AT + 2 : _REASON_AT + 2 + size].decode("utf-8", "replace")

    def stay(self, descriptors: list[int]) -> None:
        """Mark the segment as free again, because the message with its data does not leave."""
        self.descriptors = descriptors
        if self.page[1]:
            self.forget()
        self.page[0] = 0

    def forget(self) -> None:
        """Give the segment up. If the receiver has opened the memory, it stays alive there."""
        self.page[1] = 1
        # A thread that takes the descriptors for a message, or gives them back, may do so at the same time.
        with contextlib.suppress(IndexError):
            while True:
                os.close(self.descriptors.pop())

    def abandon(self) -> None:
        """In a forked child: leave the segment to the parent."""
        self.page = bytearray(self.page)
        self.forget()


class Placed:
    """Data in a segment, for a message that is not sent yet. If it is deleted before `leave`, the segment is freed."""

    def __init__(self, segment: _Segment, size: int) -> None:
        self.id = segment.id
        self.size = size
        self.descriptors = segment.descriptors
        segment.descriptors = []
        self._segment = segment
        self.sent = False

    def leave(self) -> list[int]:
        """Call this when the message is sent. Returns the descriptors to pass along; the caller must close them."""
        self.sent = True
        descriptors, self.descriptors = self.descriptors, []
        return descriptors

    def __del__(self) -> None:
        if not self.sent:
            self._segment.stay(self.descriptors)


class DeviceLending:
    """The segments that one end of a channel lends to the other. Thread-safe."""

    def __init__(self, limit: int, warn: Callable[[str], None], on_use: Callable[[], None] = lambda: None) -> None:
        """``limit``: the bytes of device memory that the segments may take.

        ``warn`` is called with the reason if segments cannot be made, or not opened by the peer; the reason may be one
        that it knows. ``on_use`` is called when there is a first segment, so that the caller arranges for `trim`.
        """
        self._on_use = on_use
        self._limit = limit
        self._warn = warn
        self._process = os.getpid()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._segments: list[_Segment] = []
        self._count = 0
        self._impossible = limit == 0
        self._full_until = 0.0  # the time until which no segment is made, because a device had no memory for one
        self._trials: dict[int, _Segment] = {}  # by device: the first segment, until the peer has opened it
        self.offers = False
        """Whether a segment on trial was not passed yet: see `offer`."""
        self._opened: set[int] = set()  # devices whose segments the peer can open
        self._refused: set[int] = set()

    def offer(self) -> list[int]:
        """The descriptors of segments on trial, to pass along with any message; the caller must close them."""
        if not self.offers:
            return []
        with self._lock:
            self.offers = False
            trials = list(self._trials.values())
            passed = [descriptor for each in trials for descriptor in each.descriptors]
            for each in trials:
                each.descriptors = []
        return passed

    def takes(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether the peer can open segments on the GPUs of these tensors. The first call for a GPU starts a trial."""
        with self._lock:
            return all(
                device in self._opened or self._is_opened(device)
                for device in {tensor.get_device() for tensor in tensors if tensor.is_cuda}
            )

    def place(self, memory: torch.Tensor, size: int) -> Placed | None:
        """Copy the first bytes of a tensor into a segment, on the current stream. None if no segment is available."""
        device = memory.get_device()
        with self._lock:
            known = device in self._opened or self._is_opened(device)
            segment = self._take(device, size) if known and not self._impossible else None
            if segment is None:
                return None
            segment.page[0] = 1
            segment.used_at = time.monotonic()
        try:
            # The message may drop the last reference to the tensor before the copy begins.
            memory.record_stream(driver.torch_stream(device))
            segment.outgoing.fill(memory.data_ptr(), size, driver.current_stream(device))
        except BaseException:
            self._give_up(segment)
            raise
        return Placed(segment, size)

    def _give_up(self, segment: _Segment) -> None:
        """Give up a segment whose copy has failed: its events may be those of an earlier one."""
        with self._lock:
            if segment in self._segments:
                self._segments.remove(segment)
        segment.forget()
        segment.page[0] = 0

    def _is_opened(self, device: int) -> bool:
        """Whether the peer can open segments on a device. The first call starts the trial."""
        if self._impossible or device in self._refused:
            return False
        if device in self._trials:
            self._end_trial(device)
            return device in self._opened
        trial = self._make(device, _SMALLEST)
        if trial is not None:
            trial.page[2] = 1
            self._note_use()
            self._trials[device] = trial
            self.offers = True
        return False

    def _end_trial(self, device: int) -> None:
        """End a trial if the peer has answered."""
        trial = self._trials[device]
        answer = trial.trial
        if not answer:
            return
        del self._trials[device]
        if answer == _OPENED:
            self._opened.add(device)
            self._keep(trial)
            return
        self._refused.add(device)
        trial.forget()
        self._warn(
            f"tensors on cuda:{device} go through host memory, because another worker of this host cannot open device "
            f"memory of this one: {trial.reason()}"
        )

    def _take(self, device: int, size: int) -> _Segment | None:
        best: _Segment | None = None
        for each in self._segments:
            if each.device == device and (best is None or each.size < best.size) and each.size >= size and each.is_free:
                best = each
        if best is not None:
            return best
        capacity = _SMALLEST
        while capacity < size:
            capacity *= 2
        segment = self._make(device, capacity)
        if segment is not None:
            self._keep(segment)
        return segment

    def _make(self, device: int, capacity: int) -> _Segment | None:
        self._make_room(capacity)
        if self._total() + capacity > self._limit or len(self._segments) >= _MOST:
            return None
        if time.monotonic() < self._full_until:
            return None
        try:
            segment = _Segment(self._count + 1, device, capacity)
        except NoMemory as error:
            # Torch may have all of it, for now. The segments that exist are still of use.
            self._full_until = time.monotonic() + _LOOK_AGAIN
            self._warn(
                f"some tensors on GPUs go through host memory, because there is no memory for a segment: {error}"
            )
            return None
        except (DriverError, RuntimeError, OSError) as error:
            self._impossible = True
            self._warn(f"tensors on GPUs go through host memory, because device memory cannot be shared: {error}")
            return None
        self._count += 1
        return segment

    def _keep(self, segment: _Segment) -> None:
        segment.used_at = time.monotonic()
        self._note_use()
        self._segments.append(segment)

    def _note_use(self) -> None:
        if not self._segments and not self._trials:
            self._on_use()

    def _total(self) -> int:
        return sum(each.memory.size for each in (*self._segments, *self._trials.values()))

    def _make_room(self, size: int) -> None:
        for segment in sorted(self._segments, key=lambda each: each.used_at):
            if self._total() + size <= self._limit and len(self._segments) < _MOST:
                return
            if segment.is_free:
                self._segments.remove(segment)
                segment.forget()

    def trim(self, now: float) -> float:
        """Free segments that were not used for a while. Returns the seconds until the next call is due, or infinity."""
        # To free device memory may take until the device has done its work. Threads that send must not wait for that.
        dropped: list[_Segment] = []
        with self._lock:
            for device in list(self._trials):
                self._end_trial(device)
            soonest = _IDLE_SECONDS if self._trials else math.inf
            for segment in list(self._segments):
                left = segment.used_at + _IDLE_SECONDS - now
                if left > 0 or not segment.is_free:
                    soonest = min(soonest, max(left, _LOOK_AGAIN))
                else:
                    self._segments.remove(segment)
                    segment.forget()
                    dropped.append(segment)
        return soonest

    def close(self) -> None:
        if os.getpid() != self._process:
            # A forked child must not take the lock: a thread that exists only in the parent may hold it.
            self._segments = []
            self._trials = {}
            return
        with self._lock:
            self._impossible = True
            dropped = [*self._segments, *self._trials.values()]
            self._segments = []
            self._trials = {}
        for segment in dropped:
            segment.forget()


class _Opened:
    """A segment, at its receiver."""

    def __init__(self, page: mmap.mmap, descriptor: int) -> None:
        self.page: mmap.mmap | bytearray = page
        self._descriptor: int | None = descriptor
        self._incoming: Incoming | None = None
        self._keep: tuple[object, ...] = ()
        self._lock = threading.Lock()
        self._device = 0  # set by _open
        fields = _FIELDS.unpack_from(page, _FIELDS_AT)
        _, self.size, self._filled, self._drained, self._uuid, self.id, self._name = fields
        _ends.add(self)

    def drain(self, target: torch.Tensor, size: int) -> None:
        incoming = self._incoming
        if incoming is None:
            with self._lock:
                incoming = self._open()
        stream = driver.current_stream(self._device)
        if target.is_cuda and target.get_device() == self._device:
            incoming.drain(target.data_ptr(), size, stream)
            return
        # The data goes to another GPU; or to the CPU, if it is the gradient of a tensor that came from there. Only this
        # GPU can access the segment, and an event can be recorded only on streams of its GPU.
        through = _empty_on(self._device, size)
        incoming.drain(through.data_ptr(), size, stream)
        _bytes_of(target, size).copy_(through)

    def try_to_open(self) -> None:
        """Open a segment on trial, and tell the sender whether that worked."""
        try:
            with self._lock:
                self._open()
        except Exception as error:
            reason = str(error.__cause__ or error).encode("utf-8", "replace")[:_LONGEST_REASON]
            self.page[_REASON_AT : _REASON_AT + 2] = len(reason).to_bytes(2, "little")
            self.page[_REASON_AT + 2 : _REASON_AT + 2 + len(reason)] = reason
            self.page[3] = _FAILED
        else:
            self.page[3] = _OPENED

    def _open(self) -> Incoming:
        """Open the memory and the events.

        This is slow, so the thread that wants the first data does it; a segment on trial is opened by the thread that
        reads.
        """
        if self._incoming is None:
            descriptor, self._descriptor = self._descriptor, None
            if descriptor is None:
                raise ProtocolError("data in a segment of device memory that this worker could not open before")
            near = _here.get(self._name)
            if near is not None:
                os.close(descriptor)
                self._keep = (near,)
                self._device = near.device
                self._incoming = _incoming(near.memory, *near.events)
                return self._incoming
            try:
                device = _index_of(self._uuid.rstrip(b"\0").decode("ascii", "replace"))
                here = torch.device("cuda", device)
                with torch.cuda.device(here):
                    # The events come first: torch makes the GPU's context current on this thread for them. The thread
                    # reads messages, and may never have used a GPU.
                    filled = torch.cuda.Event.from_ipc_handle(here, self._filled)  # type: ignore[no-untyped-call]
                    drained = torch.cuda.Event.from_ipc_handle(here, self._drained)  # type: ignore[no-untyped-call]
                    memory = SharedMemory(device, self.size, descriptor)
            except (DriverError, RuntimeError) as error:
                raise BackhaulError(
                    f"a peer's device memory cannot be opened here: {error}. Give RpcOptions(device_pool_bytes=0) to "
                    "the sender"
                ) from error
            finally:
                os.close(descriptor)
            self._keep = (memory, filled, drained)
            self._device = device
            self._incoming = _incoming(memory, filled, drained)
        return self._incoming

    def abandon(self) -> None:
        """In a forked child: leave the segment to the parent and its peer."""
        self.page = bytearray(self.page)
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self._close()


def _empty_on(device: int, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def _bytes_of(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """The first bytes of the storage of a tensor, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), 0, (size,), (1,))


def _incoming(memory: SharedMemory, filled: torch.cuda.Event, drained: torch.cuda.Event) -> Incoming:
    return Incoming(driver, memory.address, filled.cuda_event, drained.cuda_event)


def _index_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if uuid_of(index) == uuid:
            return index
    raise DriverError(f"the GPU {uuid} is not visible to this process")


class DeviceLease:
    """Data in a peer's segment that was not copied out yet. Deleting it marks the segment as free."""

    def __init__(self, segment: _Opened, size: int) -> None:
        self._segment = segment
        self.size = size
        self._free = False

    def take(self, device: torch.device) -> torch.Tensor:
        """The bytes, in new memory on a device, ready on its current stream. Call it, or `fill`, once."""
        return self.fill(torch.empty(self.size, dtype=torch.uint8, device=device))

    def fill(self, target: torch.Tensor) -> torch.Tensor:
        """Copy the bytes into ``target``, and return it. Call it, or `take`, once."""
        try:
            self._segment.drain(target, self.size)
        finally:
            self._release()
        return target

    def _release(self) -> None:
        if not self._free:
            self._free = True
            self._segment.page[0] = 0

    def __del__(self) -> None:
        self._release()


class DeviceBorrowing:
    """The segments of device memory that the peer of a channel has passed. Not thread-safe."""

    def __init__(self) -> None:
        self._segments: dict[int, _Opened] = {}

    def add(self, page: int, memory: int) -> None:
        """Take over two received descriptors, and close them when done. Raises `ProtocolError` if they are invalid."""
        kept = False
        try:
            if fcntl.fcntl(page, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(page).st_size != PAGE:
                raise ProtocolError("a descriptor that is not the page of a segment of device memory")
            mapped = mmap.mmap(page, PAGE)
            if mapped[_FIELDS_AT : _FIELDS_AT + len(MAGIC)] != MAGIC:
                raise ProtocolError("a descriptor that is not the page of a segment of device memory")
            if len(self._segments) >= 4 * _MOST:
                raise ProtocolError(f"more than {4 * _MOST} segments of device memory")
            opened = _Opened(mapped, memory)
            self._segments[opened.id] = opened
            kept = True
        except (OSError, ValueError) as error:
            raise ProtocolError(f"a descriptor that is not the page of a segment of device memory: {error}") from error
        finally:
            os.close(page)
            if not kept:
                os.close(memory)
        for id in [id for id, segment in self._segments.items() if segment.page[1] and not segment.page[0]]:
            del self._segments[id]
        if mapped[2]:
            opened.try_to_open()

    def lend(self, id: int, size: int) -> DeviceLease:
        segment = self._segments.get(id)
        if segment is None or size > segment.size:
            raise ProtocolError(
                f"{size} bytes in segment {id} of device memory, which has not been passed or is smaller"
            )
        return DeviceLease(segment, size)


def is_page(descriptor: int) -> bool:
    """Whether a received descriptor is the page of a segment. The descriptor of its memory follows."""
    try:
        if os.fstat(descriptor).st_size != PAGE:
            return False
        with mmap.mmap(descriptor, PAGE) as page:
            return page[_FIELDS_AT : _FIELDS_AT + len(MAGIC)] == MAGIC
    except (OSError, ValueError):
        return False


def _after_fork_in_child() -> None:
    """Leave the segments to the parent. Otherwise the child would give them up, and free those with data."""
    _inherited[:] = _ends
    for each in _inherited:
        each.abandon()


# For the process, because it is forked with the segments of all its workers.
os.register_at_fork(after_in_child=_after_fork_in_child)
