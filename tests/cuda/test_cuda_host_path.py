"""GPU tensors that travel through host memory: the calling thread goes on while the device still computes them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.devices import staging
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

GPU = torch.device("cuda", 0)
A_SECOND = 2_000_000_000  # cycles of the GPU, about
LARGE = 8 << 20  # elements: 32 MiB

WAYS: dict[str, dict[str, Any]] = {
    "device segments": {},
    "segments of the host": {"device_pool_bytes": 0},
    "unix socket": {"device_pool_bytes": 0, "segment_pool_bytes": 0},
    "tls": {"transport": "tcp"},
    "plain tcp": {"transport": "tcp", "fabric": "plain"},
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Run the kernels of the tests once. CUDA loads a kernel at its first launch, and may then wait for the device."""
    if torch.cuda.is_available():
        late(torch.full((LARGE,), -1.0, device=GPU)).zero_().neg()
        torch.cuda.synchronize()


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    options = RpcOptions(device_maps="same", secret=bytes(32), **WAYS[request.param])
    with InProcessCluster(2, sockets=True, options=options) as workers:
        with workers[0].as_current():
            # Make what is made with the first tensor of a size, which may wait for the device. The first message only
            # passes a segment on trial, and the second one makes a segment of this size.
            for _ in range(2):
                rpc.rpc_sync("worker1", torch.clone, args=(torch.zeros(LARGE, device=GPU),))
        yield workers


def late(x: Tensor) -> Tensor:
    """The tensor, which the device computes in a second."""
    torch.cuda._sleep(A_SECOND)  # type: ignore[no-untyped-call]
    return x + 1


def is_over() -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.query


def test_a_call_does_not_wait_for_the_device(pair: InProcessCluster) -> None:
    x = torch.rand(LARGE, device=GPU)
    torch.cuda.synchronize()
    with pair[0].as_current():
        given = late(x)
        done = is_over()
        future = rpc.rpc_async("worker1", torch.neg, args=(given,))
        assert not done(), "rpc_async has waited for the device"
        given.zero_()  # enqueued after the call
        del given
        torch.full((LARGE,), -1.0, device=GPU)  # would take the memory
        assert torch.equal(future.wait(), -(x + 1))


def late_neg(x: Tensor) -> Tensor:
    return late(-x)


def test_replies_and_gradients_that_the_device_still_computes(pair: InProcessCluster) -> None:
    x = torch.rand(LARGE, device=GPU, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", late_neg, args=(x * 2,))
        dist_autograd.backward(context, [(y * y).sum()])
        found = dist_autograd.get_gradients(context)[x]
    (expected,) = torch.autograd.grad(((1 - x * 2) * (1 - x * 2)).sum(), [x])
    torch.testing.assert_close(found, expected)


def test_several_large_tensors_in_one_message(pair: InProcessCluster) -> None:
    xs = [torch.rand(LARGE + number, device=GPU) for number in range(3)]
    with pair[0].as_current():
        # One of them is on the CPU, in memory of the user.
        given = [late(xs[0]), torch.arange(LARGE), xs[1], late(xs[2])]
        found: list[Tensor] = rpc.rpc_sync("worker1", list, args=(given,))
    assert [each.device.type for each in found] == ["cuda", "cpu", "cuda", "cuda"]
    assert torch.equal(found[1], torch.arange(LARGE))
    for value, expected in ((found[0], xs[0] + 1), (found[2], xs[1]), (found[3], xs[2] + 1)):
        assert torch.equal(value, expected)


def test_memory_of_a_message_that_does_not_leave_lives_until_its_copy_is_made() -> None:
    staging._free_ended()
    before = len(staging._ended)
    x = torch.rand(LARGE, device=GPU)
    torch.cuda._sleep(A_SECOND)  # type: ignore[no-untyped-call]
    copied = staging._ToHost(x, x.nbytes)
    assert copied.done() == 0
    host = copied.host
    del copied
    gc.collect()
    assert len(staging._ended) == before + 1
    torch.cuda.synchronize()
    staging._free_ended()
    assert len(staging._ended) == before
    assert torch.equal(host.view(torch.float32), x.cpu())


class Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        torch.cuda._sleep(A_SECOND // 10)  # type: ignore[no-untyped-call]
        return gradient * 3


class Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None


def double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("drops", [True, False])
def test_a_gradient_that_is_held_waits_for_the_stream_of_its_recv(pair: InProcessCluster, drops: bool) -> None:
    """The Recv of y comes first. Its gradient leaves with that of z, which is on another stream, and may have none."""
    first, second = (torch.cuda.Stream() for _ in range(2))  # type: ignore[no-untyped-call]
    x = torch.rand(1000, device=GPU, requires_grad=True)
    w = torch.rand(1000, device=GPU, requires_grad=True)
    here = torch.cuda.current_stream()
    with pair[0].as_current(), dist_autograd.context() as context:
        for stream in (first, second):
            stream.wait_stream(here)
        with torch.cuda.stream(second):
            z = rpc.rpc_sync("worker1", double, args=(w,))
            dropped = Drop.apply(z) if drops else z * 5  # type: ignore[no-untyped-call]
        with torch.cuda.stream(first):
            y = rpc.rpc_sync("worker1", double, args=(x,))
            passed = Pass.apply(y)  # type: ignore[no-untyped-call]
        for stream in (first, second):
            here.wait_stream(stream)
        dist_autograd.backward(context, [passed.sum() + dropped.sum()])
        gradients = dist_autograd.get_gradients(context)
    assert torch.equal(gradients[x], torch.full_like(x, 6))
    assert (w not in gradients) if drops else torch.equal(gradients[w], torch.full_like(w, 10))
