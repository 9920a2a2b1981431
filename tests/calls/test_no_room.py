"""Messages for which the receiver has no room: it reports that, and everything else goes on."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from callees import identity

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.rpc import RpcOptions
from backhaul.transport.stream import StreamTransport
from backhaul.worker import Worker
from crew import Crew

BIG = 96 << 20
"""The bytes of a tensor for which there is no room."""
ROOM = 48 << 20


# What runs in the processes.


def limit_memory(room: int) -> None:
    """Limit this process to ``room`` additional bytes."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))


def unlimit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def numel(tensor: torch.Tensor) -> int:
    return tensor.numel()


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def make_big(limited: str) -> str:
    """Send a large tensor to a worker with too little memory, among small calls. Returns what happened."""
    rpc.rpc_sync(limited, identity, (0,))
    others = [rpc.rpc_async(limited, identity, (number,)) for number in range(10)]
    big = rpc.rpc_async(limited, numel, (zeros(BIG),))
    others += [rpc.rpc_async(limited, identity, (number,)) for number in range(10, 20)]
    try:
        big.wait()
    except MemoryError as error:
        assert [other.wait() for other in others] == list(range(20))
        return str(error)
    return "no error"


def take_big(owner: str) -> str:
    """Ask for a large tensor for which this process has no room."""
    others = [rpc.rpc_async(owner, identity, (number,)) for number in range(10)]
    try:
        rpc.rpc_sync(owner, zeros, (BIG,))
    except MemoryError as error:
        assert [other.wait() for other in others] == list(range(10))
        return str(error)
    return "no error"


def send_zeros(to: str, count: int) -> int:
    found: int = rpc.rpc_sync(to, numel, (torch.zeros(count),), timeout=20)
    return found


def multiplied(text: str, count: int) -> str:
    return text * count


def complain(size: int) -> None:
    raise ValueError("x" * size)


def weigh(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.arange(x.numel())).sum()


def call_many(to: str) -> list[int]:
    futures = [rpc.rpc_async(to, identity, (number,)) for number in range(20)]
    return [future.wait() for future in futures]


def use_up_descriptors() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    while True:
        try:
            _taken.append(socket.socket())
        except OSError:
            return


def give_descriptors_back() -> None:
    while _taken:
        _taken.pop().close()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_taken: list[socket.socket] = []


def outcome(to: str, function: Any, *args: Any) -> Any:
    try:
        return rpc.rpc_sync(to, function, args, timeout=20)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def outcome_without_descriptors(to: str) -> Any:
    """The outcome of a call that needs a new connection. In one go: otherwise a descriptor could become free before."""
    use_up_descriptors()
    try:
        return outcome(to, identity, 1)
    finally:
        give_descriptors_back()


# The tests.


