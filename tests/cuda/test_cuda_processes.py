"""Processes that share device memory, and fork or die.

The test of memory measures all processes, so no other program may use the GPU meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from backhaul import rpc
from backhaul.errors import WorkerLostError

sys.path.insert(0, str(Path(__file__).parent.parent))

from crew import Crew

GPU = torch.device("cuda", 0)
GIB = 1 << 30

_CLONE_NEWNS = 0x00020000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_PR_SET_PDEATHSIG = 1


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


def enter_a_container() -> None:
    """Go on as process 1 of new namespaces, like a container's: of processes, of mounts, and of System V memory."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *args: object) -> None:
        if getattr(libc, name)(*args) != 0:
            raise OSError(ctypes.get_errno(), name)

    call("unshare", _CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWPID)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    call("mount", b"none", b"/", None, _MS_REC_PRIVATE, None)
    call("mount", b"proc", b"/proc", b"proc", 0, None)


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


kept = Kept()
"""Of a process that has joined by `join_from`."""


def join_from(contained: bool, rank: int, init_method: str) -> None:
    logging.getLogger("backhaul").addHandler(kept)
    if contained:
        enter_a_container()
    options = rpc.RpcOptions(init_method=init_method, device_maps="same")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def send(to: str) -> tuple[int, list[str]]:
    """The number of bytes that went in device memory, and what this process has logged about it."""
    for number in range(3):
        x = torch.full((1 << 20,), float(number), device=GPU)
        assert torch.equal(rpc.rpc_sync(to, double, args=(x,)), x * 2)
    (peer,) = [each for each in rpc.debug_info()["peers"] if each["name"] == to]
    sent = peer["bytes"].get("device", {"sent": 0})["sent"]
    return sent, [each for each in kept.messages if "host memory" in each]


def send_between(contained: tuple[bool, bool]) -> list[tuple[int, list[str]]]:
    with Crew(2, group=False) as crew:
        joins = [hand.start(join_from, contained[rank], rank, crew.init_method) for rank, hand in enumerate(crew)]
        for each in joins:
            each.result(100)
        return [crew[rank].run(send, f"worker{1 - rank}") for rank in range(2)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
def test_a_worker_in_a_container_shares_device_memory_with_one_outside() -> None:
    (sent, logged), (sent_from_it, logged_in_it) = send_between((False, True))
    assert sent == 2 * 4 << 20  # the first message is the trial
    assert sent_from_it > 0
    assert not logged + logged_in_it


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make namespaces")
def test_workers_with_the_same_process_id_in_two_containers() -> None:
    """CUDA takes an event of the other for one of this process, and refuses it. Tensors arrive all the same."""
    for sent, logged in send_between((True, True)):
        assert (sent > 0) == (not logged), "either the memory is shared, or a warning says why not"
        assert all("\n" not in each for each in logged)


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
