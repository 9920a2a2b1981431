"""Processes that share device memory, and fork or die.

The test of memory measures all processes, so no other program may use the GPU meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch

from backhaul import rpc
from backhaul.errors import WorkerLostError

sys.path.insert(0, str(Path(__file__).parent.parent))

from crew import Crew

GPU = torch.device("cuda", 0)
GIB = 1 << 30


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fork_between_calls() -> int:
    """The exit code of a child that does nothing."""
    small, large = (torch.ones(size, device=GPU) for size in (1000, 1 << 22))
    for _ in range(2):
        rpc.rpc_sync("worker1", double, args=(small,))
    child = os.fork()
    if not child:
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for each in (large, small, large, small):  # the segment for the large one is new
        assert torch.equal(rpc.rpc_sync("worker1", double, args=(each,)), each * 2)
    return code


def test_a_process_that_forks_keeps_its_segments() -> None:
    with Crew(2, device_maps="same") as crew:
        assert crew[0].run(fork_between_calls) == 0


def used() -> float:
    """The bytes of GPU memory that all processes use, without what torch's allocator has here."""
    torch.zeros(1, device=GPU)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def receive_in_device_memory() -> float:
    for _ in range(3):
        rpc.rpc_sync("worker1", torch.ones, args=(GIB // 4,), kwargs={"device": "cuda:0"}).sum().item()
    torch.cuda.empty_cache()
    return used()


def notice_the_loss() -> float:
    with contextlib.suppress(WorkerLostError):
        while True:
            rpc.rpc_sync("worker1", torch.ones, args=(1,))
    return used()


def test_the_device_memory_of_a_dead_peer_is_given_back() -> None:
    with Crew(2, device_maps="same", device_pool_bytes=2 * GIB) as crew:
        before = crew[0].run(used)
        during = crew[0].run(receive_in_device_memory)
        crew[1].kill()
        after = crew[0].run(notice_the_loss)
    assert during - before > GIB
    assert after - before < GIB / 2, "its segment is still mapped here"
