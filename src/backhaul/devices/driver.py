"""Direct calls of the CUDA driver, for operations of every message: copies, events, streams.

Torch's wrappers take several times as long, since they look up the current device and stream in Python. Each call here
only enqueues work, and releases the GIL.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from backhaul.devices.handover import Key

Stream = int
"""A stream by the driver's handle. The default stream of device n is ~n, because its handle, 0, stands for the default
stream of whichever device is current.
"""


_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class DriverError(Exception):
    """A call of the driver failed."""


class NoMemory(DriverError):
    """The device has no memory left."""


@lru_cache(maxsize=1)
def library() -> Any:
    """The driver's library. Raises `DriverError` if it is not installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver is not installed: {error}") from error


def check(code: int, what: str) -> None:
    """Raise `DriverError` unless ``code`` means success."""
    if code:
        name = ctypes.c_char_p()
        library().cuGetErrorName(code, ctypes.byref(name))
        kind = NoMemory if code == _OUT_OF_MEMORY else DriverError
        raise kind(f"{what} failed: {(name.value or b'?').decode()}")


_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: 0)  # of the calling thread


class _Calls:
    """The functions that are called for each message, with declared types, so that they accept ints."""

    def __init__(self) -> None:
        driver = library()
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self.copy = driver.cuMemcpyDtoDAsync_v2
        self.copy.argtypes = (pointer, pointer, size, pointer)
        self.copy_to_host = driver.cuMemcpyDtoHAsync_v2
        self.copy_to_host.argtypes = (pointer, pointer, size, pointer)
        self.record = driver.cuEventRecord
        self.record.argtypes = (pointer, pointer)
        self.wait = driver.cuStreamWaitEvent
        self.wait.argtypes = (pointer, pointer, number)
        self.query = driver.cuEventQuery
        self.query.argtypes = (pointer,)


@lru_cache(maxsize=1)
def _calls() -> _Calls:
    return _Calls()


def copy(target: int, source: int, size: int, stream: Stream) -> None:
    """Enqueue a copy from one address of device memory to another. Both belong to the GPU of the stream."""
    device = _device_of.get(stream, ~stream)
    if device >= 0 and _current_device() != device:
        return _on(device, copy, target, source, size, stream)
    stream = max(stream, 0)
    code = _calls().copy(target, source, size, stream)
    if code:
        check(code, f"a copy of {size} bytes")


def copy_to_host(target: int, source: int, size: int, stream: Stream) -> None:
    """Enqueue a copy from memory of the stream's GPU to pinned memory of the host."""
    device = _device_of.get(stream, ~stream)
    if device >= 0 and _current_device() != device:
        return _on(device, copy_to_host, target, source, size, stream)
    stream = max(stream, 0)
    code = _calls().copy_to_host(target, source, size, stream)
    if code:
        check(code, f"a copy of {size} bytes")


def record(event: int, stream: Stream) -> None:
    if stream < 0:
        if _current_device() != ~stream:
            return _on(~stream, record, event, stream)
        stream = 0
    code = _calls().record(event, stream)
    if code:
        check(code, "recording an event")


def wait(event: int, stream: Stream) -> None:
    if stream < 0:
        if _current_device() != ~stream:
            return _on(~stream, wait, event, stream)
        stream = 0
    code = _calls().wait(stream, event, 0)
    if code:
        check(code, "waiting for an event")


def is_over(event: int) -> bool:
    """Whether the device has done the work before the last `record` of the event."""
    code = _calls().query(event)
    if code == _NOT_READY:
        return False
    if code:
        check(code, "the work before an event")
    return True


def _on(device: int, operation: Callable[..., None], *arguments: int) -> None:
    """Do an operation while a device is current that is not the current one of this thread.

    A default stream needs that, and so do copies: the driver checks addresses against the current context, whatever the
    stream's is.
    """
    with torch.cuda.device(device):
        operation(*arguments)


# The driver has one context for each GPU of a process, and streams belong to it.
_handles: dict[Key, Stream] = {}
_device_of: dict[Stream, int] = {}
_streams: dict[Key, torch.cuda.Stream] = {}


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.ready: set[int] = set()


_state = _ThreadState()  # of a thread: where the driver's context is current

current_key: Callable[[int], Key] = getattr(torch._C, "_cuda_getCurrentStream", lambda device: (0, device, 1))
"""The current stream of the calling thread on a device. A torch without CUDA has no such function."""


def current_stream(device: int) -> Stream:
    """The current stream of the calling thread on a device. After this, the thread can use the calls above."""
    if device not in _state.ready:
        # Torch binds the device's context to a thread at its first operation there. This call may come before that.
        with torch.cuda.device(device):
            torch.cuda.set_device(device)
        _state.ready.add(device)
    return handle(current_key(device))


def handle(key: Key) -> Stream:
    """A stream of torch as the calls above take it."""
    found = _handles.get(key)
    if found is None:
        found = int(_stream(key).cuda_stream) or ~key[1]
        _device_of[found] = key[1]
        _handles[key] = found
    return found


def torch_stream(device: int) -> torch.cuda.Stream:
    """The current stream of the calling thread on a device, as torch's object. ``torch.cuda.current_stream`` makes a
    new one for each call, which takes as long as enqueuing an operation.
    """
    return _stream(current_key(device))


def record_use(tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """As ``tensor.record_stream(stream)``: torch will not reuse the memory before the stream has done its work.

    For a tensor that is conjugated or negated lazily, torch (2.11 at least) records the use of a copy, and then writes
    to memory that is not its own: the heap is damaged.
    """
    if tensor.is_conj() or tensor.is_neg():
        tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    tensor.record_stream(stream)


def _stream(key: Key) -> torch.cuda.Stream:
    found = _streams.get(key)
    if found is None:
        id, index, kind = key
        found = torch.cuda.Stream(stream_id=id, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
        _streams[key] = found
    return found


def new_stream(device: int) -> Key:
    """A stream of torch's pool."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream.stream_id, stream.device_index, stream.device_type


def make_current(keys: Sequence[Key]) -> None:
    """Set the current streams of the calling thread. Torch also changes the current device then; this restores it."""
    others = [key for key in keys if current_key(key[1]) != key]
    if others:
        here = torch._C._cuda_getDevice()
        for id, index, kind in others:
            torch._C._cuda_setStream(stream_id=id, device_index=index, device_type=kind)
        torch._C._cuda_setDevice(here)


class Event:
    """An event of a device. It ends with this object."""

    __slots__ = ("_event", "number")

    def __init__(self, device: int) -> None:
        with torch.cuda.device(device):
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()  # torch creates the event when it is first recorded
        self.number = int(self._event.cuda_event)


def new_event(device: int) -> Event:
    return Event(device)
