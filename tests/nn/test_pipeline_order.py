"""How a pipeline works: stages at the same time, micro-batches in order, activations from stage to stage."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from networks import await_that, batch, linear
from stages import ENTERED, LOG, Overlapping, Told, numbered
from torch import nn

import backhaul.autograd as dist_autograd
from backhaul.nn import Pipeline, RemoteModule
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("three", "nothing_left")


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    LOG.clear()
    ENTERED.clear()
    yield
    LOG.clear()


@pytest.mark.parametrize("places", ["12", "10", "01", "11", "00"])
@pytest.mark.parametrize("grad", [True, False])
def test_stages_work_at_the_same_time(places: str, grad: bool) -> None:
    """The first works on micro-batch k + 1 while the second works on k. Each waits until it sees the other there."""
    chunks = 5
    first = RemoteModule(f"worker{places[0]}", Overlapping, ("first", "second", -1, chunks - 1))
    second = RemoteModule(f"worker{places[1]}", Overlapping, ("second", "first", 1, chunks - 1))
    with torch.set_grad_enabled(grad):
        y = Pipeline([first, second], chunks)(numbered(chunks))
    assert torch.equal(y, numbered(chunks))
    for k in range(chunks - 1):  # the later stage began before the earlier one ended
        assert LOG.index(event("first", "begins", k + 1, places[0])) < LOG.index(event("second", "ends", k, places[1]))
        assert LOG.index(event("second", "begins", k, places[1])) < LOG.index(event("first", "ends", k + 1, places[0]))


def event(name: str, what: str, number: int, rank: str) -> tuple[Any, ...]:
    return name, what, number, f"worker{rank}"


def test_four_stages_work_at_the_same_time() -> None:
    """Each waits until the next stage has begun the previous micro-batch."""
    names, chunks = ["a", "b", "c", "d"], 6
    stages = [
        RemoteModule(f"worker{i % 3}", Overlapping, (name, (*names, "d")[i + 1], -1 if i < 3 else 0, chunks - 1))
        for i, name in enumerate(names)
    ]
    assert torch.equal(Pipeline(stages, chunks)(numbered(chunks)), numbered(chunks))


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_each_stage_takes_its_micro_batches_in_order_and_one_at_a_time(seed: int | None) -> None:
    with InProcessCluster(3, seed=seed) as workers, workers[0].as_current():
        stages = [RemoteModule(f"worker{rank}", Told, (f"stage {i}",)) for i, rank in enumerate((1, 2, 0, 1))]
        pipeline = Pipeline(stages, 6)
        pipeline(numbered(6))
        del stages, pipeline
    for i in range(4):
        events = [entry[1:3] for entry in LOG if entry[0] == f"stage {i}"]
        assert events == [(what, k) for k in range(6) for what in ("begins", "ends")]


def test_activations_go_from_stage_to_stage(three: InProcessCluster) -> None:
    """The caller sends only to the first stage's worker, and receives only from the last one's."""
    pipeline = Pipeline([RemoteModule("worker1", linear), RemoteModule("worker2", linear)], 3)
    with dist_autograd.context() as context_id:
        pipeline(batch(6, 4).requires_grad_())
        records = [worker.autograd.contexts.find(context_id) for worker in three]
        sends = [sorted(send.to.name for send in record.sends.values()) for record in records]
        assert sends == [["worker1"] * 3, ["worker2"] * 3, ["worker0"] * 3]


def test_the_caller_does_not_read_what_goes_between_stages(three: InProcessCluster) -> None:
    """Checked by the bytes of tensors that each worker gets: input and output are small, activations are large."""
    received = count_received(three)
    pipeline = Pipeline([RemoteModule("worker1", Widen), RemoteModule("worker2", Narrow)], 2)
    before = dict(received)
    assert pipeline(numbered(4)).shape == (4, 1)
    got = {name: received[name] - before[name] for name in received}
    assert got["worker2"] >= 4 * WIDE * 8
    assert got["worker0"] < WIDE * 8
    assert got["worker1"] < WIDE * 8


WIDE = 100_000


class Widen(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :1].expand(len(x), WIDE).contiguous()


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True)


def count_received(workers: InProcessCluster) -> dict[str, int]:
    """A count of the bytes of tensors that each worker receives from now on."""
    counts = {worker.info.name: 0 for worker in workers}
    for worker in workers:
        execution = worker.agent.execution
        unpack = execution.unpack

        def counting(envelope: Any, sender: Any, unpack: Any = unpack, name: str = worker.info.name) -> Any:
            counts[name] += sum(tensor.nbytes for tensor in envelope.tensors)
            return unpack(envelope, sender)

        execution.unpack = counting  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("places", ["12", "11", "01"])
def test_activations_are_freed_as_the_pipeline_goes_on(places: str) -> None:
    """Without grad, the first stage's earlier outputs are freed when the second stage runs the last micro-batch."""
    OUTPUTS.clear()
    chunks = 6
    stages = [RemoteModule(f"worker{places[0]}", Remembered), RemoteModule(f"worker{places[1]}", Looks, (chunks - 1,))]
    with torch.no_grad():
        y = Pipeline(stages, chunks)(numbered(chunks))
    assert torch.equal(y, numbered(chunks) * 2)


OUTPUTS: list[weakref.ref[torch.Tensor]] = []


class Remembered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        OUTPUTS.append(weakref.ref(y))
        return y


class Looks(nn.Module):
    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] == self.last * 2:
            await_that(lambda: not any(output() is not None for output in OUTPUTS[:-1]), "the others are gone")
        return x + 0
