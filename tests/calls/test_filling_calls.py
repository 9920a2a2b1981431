"""Calls with tensors that a device still computes: threads go on, deadlines hold, and every value arrives.

Without a GPU, a stand-in for its copies to the host marks bytes of frames as missing, as `devices.staging` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from callees import identity
from msgspec import structs

from backhaul.agent import translation
from backhaul.devices.driver import DriverError
from backhaul.errors import RpcTimeoutError, WorkerLostError
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.wire.filling import Filling
from backhaul.worker import Worker

SOON = 10.0
MANY = 1 << 18  # elements: 1 MiB


class Copy:
    """The copy of the bytes of one message. Before it is finished, there are zeros."""

    def __init__(self, memory: memoryview) -> None:
        self.size = len(memory)
        self._memory = memory
        self._values = bytes(memory)
        self._finished = False
        self.failed = False
        memory[:] = bytes(len(memory))

    def finish(self) -> None:
        self._memory[:] = self._values
        self._finished = True

    def done(self) -> int:
        if self.failed:
            raise DriverError("an illegal memory access")
        return self.size if self._finished else 0


class Device:
    """Copies the tensors of large messages."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.works = False
        self.owned = True

    def encode(self, message: Any, tensors: Any = (), staging: Any = None) -> Any:
        if self.works and len(tensors) == 1 and tensors[0].nbytes >= 4 * MANY:
            memory = memoryview(bytearray(tensors[0].numpy().tobytes()))
            frame = translation_encode(message, tensors, staging)
            copy = Copy(memory)
            self.copies.append(copy)
            filling = Filling([(0, copy)], copy.size)
            return structs.replace(frame, pieces=[frame.pieces[0], memory], filling=filling, owned=self.owned)
        return translation_encode(message, tensors, staging)


translation_encode = translation.encode  # type: ignore[attr-defined]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(translation, "encode", made.encode)
    return made


