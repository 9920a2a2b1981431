"""Calls with tensors on a GPU: values, streams, errors."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
from sharing import share_device_memory

from backhaul import rpc
from backhaul.devices import pages
from backhaul.errors import UnsendableError
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

sys.path.insert(0, str(Path(__file__).parent.parent))

from crew import Crew

GPU = torch.device("cuda", 0)
A_WHILE = 200_000_000  # cycles of the GPU: about a tenth of a second


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def slowly_double(x: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(A_WHILE)  # type: ignore[no-untyped-call]
    return x * 2


def where(x: torch.Tensor) -> tuple[str, int]:
    return str(x.device), torch.cuda.current_stream().cuda_stream


def fail(x: torch.Tensor) -> None:
    raise ValueError("no")


def views_alias(x: torch.Tensor, view: torch.Tensor, part: torch.Tensor) -> bool:
    right = torch.equal(view, x.t()[2:5]) and torch.equal(part, x[1:3, ::2])
    x.add_(1)
    return right and torch.equal(view, x.t()[2:5]) and torch.equal(part, x[1:3, ::2])


@pytest.mark.parametrize("count", [0, 1, 5, 1000, 1 << 20])
def test_tensors_go_and_come_back(pair: InProcessCluster, count: int) -> None:
    x = torch.randn(count, device=GPU)
    y = pair[0].rpc_sync("worker1", double, args=(x,))
    assert y.device == GPU
    assert torch.equal(y, x * 2)


def test_a_function_has_a_stream_of_its_own(pair: InProcessCluster) -> None:
    device, stream = pair[0].rpc_sync("worker1", where, args=(torch.ones(3, device=GPU),))
    assert device == "cuda:0"
    assert stream != torch.cuda.default_stream().cuda_stream


def test_a_call_sends_what_is_enqueued_and_waits_for_nothing() -> None:
    with InProcessCluster(2, sockets=True, options=RpcOptions(device_maps="same")) as workers:
        share_device_memory(workers)
        x = torch.ones(1 << 20, device=GPU)
        # Make the segments, and load the kernels: CUDA waits for the device when it loads a kernel.
        workers[0].rpc_sync("worker1", slowly_double, args=(x.add_(0),))
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.cuda._sleep(4 * A_WHILE)  # type: ignore[no-untyped-call]
        x.add_(1)
        y = workers[0].rpc_sync("worker1", slowly_double, args=(x,))
        issued = time.perf_counter() - start
        torch.cuda.synchronize()
        done = time.perf_counter() - start
    assert torch.equal(y, torch.full_like(y, 4))
    assert issued < done / 2


def test_bytes_in_device_memory_are_counted() -> None:
    with InProcessCluster(2, sockets=True, options=RpcOptions(device_maps="same")) as workers:
        share_device_memory(workers)
        x = torch.ones(1 << 20, device=GPU)
        for _ in range(3):
            workers[0].rpc_sync("worker1", double, args=(x,))
        (peer,) = [each for each in workers[0].inspection.snapshot()["peers"] if each["name"] == "worker1"]
    assert peer["bytes"]["device"]["sent"] >= 3 * 4 * x.numel()


def test_the_streams_of_the_caller_count(pair: InProcessCluster) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(A_WHILE)  # type: ignore[no-untyped-call]
        x = torch.full((1000,), 3.0, device=GPU)
        z = pair[0].rpc_sync("worker1", double, args=(x,)) + 1
    torch.cuda.synchronize()
    assert torch.equal(z, torch.full_like(z, 7))


def test_futures_are_ready_on_the_stream_that_waits(pair: InProcessCluster) -> None:
    given = [torch.full((9,), float(number), device=GPU) for number in (1, 2)]
    futures = [pair[0].rpc_async("worker1", slowly_double, args=(each,)) for each in given]
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        total = futures[0].wait() + futures[1].wait()
    torch.cuda.synchronize()
    assert torch.equal(total, torch.full_like(total, 6))


def test_views_of_one_tensor_are_views_again(pair: InProcessCluster) -> None:
    x = torch.randn(10, 20, device=GPU)
    assert pair[0].rpc_sync("worker1", views_alias, args=(x, x.t()[2:5], x[1:3, ::2]))


def test_an_error_harms_nothing(pair: InProcessCluster) -> None:
    x = torch.ones(3, device=GPU)
    with pytest.raises(ValueError, match="no"):
        pair[0].rpc_sync("worker1", fail, args=(x,))
    assert pair[0].rpc_sync("worker1", double, args=(x,)).sum().item() == 6


def test_a_reference_keeps_a_tensor_on_its_gpu(pair: InProcessCluster) -> None:
    rref = pair[0].remote("worker1", slowly_double, args=(torch.ones(3, device=GPU),))
    assert torch.equal(rref.to_here(), torch.full((3,), 2.0, device=GPU))


def test_without_a_map_the_error_says_what_to_write() -> None:
    with InProcessCluster(2) as workers:
        with pytest.raises(UnsendableError, match="device_maps"):
            workers[0].rpc_sync("worker1", double, args=(torch.ones(2, device=GPU),))
        assert workers[0].rpc_sync("worker1", double, args=(torch.ones(2),)).sum().item() == 4


def test_a_result_without_a_map_is_an_error_of_the_call() -> None:
    with InProcessCluster(2) as workers, pytest.raises(UnsendableError, match="Response device mapping"):
        workers[0].rpc_sync("worker1", torch.ones, args=(2,), kwargs={"device": "cuda:0"})


def test_the_cpu_may_be_mapped_to_a_gpu() -> None:
    with InProcessCluster(2, options=RpcOptions(device_maps={"worker1": {"cpu": 0}})) as workers:
        device, _ = workers[0].rpc_sync("worker1", where, args=(torch.ones(3),))
        assert device == "cuda:0"
        y = workers[0].rpc_sync("worker1", double, args=(torch.ones(3),))
        assert y.device.type == "cpu"
        assert y.tolist() == [2, 2, 2]


def join(rank: int, init_method: str, sees_the_gpu: bool) -> None:
    """Join a group of two. A process that does not see the GPU of its peer has another one; here it only says so."""
    if not sees_the_gpu:
        pages.uuid_of = lambda device: "another"
    options = RpcOptions(init_method=init_method, device_maps="same")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def call_the_other() -> int:
    """The number of bytes that went in device memory."""
    for number in range(3):
        x = torch.full((1 << 20,), float(number), device=GPU)
        assert torch.equal(rpc.rpc_sync("worker1", double, args=(x,)), x * 2)
    (peer,) = [each for each in rpc.debug_info()["peers"] if each["name"] == "worker1"]
    sent: int = peer["bytes"].get("device", {"sent": 0})["sent"]
    return sent


@pytest.mark.parametrize("sees", [True, False])
def test_without_the_peers_gpu_tensors_go_through_host_memory(sees: bool) -> None:
    with Crew(2, group=False) as crew:
        joins = [hand.start(join, rank, crew.init_method, sees or not rank) for rank, hand in enumerate(crew)]
        for each in joins:
            each.result(100)
        sent = crew[0].run(call_the_other)
    assert sent == (2 * 4 << 20 if sees else 0)
