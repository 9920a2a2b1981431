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
"""

from __future__ import annotations

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
