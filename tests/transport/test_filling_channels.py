"""Channels whose frames fill while they leave: no byte leaves before a device has copied it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec import structs
from transport_group import SOON, Group, receive, run, send

from backhaul.devices.driver import DriverError
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.transport.filling import whole
from backhaul.wire.filling import Filling
from backhaul.wire.frames import Frame, encode
from backhaul.wire.messages import Ping, Result

MANY = 6 << 20


class Device:
    """Copies bytes into a tensor when the test says so. Before, there are zeros."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.host = torch.zeros(size, dtype=torch.uint8)
        self.values = torch.randint(1, 255, (size,), dtype=torch.uint8)
        self._made = 0
        self.failed = False
        self.asked = threading.Event()
        """Set when a thread has asked how much is there."""

    def copy(self, until: int) -> None:
        self.host[self._made : until] = self.values[self._made : until]
        self._made = until

    def finish(self) -> None:
        self.copy(self.size)

    def done(self) -> int:
        if self.failed:
            raise DriverError("an illegal memory access")
        self.asked.set()
        return self._made

    def frame(self, number: int = 7) -> Frame:
        """The frame of a message with the tensor."""
        frame = encode(Result(number, None), [self.host])
        head, *_ = frame.pieces
        pieces = [head, memoryview(self.host.numpy())] if len(frame.pieces) > 1 else self._apart(bytes(head))
        return structs.replace(frame, pieces=pieces, filling=Filling([(0, self)], self.size), keep=[self.host])

    def _apart(self, data: bytes) -> list[bytes | memoryview]:
        """The pieces of a small frame. A staged frame is never one piece."""
        return [data[: len(data) - self.size], memoryview(self.host.numpy())]


@pytest.fixture(params=["shared", "through the socket"])
def pair(sockets: Group, request: pytest.FixtureRequest) -> tuple[Channel, Channel]:
    """Both ends of a channel with a socket, with memory that both ends map and without."""
    return sockets.pair(**({} if request.param == "shared" else {"segment_pool_bytes": 0}))


def ping(near: Channel, far: Channel, number: int) -> None:
    """Send a small message past the frame that fills."""
    assert near.between
    near.interject(encode(Ping(number)))
    assert receive(far).message == Ping(number)


