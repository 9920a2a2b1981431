"""The order of copies, events and releases of a segment of device memory. Pure: a `Device` carries it out.

A segment belongs to the sender. Two events, which both processes have, order the streams of the two processes:

    sender    waits for *drained* ─► copies in ─► records *filled* ─► says so in a message
    receiver  waits for *filled* ─► copies out ─► records *drained* ─► marks the segment as free

All of these steps but the last one and the message are only enqueued on a stream, so no thread waits for the device.
The mark is a byte of shared memory: the sender takes only segments that are marked as free. Since *drained* was
recorded before the mark, the sender's next wait for it covers the copy that it must not overtake. A receiver that does
not want the data marks the segment as free without a copy, and so does a sender whose message does not leave. For this
case the next copy in, if it is on another stream, waits for *filled* as well.

A sender gives up a segment only while it is marked as free. The driver frees the memory when both processes have
unmapped it. Unmapping waits for the work of the device on that memory.

Data that does not go in a segment is copied to memory of the host (`HostCopy`). That is enqueued, too, in chunks, each
followed by an event. A chunk may be read when its event is over, and the memory of the host must live until the last
one is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol


class Device(Protocol):
    """The operations of a device, in the order of one of its streams. Memory and events are given by number."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int, stream: int) -> None:
        """Later work on this stream waits for the work before the last `record` of the event, on any stream."""


class Outgoing:
    """A segment, at its sender. Not thread-safe."""

    __slots__ = ("_device", "_drained", "_filled", "_memory", "_stream")

    def __init__(self, device: Device, memory: int, filled: int, drained: int) -> None:
        self._device = device
        self._memory = memory
        self._filled = filled
        self._drained = drained
        self._stream: int | None = None  # the stream of the last copy in

    def fill(self, source: int, size: int, stream: int) -> None:
        """Copy data in. The segment was marked as free, and the caller has marked it as used."""
        if self._stream is not None:
            self._device.wait(self._drained, stream)
            if stream != self._stream:
                self._device.wait(self._filled, stream)
        self._stream = stream
        self._device.copy(self._memory, source, size, stream)
        self._device.record(self._filled, stream)


class Incoming:
    """A segment, at its receiver. Not thread-safe."""

    __slots__ = ("_device", "_drained", "_filled", "_memory")

    def __init__(self, device: Device, memory: int, filled: int, drained: int) -> None:
        self._device = device
        self._memory = memory
        self._filled = filled
        self._drained = drained

    def drain(self, target: int, size: int, stream: int) -> None:
        """Copy data out. The caller must mark the segment as free afterwards."""
        self._device.wait(self._filled, stream)
        self._device.copy(target, self._memory, size, stream)
        self._device.record(self._drained, stream)


CHUNK = 4 << 20
"""The bytes that are copied to the host before the next event."""


class HostDevice(Protocol):
    """The operations of a device for copies to the host."""

    def copy_to_host(self, target: int, source: int, size: int, stream: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def is_over(self, event: int) -> bool:
        """Whether the device has done the work before the last `record` of the event."""


class Event(Protocol):
    number: int


class HostCopy:
    """A copy of device memory to memory of the host, chunk by chunk. Not thread-safe."""

    __slots__ = ("_chunks", "_device", "_done", "_give_back")

    def __init__(
        self,
        device: HostDevice,
        target: int,
        source: int,
        size: int,
        stream: int,
        take: Callable[[], Event],
        give_back: Callable[[Event], None],
    ) -> None:
        """Enqueue the copy. ``take`` returns an unused event, and ``give_back`` gets it back."""
        self._device = device
        self._give_back = give_back
        self._done = 0
        self._chunks: deque[tuple[int, Event]] = deque()  # not known to be over: where each ends, and its event
        for start in range(0, size, CHUNK):
            end = min(start + CHUNK, size)
            event = take()
            device.copy_to_host(target + start, source + start, end - start, stream)
            device.record(event.number, stream)
            self._chunks.append((end, event))

    def done(self) -> int:
        """The number of bytes that have been copied."""
        while self._chunks and self._device.is_over(self._chunks[0][1].number):
            self._done, event = self._chunks.popleft()
            self._give_back(event)
        return self._done

    @property
    def is_over(self) -> bool:
        self.done()
        return not self._chunks
