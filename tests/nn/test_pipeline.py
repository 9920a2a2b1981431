"""Pipelines compute what nn.Sequential computes, with its gradients and its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from networks import (
    Net,
    Two,
    ask,
    batch,
    equal_lists,
    fill,
    frozen,
    given,
    gradients_in,
    grads,
    linear,
    modes,
    run_there,
    seeded,
    twins,
)
from stages import Gives, Takes, numbered
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import MisuseError, OptionError
from backhaul.nn import Pipeline, RemoteModule
from backhaul.nn.pipeline import join, split
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("three", "nothing_left")


def block() -> nn.Module:
    return nn.Sequential(linear(), nn.Tanh())


def build(places: str, chunks: int, make: Any = block) -> tuple[Pipeline, nn.Sequential]:
    """A pipeline with stages on these workers, and the same model in one process."""
    pairs = [twins(seed, f"worker{rank}", make) for seed, rank in enumerate(places)]
    return Pipeline([m for m, _ in pairs], chunks), nn.Sequential(*(local for _, local in pairs))


def stage_gradients(pipeline: Pipeline, context_id: int) -> list[Tensor | None]:
    return [gradient for stage in pipeline for gradient in ask(stage, gradients_in, context_id)]


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


PLACES = ["1", "0", "12", "11", "01", "10", "120", "121", "012", "1212", "1122", "0000"]


@pytest.mark.parametrize("chunks", [1, 3, 8])
@pytest.mark.parametrize("places", PLACES)
def test_outputs_and_gradients(places: str, chunks: int) -> None:
    """One to four stages on one to three workers. Some are on the caller, and some share a worker."""
    pipeline, local = build(places, chunks)
    x = batch(8, 4).requires_grad_()
    expected = local(x)
    expected.pow(2).sum().backward()
    with dist_autograd.context() as context_id:
        y = pipeline(x)
        close(y, expected)
        context_id.backward(y.pow(2).sum())
        close([context_id.gradients()[x], *stage_gradients(pipeline, context_id)], [x.grad, *grads(local)])


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_chunks_of_all_sizes(chunks: int) -> None:
    """The number of chunks may not divide the batch, or be larger than its number of rows."""
    pipeline, local = build("12", chunks)
    for size in range(1, 9):
        x = batch(size, 4)
        with torch.set_grad_enabled(size % 2 == 0):
            y = pipeline(x)
            assert y.shape == (size, 4)
            close(y, local(x))


def test_one_chunk_is_exact() -> None:
    """The same arithmetic, so the same bits."""
    pipeline, local = build("1201", 1)
    x = batch(8, 4).requires_grad_()
    local(x).pow(2).sum().backward()
    with dist_autograd.context() as context_id:
        y = pipeline(x)
        assert torch.equal(y, local(x))
        context_id.backward(y.pow(2).sum())
        got = [context_id.gradients()[x], *stage_gradients(pipeline, context_id)]
    assert equal_lists(got, [x.grad, *grads(local)])


class Noisy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(linear(), nn.Dropout(0.5), nn.BatchNorm1d(4, dtype=torch.float64), nn.Tanh())


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_batch_norm_and_dropout_see_the_micro_batches_in_order(chunks: int) -> None:
    """As in one process that gets the micro-batches in turn. Only one stage has dropout: there is one generator."""
    noisy, noisy_local = twins(1, "worker1", Noisy)
    norm, norm_local = twins(2, "worker2", Net)
    pipeline, local = Pipeline([noisy, norm], chunks), nn.Sequential(noisy_local, norm_local)
    x = batch(8, 4).requires_grad_()
    torch.manual_seed(3)
    expected = torch.cat([local(part) for part in x.chunk(chunks)])
    expected.pow(2).sum().backward()  # type: ignore[no-untyped-call]
    with dist_autograd.context() as context_id:
        torch.manual_seed(3)
        y = pipeline(x)
        assert torch.equal(y, expected)
        context_id.backward(y.pow(2).sum())
        close([context_id.gradients()[x], *stage_gradients(pipeline, context_id)], [x.grad, *grads(local)])
    state, twin = pipeline.state_dict(), local.state_dict()
    assert equal_lists(list(state.values()), list(twin.values()))
    assert state["0.2.num_batches_tracked"] == state["1.calls"] == chunks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Any) -> None:
    pipeline, local = build("120", 3)
    pipeline.eval()
    with mode():
        y = pipeline(batch(8, 4))
        close(y, local(batch(8, 4)))
    assert not y.requires_grad
    with dist_autograd.context() as context_id:
        with mode():
            assert not pipeline(batch(8, 4).requires_grad_()).requires_grad
        assert pipeline(batch(8, 4)).requires_grad
        assert context_id > 0


def test_several_inputs_and_outputs() -> None:
    pairs = [twins(seed, f"worker{seed}", Two) for seed in (1, 2)]
    pipeline = Pipeline([m for m, _ in pairs], 3)
    x, y = batch(7, 4).requires_grad_(), batch(7, 4, seed=9).requires_grad_()
    expected = pairs[1][1](*pairs[0][1](x, y))
    (expected[0] * expected[1]).sum().backward()
    with dist_autograd.context() as context_id:
        found = pipeline(x, y)
        assert type(found) is tuple
        close(found, expected)
        context_id.backward((found[0] * found[1]).sum())
        mine = context_id.gradients()
        got = [mine[x], mine[y], *stage_gradients(pipeline, context_id)]
    close(got, [x.grad, y.grad, *grads(pairs[0][1]), *grads(pairs[1][1])])


def test_an_output_of_which_a_part_is_not_used() -> None:
    pairs = [twins(seed, f"worker{seed}", Two) for seed in (1, 2)]
    pipeline = Pipeline([m for m, _ in pairs], 2)
    x, y = batch(4, 4).requires_grad_(), batch(4, 4, seed=9)
    pairs[1][1](*pairs[0][1](x, y))[1].sum().backward()
    with dist_autograd.context() as context_id:
        context_id.backward(pipeline(x, y)[1].sum(), timeout=30)
        got = [context_id.gradients()[x], *stage_gradients(pipeline, context_id)]
    expected = [x.grad, *grads(pairs[0][1]), *grads(pairs[1][1])]
    for mine, its in zip(got, expected, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            close(mine, its)


def test_arguments_that_are_not_split() -> None:
    pipeline = Pipeline([RemoteModule("worker1", Takes)], 2)
    x, y, scalar = batch(5, 4), batch(5, 4, seed=9), torch.tensor(3.0)
    got, rest = pipeline(x, 2.5, ["a", "b"], y, scalar)
    assert torch.equal(got, x * 2.5 + y + scalar + 2)
    assert torch.equal(rest, y)


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("kind", ["list", "dict", "named", "none", "nested"])
def test_results_of_other_kinds(kind: str, chunks: int) -> None:
    x = batch(6, 4)
    got = Pipeline([RemoteModule("worker1", Gives, (kind,))], chunks)(x)
    expected = Gives(kind)(x)
    assert type(got) is type(expected)
    assert str(got) == str(expected)


@pytest.mark.parametrize(("kind", "what"), [("number", "a int"), ("scalar", "a tensor without dimensions")])
def test_results_that_cannot_be_put_together(kind: str, what: str) -> None:
    with pytest.raises(
        MisuseError, match=rf"the last stage of a pipeline returned {what}, which cannot be concatenated"
    ):
        Pipeline([RemoteModule("worker1", Gives, (kind,))], 2)(batch(4, 4))
    Pipeline([RemoteModule("worker1", Gives, (kind,))], 1)(batch(4, 4))


def test_a_batch_of_nothing_and_arguments_without_tensors() -> None:
    pipeline, local = build("12", 3)
    close(pipeline(batch(0, 4)), local(batch(0, 4)))
    assert Pipeline([RemoteModule("worker1", given_module)], 3)(["no tensor"]) == ["no tensor"]


def given_module() -> nn.Module:
    return nn.Identity()


@pytest.mark.parametrize(
    ("stages", "chunks", "match"),
    [
        ([], 1, "at least one stage"),
        ([nn.ReLU()], 1, r'stage 0 is a ReLU.*RemoteModule\("worker0", nn.ReLU\)'),
        (["worker1"], 1, "stage 0 is a str"),
        (None, 0, "chunks: 0 must be a number of micro-batches, at least 1"),
        (None, 1.5, "chunks: 1.5"),
        (None, True, "chunks: True"),
    ],
)
def test_misuse(stages: Any, chunks: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        Pipeline([RemoteModule("worker1", nn.ReLU)] if stages is None else stages, chunks)


def test_tensors_of_different_sizes() -> None:
    pipeline = Pipeline([RemoteModule("worker1", Two)], 2)
    with pytest.raises(OptionError, match=r"sizes in dim 0 differ: 4 \(argument 0\), 3 \(argument 1\)"):
        pipeline(batch(4, 4), batch(3, 4))


# As a module.


def test_a_pipeline_has_the_state_of_a_sequential() -> None:
    pipeline, local = build("12", 2, Net)
    state, expected = pipeline.state_dict(), local.state_dict()
    assert list(state) == list(expected)
    assert equal_lists(list(state.values()), list(expected.values()))
    source = nn.Sequential(seeded(7, Net), seeded(8, Net))
    pipeline.load_state_dict(source.state_dict())
    assert equal_lists(list(pipeline.state_dict().values()), list(source.state_dict().values()))
    broken = source.state_dict()
    del broken["1.scale"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1.scale"'):
        pipeline.load_state_dict(broken)


def test_the_stages_of_a_pipeline_can_be_listed_and_indexed() -> None:
    pipeline, local = build("12", 2, Net)
    assert len(pipeline) == 2
    assert [stage.on for stage in pipeline] == ["worker1", "worker2"]
    assert pipeline[1] is list(pipeline.children())[1] is pipeline.get_submodule("1")
    assert repr(pipeline).splitlines()[1:3] == ["  chunks=2", "  (0): RemoteModule(Net on worker1/cpu)"]
    assert [name for name, _ in pipeline.named_parameters("p")] == [name for name, _ in local.named_parameters("p")]
    assert [name for name, _ in pipeline.named_buffers()] == [name for name, _ in local.named_buffers()]
    assert len(list(pipeline.parameters())) == len(pipeline.remote_parameters()) == len(list(local.parameters()))
    assert len(list(pipeline.buffers())) == len(list(local.buffers()))
    assert list(pipeline.parameters(recurse=False)) == list(pipeline.buffers(recurse=False)) == []


def test_changes_of_a_pipeline_reach_its_stages() -> None:
    pipeline, _ = build("12", 2, Net)
    pipeline.eval().half().requires_grad_(False)
    pipeline.zero_grad()
    pipeline.apply(fill)
    for stage in pipeline:
        assert not any(ask(stage, modes))
        assert all(ask(stage, frozen))
        assert stage.state_dict()["first.weight"].dtype is torch.float16
        assert stage.state_dict()["first.weight"].eq(0.5).all()


def test_one_stage_twice() -> None:
    m, local = twins(1, "worker1", block)
    pipeline = Pipeline([m, m], 2)
    x = batch(4, 4)
    local(local(x)).sum().backward()
    with dist_autograd.context() as context_id:
        context_id.backward(pipeline(x).sum())
        close(ask(m, gradients_in, context_id), grads(local))
    assert len(pipeline.remote_parameters()) == 2


def test_a_pipeline_inside_a_model() -> None:
    """The pipeline is between local modules, and one state dict has all of them."""
    pipeline, local = build("12", 2)
    before, after = linear(), linear()
    model, twin = nn.Sequential(before, pipeline, after), nn.Sequential(before, local, after)
    assert list(model.state_dict()) == list(twin.state_dict())
    x = batch(4, 4)
    twin(x).sum().backward()
    with dist_autograd.context() as context_id:
        context_id.backward(model(x).sum())
        got = [
            *gradients_in(before, context_id),
            *stage_gradients(pipeline, context_id),
            *gradients_in(after, context_id),
        ]
    close(got, grads(twin))


def test_a_pipeline_is_sent_to_another_worker() -> None:
    pipeline, local = build("120", 2)
    close(rpc.rpc_sync("worker2", run_there, args=(pipeline, batch(4, 4))), local(batch(4, 4)))
    assert rpc.rpc_sync("worker1", given, args=(pipeline,)).chunks == 2


def test_a_stage_that_is_a_pipeline() -> None:
    inner, inner_local = build("20", 2)
    m = RemoteModule("worker1", given, (inner,))
    pipeline = Pipeline([m, RemoteModule("worker2", nn.Tanh)], 2)
    x = batch(8, 4).requires_grad_()
    torch.tanh(inner_local(x)).sum().backward()  # type: ignore[no-untyped-call]
    with dist_autograd.context() as context_id:
        y = pipeline(x)
        context_id.backward(y.sum())
        close([context_id.gradients()[x], *stage_gradients(inner, context_id)], [x.grad, *grads(inner_local)])


def test_seeds_of_the_order_of_messages() -> None:
    """The result does not depend on the order of messages."""
    for seed in range(5):
        with InProcessCluster(3, seed=seed) as workers, workers[0].as_current():
            pipeline, local = build("1201", 3)
            x = batch(6, 4).requires_grad_()
            local(x).sum().backward()
            with dist_autograd.context() as context_id:
                y = pipeline(x)
                context_id.backward(y.sum())
                close([context_id.gradients()[x], *stage_gradients(pipeline, context_id)], [x.grad, *grads(local)])
            del pipeline


# The parts of it.


def test_split() -> None:
    x = numbered(5)
    assert [tuple(map(str, part)) for part in split((x, "a"), 2)] == [(str(x[:3]), "a"), (str(x[3:]), "a")]
    assert len(split((x,), 4)) == 3  # as torch.chunk: two of each, and one
    assert split(("a", torch.tensor(1)), 3) == [("a", torch.tensor(1))]


def test_join() -> None:
    assert join([[torch.ones(1)], [torch.zeros(1)]])[0].tolist() == [1, 0]
    with pytest.raises(ValueError, match="shorter"):
        join([(torch.ones(1),), ()])