@pytest.fixture(params=["segments", "socket"])
def pair(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    options = RpcOptions(segment_pool_bytes=0) if request.param == "socket" else RpcOptions()
    with InProcessCluster(2, sockets=True, options=options) as workers:
        workers[0].rpc_sync("worker1", identity, (1,))
        yield workers


async def threes_later() -> torch.Tensor:
    await asyncio.sleep(0)
    return torch.full((MANY,), 3.0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_thread_goes_on_while_a_device_computes(pair: InProcessCluster, device: Device) -> None:
    caller = pair[0]
    sent = torch.rand(MANY)
    device.works = True
    futures = [caller.rpc_async("worker1", torch.add, (sent, number), timeout=SOON) for number in range(3)]
    device.works = False
    assert len(device.copies) == 3
    assert pair[1].rpc_sync("worker0", identity, ("a small reply passes",)) == "a small reply passes"
    assert not any(future.done() for future in futures)
    for copy in device.copies:
        copy.finish()
    for number, future in enumerate(futures):
        assert torch.equal(future.wait(), sent + number)


def test_a_call_waits_for_the_device(pair: InProcessCluster, device: Device) -> None:
    sent = torch.rand(MANY)
    device.works = True
    with ThreadPoolExecutor(1) as threads:
        came = threads.submit(pair[0].rpc_sync, "worker1", torch.sum, (sent,), timeout=SOON)
        until(lambda: bool(device.copies))
        assert pair[1].rpc_sync("worker0", identity, ("meanwhile",)) == "meanwhile"
        assert not came.done()
        device.copies[0].finish()
        assert torch.equal(came.result(timeout=SOON), sent.sum())


def test_a_reply_waits_for_the_device(pair: InProcessCluster, device: Device) -> None:
    device.works = True
    future = pair[0].rpc_async("worker1", torch.full, ((MANY,), 3.0), timeout=SOON)
    until(lambda: bool(device.copies))
    assert pair[0].rpc_sync("worker1", identity, ("meanwhile",)) == "meanwhile"
    assert not future.done()
    device.copies[0].finish()
    assert torch.equal(future.wait(), torch.full((MANY,), 3.0))


def test_memory_of_the_user_in_a_late_reply_waits_too(pair: InProcessCluster, device: Device) -> None:
    device.works, device.owned = True, False
    future = pair[0].rpc_async("worker1", threes_later, timeout=SOON)
    until(lambda: any(line.under_way for line in pair[1].agent.serving.lines))
    device.copies[0].finish()
    assert torch.equal(future.wait(), torch.full((MANY,), 3.0))


def test_a_deadline_names_the_device(pair: InProcessCluster, device: Device) -> None:
    device.works = True
    with pytest.raises(RpcTimeoutError, match="a GPU has not computed all tensors of a message to worker 'worker1'"):
        pair[0].rpc_sync("worker1", torch.sum, (torch.ones(MANY),), timeout=0.2)
    assert pair[1].rpc_sync("worker0", identity, ("meanwhile",)) == "meanwhile"
    device.copies[0].finish()
    device.works = False
    assert pair[0].rpc_sync("worker1", torch.sum, (torch.ones(MANY),), timeout=SOON) == MANY


def test_a_future_fails_at_its_deadline(pair: InProcessCluster, device: Device) -> None:
    device.works = True
    future = pair[0].rpc_async("worker1", torch.sum, (torch.ones(MANY),), timeout=0.2)
    with pytest.raises(RpcTimeoutError):
        future.wait()
    device.copies[0].finish()
    assert pair[0].rpc_sync("worker1", identity, (5,), timeout=SOON) == 5


PATIENCE = 0.05


def count_waits(worker: Worker) -> list[float | None]:
    """Let the worker be impatient. Returns the timeouts of the waits of its channels, and later ones, too."""
    worker.agent.serving.patience = PATIENCE
    found: list[float | None] = []
    for line in (*worker.agent.calling(), *worker.agent.serving.lines):
        channel = line.channel

        def wait(*, read: bool, write: bool, timeout: float | None, wait: Callable[..., bool] = channel.wait) -> bool:
            if write:
                found.append(timeout)
            return wait(read=read, write=write, timeout=timeout)

        channel.wait = wait  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("slow", [0, 1])
def test_a_peer_is_not_to_blame_for_a_device(device: Device, slow: int) -> None:
    """The peer takes nothing, and says nothing, for longer than it may."""
    with InProcessCluster(2, sockets=True, options=RpcOptions(unresponsive_after=None)) as workers:
        workers[0].rpc_sync("worker1", identity, (1,))
        waits = count_waits(workers[slow])
        device.works = True
        if slow == 0:
            future = workers[0].rpc_async("worker1", torch.sum, (torch.ones(MANY),), timeout=SOON)
        else:
            future = workers[0].rpc_async("worker1", torch.ones, (MANY,), timeout=SOON)
        until(lambda: sum(timeout or 0.0 for timeout in waits) > 4 * PATIENCE)
        device.copies[0].finish()
        assert future.wait().sum() == MANY


def test_a_device_that_fails_loses_the_message(pair: InProcessCluster, device: Device) -> None:
    device.works = True
    future = pair[0].rpc_async("worker1", torch.sum, (torch.ones(MANY),), timeout=SOON)
    device.copies[0].failed = True
    with pytest.raises(WorkerLostError, match="could not be copied from its GPU: an illegal memory access"):
        future.wait()


def test_calls_fill_the_outbox(device: Device) -> None:
    """A thread does not make more copies than may wait to be sent."""
    options = RpcOptions(max_unsent_bytes=4 << 20)
    with InProcessCluster(2, sockets=True, options=options) as workers, ThreadPoolExecutor(1) as threads:
        device.works = True
        arguments = (torch.ones(MANY),)

        def call() -> list[Any]:
            return [workers[0].rpc_async("worker1", torch.sum, arguments, timeout=SOON) for _ in range(20)]

        calling = threads.submit(call)
        until(lambda: len(device.copies) > 3)
        while not calling.done():
            waiting = [copy for copy in device.copies if not copy.done()]
            assert len(waiting) < 8
            for copy in waiting:
                copy.finish()
        for copy in device.copies:
            copy.finish()
        assert [future.wait() for future in calling.result()] == [MANY] * 20
