"""Clusters that really hang, and the explanations."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from backhaul import autograd, rpc
from backhaul.errors import BackhaulError, MisuseError, NotInitializedError
from backhaul.options import RpcOptions
from backhaul.seeing import why_stuck
from backhaul.seeing.asking import ask_guests
from backhaul.seeing.findings import Stuck
from backhaul.seeing.guest import Member, transport_for
from backhaul.seeing.stuck import explain
from backhaul.testing import InProcessCluster

PATIENCE = 20.0

LOCK = threading.Lock()
ARRIVED = threading.Event()
RELEASE = threading.Event()


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    ARRIVED.clear()
    RELEASE.clear()
    with InProcessCluster(3, sockets=True) as found:
        try:
            yield found
        finally:
            RELEASE.set()


def look(workers: InProcessCluster) -> Stuck:
    """The explanation from outside."""
    members = [Member(each.info, each.agent.membership.find(each.info).addresses) for each in workers]
    return explain(ask_guests(members, transport_for(), ("threads", "snapshot")))


def look_until(workers: InProcessCluster, text: str) -> str:
    """Ask until the text appears: the last thread may be just about to wait."""
    deadline = time.monotonic() + PATIENCE
    while True:
        said = "\n".join(chain.sentence for chain in look(workers).chains)
        if text in said or time.monotonic() > deadline:
            return said
        threading.Event().wait(0.02)


def take_lock() -> None:
    ARRIVED.set()
    with LOCK:
        pass


def call_worker2() -> None:
    rpc.rpc_sync("worker2", call_worker0)


def call_worker0() -> None:
    rpc.rpc_sync("worker0", take_lock)


def test_a_lock_that_is_held_across_calls_in_a_circle(workers: InProcessCluster) -> None:
    def hold() -> None:
        with workers[0].as_current(), LOCK, contextlib.suppress(BackhaulError):  # from the shutdown below
            rpc.rpc_sync("worker1", call_worker2, timeout=PATIENCE)

    holder = threading.Thread(target=hold, name="holder")
    holder.start()
    assert ARRIVED.wait(PATIENCE)
    said = look_until(workers, "a cycle")
    assert (
        "worker0's thread holder waits for call_worker2 on worker1, which waits for call_worker0 on worker2, which "
        "waits for take_lock on worker0, which waits for the lock LOCK (line "
    ) in said
    assert ": with LOCK:), held by worker0's thread holder: a cycle, none of them can continue." in said
    with workers[2].as_current():  # a member gets the same answer, while its calls hang
        assert "a cycle, none of them can continue" in str(why_stuck())
    workers.close()
    holder.join(PATIENCE)


class HangsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ARRIVED.set()
        RELEASE.wait(PATIENCE)
        return gradient * 2


def hanging(x: torch.Tensor) -> torch.Tensor:
    return HangsInBackward.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_backward_that_waits_at_a_gate_for_a_run_that_blocks(workers: InProcessCluster) -> None:
    def train() -> None:
        with workers[0].as_current(), autograd.context() as context:
            x = torch.ones(3, requires_grad=True) * 1
            y = rpc.rpc_sync("worker1", hanging, args=(x,))
            z = rpc.rpc_sync("worker2", double, args=(y + x,))
            autograd.backward(context, [(x + y + z).sum()])

    trainer = threading.Thread(target=train, name="trainer")
    trainer.start()
    assert ARRIVED.wait(PATIENCE)
    said = look_until(workers, "from worker1, which waits for an event")
    assert "worker0's thread trainer waits at a gate of backward pass " in said
    assert " for gradients from worker1, which waits for an event (line " in said
    assert ": RELEASE.wait(PATIENCE)): no thread has set it." in said
    RELEASE.set()
    trainer.join(PATIENCE)
    assert not trainer.is_alive()
    assert not look(workers).chains


def test_a_run_that_cannot_begin_without_the_gradients_of_a_third_worker(workers: InProcessCluster) -> None:
    """No thread waits for these gradients: worker0 has one part of what it needs, from worker1, and not the first."""

    def train() -> None:
        with workers[0].as_current(), autograd.context() as context:
            x = torch.ones(3, requires_grad=True) * 1
            y = rpc.rpc_sync("worker1", double, args=(x,))
            z = rpc.rpc_sync("worker2", hanging, args=(x,))
            autograd.backward(context, [(y + z).sum()])

    trainer = threading.Thread(target=train, name="trainer")
    trainer.start()
    assert ARRIVED.wait(PATIENCE)
    said = look_until(workers, "for worker0, which cannot continue without gradients from worker2")
    assert "worker0's thread trainer waits in backward pass " in said
    assert "for worker0, which cannot continue without gradients from worker2, which waits for an event" in said
    RELEASE.set()
    trainer.join(PATIENCE)
    assert not trainer.is_alive()


def block() -> None:
    ARRIVED.set()
    RELEASE.wait(PATIENCE)


async def ask_worker2() -> None:
    await rpc.rpc_async("worker2", block)


def test_a_coroutine_that_waits_for_another_worker(workers: InProcessCluster) -> None:
    future = workers[0].rpc_async("worker1", ask_worker2)
    waiter = threading.Thread(target=future.wait, name="waiter")
    waiter.start()
    assert ARRIVED.wait(PATIENCE)
    said = look_until(workers, "probably waits for block on worker2, which waits for an event")
    assert (
        "worker0's thread waiter waits for ask_worker2 on worker1, which runs without a thread and probably waits "
        in said
    )
    RELEASE.set()
    waiter.join(PATIENCE)
    assert not waiter.is_alive()


def test_a_value_that_is_not_made_yet(workers: InProcessCluster) -> None:
    with workers[0].as_current():
        rref = rpc.remote("worker1", block)
        waiter = threading.Thread(target=rref.to_here, name="waiter")
        assert ARRIVED.wait(PATIENCE)
        waiter.start()
        said = look_until(workers, "which waits for an event")
        assert "worker0's thread waiter waits for to_here of 1/0." in said
        assert "which waits for an event" in said
        RELEASE.set()
        waiter.join(PATIENCE)
        del rref


def test_a_worker_that_is_gone(workers: InProcessCluster) -> None:
    workers[2].shutdown(graceful=False)
    stuck = look(workers)
    assert list(stuck.silent) == ["worker2"]
    assert "its process has ended or is unreachable" in str(stuck)


def test_in_a_federation_no_worker_is_asked() -> None:
    with (
        InProcessCluster(1, options=RpcOptions(trust="federation")) as alone,
        alone[0].as_current(),
        pytest.raises(MisuseError, match="members of a federation do not show each other"),
    ):
        why_stuck()
    with pytest.raises(NotInitializedError):
        why_stuck()
