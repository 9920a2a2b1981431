"""Pages: one segment of device memory, at its sender and at its receiver, and the page that the two share.

The page is ordinary shared memory. It describes the segment, and says whether the segment is free. The receiver opens
the memory and the events of a segment when it needs them first, or at once if the segment is on trial: see `segments`.

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
import mmap
import os
import secrets
import struct
import threading
import weakref

import torch

from backhaul.devices import driver
from backhaul.devices.discipline import Incoming, Outgoing
from backhaul.devices.driver import DriverError
from backhaul.devices.memory import SharedMemory
from backhaul.errors import BackhaulError, ProtocolError

MAGIC = b"BHDEVSEG"
PAGE = mmap.PAGESIZE
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FIELDS = struct.Struct("<8sQ64s64s40sI4x16s")
FIELDS_AT = 8
OPENED, FAILED = 1, 2
_REASON_AT = 256
_LONGEST_REASON = 1024


def uuid_of(device: int) -> str:
    """The UUID of a GPU, which is the same in all processes; the index may differ."""
    return str(torch.cuda.get_device_properties(device).uuid)


_here: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()
"""The segments that this process has made, by name: another worker of the process cannot open them, and uses these."""

_ends: weakref.WeakSet[Segment | Opened] = weakref.WeakSet()
"""The segments of this process, at their senders and at their receivers."""

_inherited: list[Segment | Opened] = []
"""In a forked child: the segments of the parent. They are never deleted, because the child must not call the driver."""


def new_page(size: int, handles: tuple[bytes, bytes], uuid: str, id: int, name: bytes) -> tuple[int, mmap.mmap]:
    """The page of a new segment: its descriptor, and its memory."""
    descriptor = os.memfd_create("backhaul-device", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, PAGE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        page = mmap.mmap(descriptor, PAGE)
    except BaseException:
        os.close(descriptor)
        raise
    FIELDS.pack_into(page, FIELDS_AT, MAGIC, size, *handles, uuid.encode(), id, name)
    return descriptor, page


class Segment:
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
        descriptor, page = new_page(self.size, handles, uuid, self.id, name)
        self.page: mmap.mmap | bytearray = page
        self.descriptors: list[int] = [descriptor]
        _ends.add(self)

    @property
    def is_free(self) -> bool:
        return not self.page[0]

    @property
    def trial(self) -> int:
        """What the receiver says about it: 0 if nothing yet, `OPENED` or `FAILED`."""
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


class Opened:
    """A segment, at its receiver."""

    def __init__(self, page: mmap.mmap, descriptor: int) -> None:
        self.page: mmap.mmap | bytearray = page
        self._descriptor: int | None = descriptor
        self._incoming: Incoming | None = None
        self._keep: tuple[object, ...] = ()
        self._lock = threading.Lock()
        self._device = 0  # set by _open
        fields = FIELDS.unpack_from(page, FIELDS_AT)
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
            reason = first_line(error.__cause__ or error).encode("utf-8", "replace")[:_LONGEST_REASON]
            self.page[_REASON_AT : _REASON_AT + 2] = len(reason).to_bytes(2, "little")
            self.page[_REASON_AT + 2 : _REASON_AT + 2 + len(reason)] = reason
            self.page[3] = FAILED
        else:
            self.page[3] = OPENED

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


def first_line(error: BaseException) -> str:
    """The message of an error. To those of CUDA, torch adds lines with general advice."""
    return str(error).partition("\n")[0]


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


def _after_fork_in_child() -> None:
    """Leave the segments to the parent. Otherwise the child would give them up, and free those with data."""
    _inherited[:] = _ends
    for each in _inherited:
        each.abandon()


# For the process, because it is forked with the segments of all its workers.
os.register_at_fork(after_in_child=_after_fork_in_child)
