"""Pipelines in which a stage fails, hangs or dies."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import await_that, batch, grads, linear
from stages import LOG, Breaks, Crash, Hangs, Told, numbered

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import RpcTimeoutError, UnsendableError, WorkerLostError
from backhaul.nn import Pipeline, RemoteModule
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster

sys.path.insert(0, str(Path(__file__).parent.parent))

from crew import Crew


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    LOG.clear()
    Hangs.go_on.clear()
    yield
    Hangs.go_on.set()
    LOG.clear()


@pytest.fixture
def three_with_nothing_left(three: InProcessCluster, nothing_left: None) -> InProcessCluster:
    return three


def ends(name: str) -> list[int]:
    return [entry[2] for entry in LOG if entry[:2] == (name, "ends")]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize("broken", [0, 1, 2])
@pytest.mark.usefixtures("three_with_nothing_left")
def test_an_error_in_the_middle(broken: int, at: int, inside: bool) -> None:
    """The error has its own type and names its worker. The stage runs no later micro-batch; then nothing runs."""
    stages = [
        RemoteModule(f"worker{(1, 2, 0)[i]}", *((Breaks, ("x", at)) if i == broken else (Told, (f"stage {i}",))))
        for i in range(3)
    ]
    pipeline = Pipeline(stages, 6)

    def run() -> None:
        with pytest.raises(LookupError, match=f"^x has no luck with {at}$") as caught:
            pipeline(numbered(6))
        assert f"Traceback on worker 'worker{(1, 2, 0)[broken]}'" in str(caught.value.__cause__)

    if inside:
        with dist_autograd.context():
            run()
    else:
        run()
    assert ends("x") == list(range(at))
    for i in range(3):
        if i != broken:
            assert ends(f"stage {i}") == list(range(6 if i < broken else at))
    began = len(LOG)
    assert torch.equal(Pipeline(stages, 6)(numbered(6)[:at]), numbered(6)[:at]) if at else True
    assert len(LOG) == began + 2 * 3 * at


@pytest.mark.usefixtures("three_with_nothing_left")
def test_a_pipeline_can_be_used_again_after_an_error() -> None:
    pipeline = Pipeline([RemoteModule("worker1", linear), RemoteModule("worker2", linear)], 2)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            pipeline(batch(4, 3))
        assert pipeline(batch(4, 4)).shape == (4, 4)


@pytest.mark.usefixtures("three_with_nothing_left")
def test_an_argument_that_cannot_be_sent() -> None:
    pipeline = Pipeline([RemoteModule("worker1", linear)], 2)
    with pytest.raises(UnsendableError):
        pipeline(batch(4, 4), lambda: None)


@pytest.mark.usefixtures("three_with_nothing_left")
def test_an_error_waits_for_the_calls_under_way() -> None:
    """A second try then does not overlap with the rest of the first."""
    pipeline = Pipeline([RemoteModule("worker1", Hangs, ("slow", 1)), RemoteModule("worker2", Breaks, ("x", 0))], 3)
    Hangs.go_on.clear()
    future = rpc.rpc_async("worker2", run_numbered, args=(pipeline, 3))
    await_that(lambda: ("slow", "begins", 1, "worker1") in LOG and ("x", "begins", 0, "worker2") in LOG, "both work")
    assert not future.done()
    Hangs.go_on.set()
    with pytest.raises(LookupError, match="no luck with 0"):
        future.wait()
    assert ends("slow") == [0, 1, 2]


def run_numbered(pipeline: Pipeline, count: int) -> Any:
    return pipeline(numbered(count))


def test_a_stage_that_hangs() -> None:
    options = RpcOptions(rpc_timeout=1)
    with InProcessCluster(3, options=options) as workers, workers[0].as_current():
        pipeline = Pipeline([RemoteModule("worker1", Told, ("a",)), RemoteModule("worker2", Hangs, ("b", 1))], 3)
        start = time.monotonic()
        with pytest.raises(RpcTimeoutError):
            pipeline(numbered(3))
        assert time.monotonic() - start < 5
        Hangs.go_on.set()
        await_that(lambda: ends("b") == [0, 1, 2], "the rest is done")


def test_more_micro_batches_than_the_timeout_allows_for_one() -> None:
    """The timeout limits the wait for each result, not the time that stages wait for each other."""
    options = RpcOptions(rpc_timeout=0.75)
    with InProcessCluster(3, options=options) as workers, workers[0].as_current():
        pipeline = Pipeline([RemoteModule("worker1", Slow), RemoteModule("worker2", Slow)], 8)
        start = time.monotonic()
        assert torch.equal(pipeline(numbered(8)), numbered(8))
        assert time.monotonic() - start > 8 * 0.15


class Slow(Told):
    def __init__(self) -> None:
        super().__init__("slow")

    def work(self, x: torch.Tensor, number: int) -> torch.Tensor:
        time.sleep(0.15)  # this test is about the time itself
        return x


# Real processes.


def train(places: str, chunks: int, size: int) -> tuple[float, list[float]]:
    """The loss, and the sums of the gradients, of a pipeline over other processes."""
    stages = [RemoteModule(f"worker{rank}", linear) for rank in places]
    for stage in stages:
        stage.load_state_dict(reference().state_dict())
    pipeline = Pipeline(stages, chunks)
    with dist_autograd.context() as context_id:
        loss = pipeline(batch(size, 4)).pow(2).sum()
        context_id.backward(loss)
        sums = [rpc.rpc_sync(stage.on, gradient_sum, args=(stage.module_rref, context_id)) for stage in stages]
    return loss.item(), sums


def reference() -> torch.nn.Linear:
    module = linear()
    with torch.no_grad():
        module.weight.copy_(batch(4, 4, seed=3))
        module.bias.copy_(batch(4, seed=4))
    return module


def gradient_sum(rref: Any, context_id: int) -> float:
    found = dist_autograd.get_gradients(context_id)
    return sum(found[parameter].sum().item() for parameter in rref.local_value().parameters())


def crash(places: list[int], broken: int, at: int) -> tuple[str, str, float]:
    """The error that a pipeline raises when one of its workers dies."""
    kinds: list[Any] = [(Told, ("a",)), (Told, ("b",))]
    kinds.insert(broken, (Crash, (at,)))
    stages = [RemoteModule(f"worker{rank}", *kind) for rank, kind in zip(places, kinds, strict=True)]
    start = time.monotonic()
    try:
        Pipeline(stages, 6)(numbered(6))
    except WorkerLostError as error:
        return error.worker, str(error), time.monotonic() - start
    return "", "nothing was raised", 0.0


def still_alive(rank: int) -> list[int]:
    stage = RemoteModule(f"worker{rank}", linear)
    return list(Pipeline([stage], 2)(batch(4, 4)).shape)


def test_between_processes() -> None:
    local = [reference() for _ in range(3)]
    loss = torch.nn.Sequential(*local)(batch(10, 4)).pow(2).sum()
    loss.backward()
    expected = [sum(grad.sum().item() for grad in grads(part) if grad is not None) for part in local]
    with Crew(3) as crew:
        for chunks in (1, 4):
            got, sums = crew[0].run(train, "120", chunks, 10)
            assert got == pytest.approx(loss.item(), rel=1e-12)
            assert sums == pytest.approx(expected, rel=1e-9)


def test_workers_that_die_in_the_middle() -> None:
    """The worker of a middle, the first or the last stage dies. The error names it, and the others go on."""
    with Crew(5) as crew:
        for places, broken, at in (([1, 2, 3], 1, 2), ([1, 3, 4], 0, 0), ([3, 0, 4], 2, 5)):
            lost, text, seconds = crew[0].run(crash, places, broken, at)
            assert lost == f"worker{places[broken]}", text
            assert seconds < 20
        assert crew[0].run(still_alive, 3) == [4, 4]