@pytest.fixture(scope="module", params=["unix", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with Crew(2, transport=request.param, secret=bytes(range(32)), segment_pool_bytes=0) as crew:
        yield crew


def test_a_tensor_without_room_at_the_callee(pair: Crew) -> None:
    pair[1].run(limit_memory, ROOM)
    try:
        text = pair[0].run(make_big, "worker1")
    finally:
        pair[1].run(unlimit_memory)
    assert str(BIG) in text
    assert "no room at the receiver" in text
    assert pair[0].run(outcome, "worker1", numel, torch.zeros(10)) == 10


def test_a_tensor_without_room_at_the_caller(pair: Crew) -> None:
    pair[0].run(outcome, "worker1", identity, 0)
    pair[0].run(limit_memory, ROOM)
    try:
        text = pair[0].run(take_big, "worker1")
    finally:
        pair[0].run(unlimit_memory)
    assert str(BIG) in text
    assert pair[0].run(outcome, "worker1", identity, 7) == 7


def test_a_worker_without_free_descriptors_says_so() -> None:
    """The error says why no connection can be opened. When descriptors are free again, the call works."""
    with Crew(2, transport="unix", segment_pool_bytes=0) as crew:
        text = crew[0].run(outcome_without_descriptors, "worker1")
        assert re.search(r"no connection to worker 'worker1': this process has used up its \d+ descriptors", text)
        assert crew[0].run(outcome, "worker1", identity, 1) == 1
        # A connected worker needs no new descriptor.
        for hand in crew:
            hand.run(use_up_descriptors)
        try:
            assert crew[0].run(send_zeros, "worker1", 1 << 20) == 1 << 20
            assert crew[0].run(call_many, "worker1") == list(range(20))
        finally:
            for hand in crew:
                hand.run(give_descriptors_back)


@contextmanager
def workers_with(*options: RpcOptions) -> Iterator[list[Worker]]:
    """Workers of this process, each with its own options."""
    store = torch.distributed.HashStore()
    size = len(options)
    with ThreadPoolExecutor(size) as pool:
        made = list(
            pool.map(
                lambda rank: Worker(
                    f"worker{rank}",
                    rank,
                    size,
                    store=store,
                    options=options[rank],
                    transport=StreamTransport(options[rank]),
                ),
                range(size),
            )
        )
    try:
        yield made
    finally:
        for worker in made:
            worker.shutdown(graceful=False)


@pytest.mark.parametrize("pool", [0, 64 << 20])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_message_over_the_limit_of_its_receiver(kind: Any, pool: int) -> None:
    """The callee's limit is smaller than the caller's, and the caller does not know it."""
    mine = RpcOptions(transport=kind, secret=bytes(32), segment_pool_bytes=pool)
    theirs = RpcOptions(transport=kind, secret=bytes(32), segment_pool_bytes=pool, max_message_bytes=1 << 20)
    with workers_with(mine, theirs) as (caller, callee):
        caller.rpc_sync("worker1", identity, (1,))
        (line,) = caller.agent.calling()
        others = [caller.rpc_async("worker1", identity, (number,)) for number in range(10)]
        for _ in range(3):  # a tensor of that size goes into a segment the second time
            with pytest.raises(MemoryError, match=r"2097\d+ bytes is over the limit of 1048576"):
                caller.rpc_sync("worker1", identity, (torch.zeros(1 << 19),))
        assert [other.wait() for other in others] == list(range(10))
        assert caller.agent.calling() == [line]
        assert torch.equal(caller.rpc_sync("worker1", identity, (torch.ones(1 << 15),)), torch.ones(1 << 15))
        # The same for a reply.
        with pytest.raises(MemoryError, match="over the limit of 1048576"):
            callee.rpc_sync("worker0", torch.zeros, (1 << 19,))
        assert callee.rpc_sync("worker0", identity, (1,)) == 1


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_values_over_the_limit_of_their_receiver(kind: Any) -> None:
    """The same without tensors: a call, the creation of a value, a result and an exception that are too large."""
    large = "x" * (2 << 20)
    mine = RpcOptions(transport=kind, secret=bytes(32))
    theirs = RpcOptions(transport=kind, secret=bytes(32), max_message_bytes=1 << 20)
    with workers_with(mine, theirs) as (caller, callee):
        caller.rpc_sync("worker1", identity, (1,))
        callee.rpc_sync("worker0", identity, (1,))
        (line,), (back,) = caller.agent.calling(), callee.agent.calling()
        others = [caller.rpc_async("worker1", identity, (number,)) for number in range(10)]
        with pytest.raises(MemoryError, match=r"2097\d+ bytes is over the limit of 1048576"):
            caller.rpc_sync("worker1", identity, (large,))
        with caller.as_current():
            rref = rpc.remote("worker1", identity, (large,))
            with pytest.raises(MemoryError, match="over the limit of 1048576"):
                rref.to_here()
        assert [other.wait() for other in others] == list(range(10))
        with pytest.raises(MemoryError, match="over the limit of 1048576"):
            callee.rpc_sync("worker0", multiplied, ("x", 2 << 20))
        with pytest.raises(MemoryError, match="over the limit of 1048576"):
            callee.rpc_sync("worker0", complain, (2 << 20,))
        assert callee.rpc_sync("worker0", identity, (1,)) == 1
        assert caller.agent.calling() == [line]
        assert callee.agent.calling() == [back]


def test_a_pass_whose_gradients_have_no_room_fails() -> None:
    small = RpcOptions(segment_pool_bytes=0, max_message_bytes=1 << 16)
    with workers_with(small, RpcOptions(segment_pool_bytes=0)) as (caller, _):
        with caller.as_current(), dist_autograd.context() as context:
            x = torch.ones(1, requires_grad=True)
            loss = rpc.rpc_sync("worker1", weigh, (x.expand(1 << 16),))  # one element when sent, and 65,536 gradients
            with pytest.raises(MemoryError, match="over the limit of 65536"):
                dist_autograd.backward(context, [loss])
        assert caller.rpc_sync("worker1", identity, (3,)) == 3
