"""The order of copies, events and releases of a segment of device memory. Pure: a `Device` does it.

A segment belongs to the sender. Two events, which both processes have, order the streams of the two:

    sender    waits for *drained* ─► copies in ─► records *filled* ─► says so in a message
    receiver  waits for *filled* ─► copies out ─► records *drained* ─► marks the segment as free

All of these but the last and the message are only enqueued on a stream, so no thread waits for the device. The mark is
a byte of shared memory: the sender takes only segments that are marked as free. Since *drained* was recorded before
the mark, the sender's next wait for it covers the copy that it must not overtake. A receiver that does not want the
data marks the segment as free without a copy, and so does a sender whose message does not leave: the next copy in,
if it is on another stream, waits for *filled* as well.

A sender gives a segment up only while it is marked as free. The driver frees the memory once both processes have
unmapped it, which waits for what the device still does with it.
"""

from __future__ import annotations

from typing import Protocol


class Device(Protocol):
    """What a device does, in the order of one of its streams. Memory and events are known by number."""

    def copy(self, target: int, source: int, size: int, stream: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int, stream: int) -> None:
        """What comes later on this stream waits for what was before the last `record`, on whatever stream."""


class Outgoing:
    """A segment at its sender. For one thread at a time."""

    __slots__ = ("_device", "_drained", "_filled", "_memory", "_stream")

    def __init__(self, device: Device, memory: int, filled: int, drained: int) -> None:
        self._device = device
        self._memory = memory
        self._filled = filled
        self._drained = drained
        self._stream: int | None = None  # of the last copy in

    def fill(self, source: int, size: int, stream: int) -> None:
        """Put data in. The segment was marked as free, and the caller has marked it as used."""
        if self._stream is not None:
            self._device.wait(self._drained, stream)
            if stream != self._stream:
                self._device.wait(self._filled, stream)
        self._stream = stream
        self._device.copy(self._memory, source, size, stream)
        self._device.record(self._filled, stream)


class Incoming:
    """A segment at its receiver. For one thread at a time."""

    __slots__ = ("_device", "_drained", "_filled", "_memory")

    def __init__(self, device: Device, memory: int, filled: int, drained: int) -> None:
        self._device = device
        self._memory = memory
        self._filled = filled
        self._drained = drained

    def drain(self, target: int, size: int, stream: int) -> None:
        """Take data out. The caller marks the segment as free after it."""
        self._device.wait(self._filled, stream)
        self._device.copy(target, self._memory, size, stream)
        self._device.record(self._drained, stream)
