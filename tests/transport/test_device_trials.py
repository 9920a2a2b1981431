"""Segments of device memory on trial: data goes in segments only when the peer has opened the first one.

No GPU is needed: the sender's segments have a real page, which travels over a real socket, but no memory on a device.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from transport_group import Group, receive, send

from backhaul.devices import pages, segments
from backhaul.devices.driver import NoMemory
from backhaul.devices.segments import DeviceLending
from backhaul.transport.base import Channel
from backhaul.wire.messages import Ping, Result

SMALL, LARGE = 1000, 10 << 20


class _Event:
    cuda_event = 0


class _Memory:
    """Device memory."""

    address = 0

    def __init__(self, size: int) -> None:
        self.size = size


class _Outgoing:
    def fill(self, source: int, size: int, stream: int) -> None:
        pass


class Segment(pages.Segment):
    """A segment without a device. ``near``: whether the receiver can open it, because it is in the same process."""

    near = True
    made: ClassVar[list[tuple[int, int]]] = []  # the device and the size of each

    full = False
    """Whether the device has no memory."""

    def __init__(self, id: int, device: int, size: int) -> None:
        if self.full:
            raise NoMemory(f"taking {size} bytes failed: CUDA_ERROR_OUT_OF_MEMORY")
        self.made.append((device, size))
        self.id, self.device, self.size = id, device, size
        memory: Any = _Memory(size)
        events: Any = (_Event(), _Event())
        outgoing: Any = _Outgoing()
        self.memory, self.events, self.outgoing, self.used_at = memory, events, outgoing, 0.0
        name = secrets.token_bytes(16)
        page, self.page = pages.new_page(size, (b"", b""), "GPU-elsewhere", id, name)
        self.descriptors = [page, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
        if self.near:
            pages._here[name] = self


class _Tensor:
    """A tensor on a GPU."""

    def __init__(self, device: int) -> None:
        self._device = device

    def get_device(self) -> int:
        return self._device

    def record_stream(self, stream: object) -> None:
        pass

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def data_ptr(self) -> int:
        return 0


def place(lending: DeviceLending, size: int = SMALL, device: int = 0) -> bool:
    """Whether a tensor goes in a segment."""
    memory: Any = _Tensor(device)
    return lending.place(memory, size) is not None


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(segments, "Segment", Segment)
    monkeypatch.setattr(segments.driver, "torch_stream", lambda device: None)
    monkeypatch.setattr(segments.driver, "current_stream", lambda device: ~device)
    yield
    Segment.made.clear()


@pytest.fixture(params=["unix", "checked"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, Channel]]:
    group = Group(request.param)
    yield group.pair()
    group.close()


def lending_of(channel: Channel) -> DeviceLending:
    assert channel.device_lending is not None
    return channel.device_lending


RESULT = Result(1, None)


def send_tensor(channel: Channel) -> None:
    """Send a message with a tensor, as if it had been copied to host memory."""
    send(channel, RESULT, [torch.zeros(100_000)])


def test_data_goes_in_segments_when_the_first_one_is_opened(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    lending = lending_of(near)
    assert not place(lending)
    assert not place(lending, LARGE)
    send_tensor(near)
    receive(far)
    assert place(lending)
    assert Segment.made == [(0, 2 << 20)], "the segment on trial is used"
    assert place(lending, LARGE)
    assert Segment.made == [(0, 2 << 20), (0, 16 << 20)]


def test_any_message_passes_a_trial(pair: tuple[Channel, Channel]) -> None:
    """A small message passes one too: perhaps no large one ever takes this channel in this direction."""
    near, far = pair
    lending = lending_of(near)
    assert not place(lending)
    assert lending.offers
    send(near, Ping(1))
    assert not lending.offers
    assert receive(far).message == Ping(1)
    assert place(lending)


def test_each_device_has_its_trial(pair: tuple[Channel, Channel]) -> None:
    near, far = pair
    lending = lending_of(near)
    assert not place(lending, device=0)
    send_tensor(near)
    receive(far)
    assert not place(lending, device=1)
    assert place(lending, device=0)
    send_tensor(near)
    receive(far)
    assert place(lending, device=1)
    assert place(lending, device=0)


def test_without_success_data_goes_through_host_memory(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Segment, "near", False)
    near, far = pair
    lending = lending_of(near)
    for _ in range(3):
        assert not place(lending)
        send_tensor(near)
        assert receive(far).message == RESULT
    assert len(Segment.made) == 1
    (record,) = caplog.records
    assert record.getMessage() == (
        "tensors on cuda:0 go through host memory, because another worker of this host cannot open device memory of "
        "this one: the GPU GPU-elsewhere is not visible to this process"
    )


def test_a_long_reason_is_cut(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(uuid: str) -> int:
        raise RuntimeError("ü" * 3000)

    monkeypatch.setattr(Segment, "near", False)
    monkeypatch.setattr(pages, "_index_of", fail)
    near, far = pair
    assert not place(lending_of(near))
    send_tensor(near)
    receive(far)
    assert not place(lending_of(near))
    (record,) = caplog.records
    assert 0 < record.getMessage().count("ü") <= 512


@pytest.mark.parametrize("passed", [False, True])
def test_a_trial_without_an_answer_ends_with_its_channel(pair: tuple[Channel, Channel], passed: bool) -> None:
    near, _ = pair
    lending = lending_of(near)
    assert not place(lending)
    mine = list(lending._trials[0].descriptors)
    if passed:
        send_tensor(near)  # which the peer does not read
    near.close()
    for descriptor in mine:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    assert not place(lending)
    assert len(Segment.made) == 1


def test_a_reason_is_logged_once_for_all_channels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Segment, "near", False)
    group = Group("unix")
    try:
        transport, door = group.door()
        for _ in range(3):
            far = group.connect(transport)
            near = door.channel()
            for device in range(2):
                assert not place(lending_of(near), device=device)
                send_tensor(near)
                receive(far)
                assert not place(lending_of(near), device=device)
            near.close()
    finally:
        group.close()
    assert [record.getMessage()[:17] for record in caplog.records] == ["tensors on cuda:0", "tensors on cuda:1"]


def test_threads_that_send_the_first_tensors_share_one_lending(
    pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, _ = pair
    make, meeting = near._budget.lend_device_memory, threading.Event()  # type: ignore[attr-defined]

    def make_late(limit: int) -> DeviceLending:
        meeting.wait(0.2)  # for the other thread, if it makes one too
        made: DeviceLending = make(limit)
        return made

    monkeypatch.setattr(near._budget, "lend_device_memory", make_late)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(lending_of, near) for _ in range(2))
        assert first.result() is second.result() is near.device_lending


def test_the_segments_of_a_peer_are_unmapped_when_the_channel_ends(pair: tuple[Channel, Channel]) -> None:
    """The memory of a dead peer lives as long as it is mapped here, and the channel lives on for its counters."""
    near, far = pair
    lending = lending_of(near)
    assert not place(lending)
    send_tensor(near)
    receive(far)
    borrowing = far._borrowing  # type: ignore[attr-defined]
    opened = weakref.ref(borrowing._devices._segments[1])
    lease = borrowing.lend_device(1, SMALL)
    far.close()
    assert opened() is not None, "its data was not taken yet"
    del lease
    assert opened() is None


def test_a_trial_that_nothing_follows_ends_too(pair: tuple[Channel, Channel]) -> None:
    """The segment of the trial is idle then, and is freed like any other."""
    near, far = pair
    lending = lending_of(near)
    woken: list[None] = []
    lending._on_use = lambda: woken.append(None)
    assert not place(lending)
    assert woken
    now = time.monotonic()
    assert lending.trim(now) == segments._IDLE_SECONDS
    send(near, Ping(1))
    receive(far)
    (segment,) = lending._trials.values()
    assert lending.trim(now) < math.inf
    assert not lending._trials
    assert lending.trim(now + 2 * segments._IDLE_SECONDS) == math.inf
    assert segment.page[1]
    assert place(lending)
    assert len(Segment.made) == 2


@pytest.mark.parametrize("end", ["trim", "close"])
def test_no_thread_waits_for_the_lock_while_memory_is_freed(pair: tuple[Channel, Channel], end: str) -> None:
    """Freeing the memory may block until the device has done its work."""
    near, far = pair
    lending = lending_of(near)
    assert not place(lending)
    send_tensor(near)
    receive(far)
    assert place(lending)
    assert place(lending, LARGE)
    held: list[bool] = []
    for segment in lending._segments:
        weakref.finalize(segment.memory, lambda: held.append(lending._lock.locked()))
    del segment
    far.close()  # in this process, it uses the same memory
    if end == "trim":
        lending.trim(math.inf)
    else:
        lending.close()
    assert held == [False, False]


def test_segments_on_trial_count_for_the_limit() -> None:
    group = Group("unix")
    try:
        far, near = group.pair(device_pool_bytes=3 << 20)
        lending = lending_of(near)
        assert not place(lending, device=0)
        assert not place(lending, device=1)
        assert Segment.made == [(0, 2 << 20)]
        send_tensor(near)
        receive(far)
        assert place(lending, device=0)
    finally:
        group.close()


def test_a_device_without_memory(pair: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing segments serve, and later there may be memory again."""
    near, far = pair
    lending = lending_of(near)
    said: list[str] = []
    lending._warn = said.append
    clock = [1000.0]
    monkeypatch.setattr(segments.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(Segment, "full", True)
    assert not place(lending)
    monkeypatch.setattr(Segment, "full", False)
    assert not place(lending)
    assert not Segment.made
    clock[0] += 2
    assert not place(lending)
    send_tensor(near)
    receive(far)
    assert place(lending)
    monkeypatch.setattr(Segment, "full", True)
    assert not place(lending, LARGE)
    assert place(lending), "the first segment still serves"
    clock[0] += 2
    monkeypatch.setattr(Segment, "full", False)
    assert place(lending, LARGE)
    assert len(said) == 2
    assert all("no memory" in each for each in said)


def test_a_small_limit_leaves_no_room_for_a_trial() -> None:
    group = Group("unix")
    try:
        far, near = group.pair(device_pool_bytes=1 << 20)
        for _ in range(2):
            assert not place(lending_of(near))
            send_tensor(near)
            receive(far)
        assert not Segment.made
    finally:
        group.close()