def test_no_byte_leaves_before_it_is_there(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    device = Device(MANY)
    assert not near.write(device.frame())
    with ThreadPoolExecutor(1) as threads:
        for number, until in enumerate((0, 100, 5_000, 1_000_000, 3 << 20, MANY - 1)):
            device.copy(until)
            while not near.fills:
                near.wait(read=False, write=True, timeout=SOON)
                assert not near.flush()
                while far.read(0):
                    assert far.next() is None
            assert near.awaits
            assert not near.flush()
            ping(near, far, number)
        assert not near.wait(read=False, write=True, timeout=0.01)
        came = threads.submit(receive, far)
        device.finish()
        while not near.flush():
            near.wait(read=False, write=True, timeout=SOON)
        envelope = came.result(timeout=SOON)
    assert envelope.message == Result(7, None)
    assert torch.equal(envelope.tensors[0], device.values)
    assert not near.fills
    send(near, Ping(99))
    assert receive(far).message == Ping(99)


def test_a_small_frame(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    device = Device(100)
    assert not near.write(device.frame())
    assert near.fills
    ping(near, far, 1)
    device.copy(99)
    assert near.fills
    assert not near.flush()
    device.finish()
    assert not near.fills
    assert near.flush()
    assert torch.equal(receive(far).tensors[0], device.values)


@pytest.mark.parametrize("size", [0, 100])
def test_what_is_there_at_once_leaves_at_once(pair: tuple[Channel, Channel], size: int) -> None:
    near, far = pair
    device = Device(size)
    device.finish()
    assert near.write(device.frame())
    assert torch.equal(receive(far).tensors[0], device.values)


def test_a_thread_waits_for_the_device_and_for_bytes(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    device = Device(MANY)
    assert not near.write(device.frame())
    came = threading.Event()

    def send_late() -> None:
        assert near.wait(read=True, write=True, timeout=SOON)
        assert near.fills, "the bytes of the peer ended the wait"
        assert near.read(0)
        came.set()
        while not near.flush():
            assert near.wait(read=False, write=True, timeout=SOON)

    def work() -> None:
        send(far, Ping(1))
        assert came.wait(SOON)
        for place in range(0, MANY, 100_000):
            device.copy(place)
            time.sleep(0)
        device.finish()
        assert torch.equal(receive(far).tensors[0], device.values)

    run(send_late, work)
    assert near.next() is not None


def test_a_device_that_fails_ends_the_channel(pair: tuple[Channel, Channel]) -> None:
    near, _ = pair
    device = Device(MANY)
    assert not near.write(device.frame())
    device.failed = True
    with pytest.raises(ChannelClosed, match="could not be copied from its GPU: an illegal memory access"):
        near.flush()


def test_the_next_frame_fills_too(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    with ThreadPoolExecutor(1) as threads:
        for number in range(3):
            device = Device(MANY)
            assert not near.write(device.frame(number))
            came = threads.submit(receive, far)
            device.finish()
            while not near.flush():
                near.wait(read=False, write=True, timeout=SOON)
            envelope = came.result(timeout=SOON)
            assert envelope.message == Result(number, None)
            assert torch.equal(envelope.tensors[0], device.values)


class Memory:
    """The object to which the memory of a frame belongs."""


def kept(device: Device, memory: Memory) -> Frame:
    return structs.replace(device.frame(), keep=[memory])


def test_memory_belongs_to_a_frame_until_it_has_left(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    device, memory = Device(MANY), Memory()
    used = weakref.ref(memory)
    assert not near.write(kept(device, memory))
    del memory
    ping(near, far, 1)
    assert used() is not None
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(receive, far)
        device.finish()
        while not near.flush():
            assert used() is not None
            near.wait(read=False, write=True, timeout=SOON)
        came.result(timeout=SOON)
    assert used() is None


def test_a_closed_channel_frees_the_memory_of_a_frame(pair: tuple[Channel, Channel]) -> None:
    near, _ = pair
    device, memory = Device(MANY), Memory()
    used = [weakref.ref(device), weakref.ref(memory)]
    assert not near.write(kept(device, memory))
    del device, memory
    assert None not in [each() for each in used]
    near.close()
    assert [each() for each in used] == [None, None]


@pytest.fixture
def without_sockets() -> Iterator[Group]:
    group = Group("memory")
    yield group
    group.close()


def test_a_channel_without_sockets_waits(without_sockets: Group) -> None:
    near, far = without_sockets.pair()
    device = Device(1000)

    def work() -> None:
        assert device.asked.wait(SOON)
        assert far.next() is None
        device.finish()

    run(lambda: near.write(device.frame()), work)
    assert torch.equal(receive(far).tensors[0], device.values)
    assert not whole(device.frame()).endswith(b"\0")


@pytest.fixture(params=["tcp", "plain"])
def wide(request: pytest.FixtureRequest) -> Iterator[Group]:
    group = Group(request.param)
    yield group
    group.close()


def test_slices_over_several_connections(wide: Group) -> None:
    near, far = wide.pair(connections=3)
    large = 32 << 20
    with ThreadPoolExecutor(2) as threads:
        for number in range(4):
            device = Device(large)
            came = threads.submit(receive, far)
            done = near.write(device.frame(number))

            def work(device: Device = device) -> None:
                for place in range(0, large, 1 << 18):
                    device.copy(place)
                device.finish()

            working = threads.submit(work)
            while not done:
                near.wait(read=False, write=True, timeout=SOON)
                done = near.flush()
            working.result(timeout=SOON)
            assert torch.equal(came.result(timeout=SOON).tensors[0], device.values)
