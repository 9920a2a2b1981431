"""GradScaler over several workers equals torch's in one process, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from optim_models import (
    Twins,
    assert_same,
    dense_inputs,
    dense_twins,
    linear,
    run,
    set_grad,
    sparse_inputs,
    sparse_twins,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip_alone

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
from backhaul.rpc import MisuseError, OptionError, RRef
from backhaul.testing import InProcessCluster

SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}


class BadGradient(torch.autograd.Function):
    """Returns its first argument, and gives the second one a gradient of the given value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.new_full((2,), ctx.value), None


class Moody(nn.Module):
    """A layer in which one parameter gets a gradient that the test chooses."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer = linear(inputs, outputs)
        self.extra = nn.Parameter(torch.ones(2))
        self.value = 1.0

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = BadGradient.apply(self.layer(x), self.extra, self.value)  # type: ignore[no-untyped-call]
        return found


def set_value(layer: Moody, value: float) -> None:
    layer.value = value


def moody_twins(rank: int) -> Twins:
    """Twins in which the layer on worker ``rank`` is moody."""
    return Twins([(f"worker{i}", Moody if i == rank else linear, (4, 4)) for i in range(3)])


def both(twins: Twins, make: Any = torch.optim.Adam, **options: Any) -> tuple[DistributedOptimizer, Any]:
    return DistributedOptimizer(make, twins.rrefs, **options), make(twins.parameters, **options)


def assert_same_scalers(mine: GradScaler, its: torch.amp.GradScaler) -> None:
    assert_same(mine.state_dict(), its.state_dict())
    assert mine.get_scale() == its.get_scale()


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("with_context", [True, False])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_infinite_gradients_on_one_worker(workers: InProcessCluster, rank: int, with_context: bool, bad: float) -> None:
    """All workers skip the step, and the scale changes as in one process."""
    twins = moody_twins(rank)
    optimizer, reference = both(twins, lr=0.1)
    mine, its = GradScaler(**SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    scales = []
    for number, x in enumerate(dense_inputs(9)):
        value = bad if number in (2, 3, 7) else 1.0
        run(twins.layers[rank], set_value, value)
        set_value(twins.alone[rank], value)  # type: ignore[arg-type]
        reference.zero_grad()
        torch.autograd.backward(its.scale(twins.loss_alone(x)))
        its.step(reference)
        its.update()
        optimizer.zero_grad()
        with dist_autograd.context() as context_id:
            accumulate: Any = "context" if with_context else "grad"
            dist_autograd.backward(context_id, [mine.scale(twins.loss(x))], accumulate=accumulate)
            mine.step(optimizer, context_id if with_context else None)
            mine.update()
        twins.assert_same_parameters()
        assert_same_scalers(mine, its)
        scales.append(mine.get_scale() / SETTINGS["init_scale"])
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert scales == [1, 2, 1, 0.5, 0.5, 1, 1, 0.5, 0.5]


def test_clipping_of_unscaled_gradients(workers: InProcessCluster) -> None:
    twins = moody_twins(1)
    optimizer, reference = both(twins, torch.optim.SGD, lr=0.1)
    mine, its = GradScaler(**SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    for number, x in enumerate(dense_inputs(6)):
        value = math.inf if number == 3 else 3.0 * mine.get_scale()
        run(twins.layers[1], set_value, value)
        set_value(twins.alone[1], value)  # type: ignore[arg-type]
        reference.zero_grad()
        torch.autograd.backward(its.scale(twins.loss_alone(x)))
        its.unscale_(reference)
        expected = clip_alone(twins.parameters, 0.5)
        its.step(reference)
        its.update()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mine.scale(twins.loss(x))])
            mine.unscale_(optimizer, context_id)
            assert_same(clip_grad_norm_(context_id, optimizer, 0.5), expected)
            mine.step(optimizer, context_id)
            mine.update()
        twins.assert_same_parameters()
        assert_same_scalers(mine, its)


def test_gradients_that_others_look_at_are_not_changed(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    scaler = GradScaler(**SETTINGS)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [scaler.scale(twins.loss(dense_inputs(1)[0]))])
        held = dist_autograd.get_gradients(context_id)
        before = {parameter: gradient.clone() for parameter, gradient in held.items()}
        scaler.unscale_(optimizer, context_id)
        for parameter, gradient in held.items():
            assert_same(gradient, before[parameter])
            unscaled = dist_autograd.get_gradients(context_id)[parameter]
            assert_same(unscaled, gradient / SETTINGS["init_scale"])


class Autocast(nn.Module):
    """Computes in half precision with parameters of full precision."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = linear(inputs, outputs)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            found: Tensor = self.layer(x)
        return found


def half_precision() -> list[torch.dtype]:
    """The dtypes in which this processor can multiply matrices."""
    found = []
    for dtype in (torch.bfloat16, torch.float16):
        try:
            torch.ones(2, 2, dtype=dtype) @ torch.ones(2, 2, dtype=dtype)
        except RuntimeError:
            continue
        found.append(dtype)
    return found


@pytest.mark.parametrize("init_scale", [2.0**10, 2.0**20])
@pytest.mark.parametrize("dtype", half_precision())
def test_autocast(workers: InProcessCluster, dtype: torch.dtype, init_scale: float) -> None:
    """Activations and their gradients travel in half precision; in float16 a large scale overflows at first."""
    twins = Twins([(f"worker{rank}", Autocast, (4, 4, dtype)) for rank in range(3)])
    optimizer, reference = both(twins, lr=0.1)
    mine, its = (
        GradScaler(init_scale=init_scale, growth_interval=3),
        torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3),
    )
    skipped = 0
    for x in dense_inputs(10):
        reference.zero_grad()
        torch.autograd.backward(its.scale(twins.loss_alone(x).float()))
        its.step(reference)
        its.update()
        before = mine.get_scale()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mine.scale(twins.loss(x).float())])
            mine.step(optimizer, context_id)
            mine.update()
        skipped += mine.get_scale() < before
        twins.assert_same_parameters()
        assert_same_scalers(mine, its)
    assert_same(optimizer.state_dict(), reference.state_dict())
    assert bool(skipped) == (dtype == torch.float16 and init_scale > 2.0**16)


def test_sparse_gradients(workers: InProcessCluster) -> None:
    twins = sparse_twins()
    optimizer, reference = both(twins, torch.optim.SparseAdam, lr=0.1)
    mine, its = GradScaler(**SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    for x in sparse_inputs(4):
        reference.zero_grad()
        torch.autograd.backward(its.scale(twins.loss_alone(x)))
        its.step(reference)
        its.update()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mine.scale(twins.loss(x))])
            mine.step(optimizer, context_id)
            mine.update()
        twins.assert_same_parameters()


def test_fused_optimizers(workers: InProcessCluster) -> None:
    """In one process, fused optimizers unscale gradients themselves."""
    twins = moody_twins(2)
    optimizer, reference = both(twins, lr=0.1, fused=True)
    mine, its = GradScaler(**SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    for number, x in enumerate(dense_inputs(5)):
        value = math.inf if number == 2 else 1.0
        run(twins.layers[2], set_value, value)
        set_value(twins.alone[2], value)  # type: ignore[arg-type]
        reference.zero_grad()
        torch.autograd.backward(its.scale(twins.loss_alone(x)))
        its.step(reference)
        its.update()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mine.scale(twins.loss(x))])
            mine.step(optimizer, context_id)
            mine.update()
        twins.assert_same_parameters()
        assert_same_scalers(mine, its)


def test_several_optimizers(workers: InProcessCluster) -> None:
    """One of them is ordinary. An infinite gradient skips only its own optimizer's step, and reduces the scale."""
    twins = moody_twins(1)
    here, its_here = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    ordinary, its_ordinary = torch.optim.SGD([here], lr=0.1), torch.optim.SGD([its_here], lr=0.1)
    first = DistributedOptimizer(torch.optim.SGD, twins.rrefs[:2], lr=0.1)
    second = DistributedOptimizer(torch.optim.SGD, twins.rrefs[2:], lr=0.1)
    references = [torch.optim.SGD(part, lr=0.1) for part in (twins.parameters[:2], twins.parameters[2:])]
    mine, its = GradScaler(**SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    for number, x in enumerate(dense_inputs(6)):
        value = math.inf if number == 2 else 1.0
        run(twins.layers[1], set_value, value)
        set_value(twins.alone[1], value)  # type: ignore[arg-type]
        for reference in (*references, its_ordinary, ordinary):
            reference.zero_grad()
        scaled = its.scale([twins.loss_alone(x), (its_here * x).sum()])
        torch.autograd.backward(list(scaled))
        for reference in (*references, its_ordinary):
            its.step(reference)
        its.update()
        torch.autograd.backward(mine.scale((here * x).sum()))
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [mine.scale(twins.loss(x))])
            mine.unscale_(second, context_id)
            for optimizer in (first, second):
                mine.step(optimizer, context_id)
            mine.step(ordinary)
            mine.update()
        twins.assert_same_parameters()
        assert_same(here.detach(), its_here.detach())
        assert_same_scalers(mine, its)
    assert mine.get_scale() != its._init_scale


def test_a_scaler_that_is_not_enabled(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer, reference = both(twins, lr=0.1)
    scaler = GradScaler(enabled=False)
    x = dense_inputs(1)[0]
    with dist_autograd.context() as context_id:
        loss = twins.loss(x)
        assert scaler.scale(loss) is loss
        dist_autograd.backward(context_id, [loss])
        scaler.unscale_(optimizer, context_id)
        scaler.step(optimizer, context_id)
        scaler.update()
    twins.backward_alone(x)
    reference.step()
    twins.assert_same_parameters()
    assert scaler.state_dict() == {}
    assert scaler.get_scale() == 1.0


def test_states_are_interchangeable(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer, _ = both(twins, lr=0.1)
    mine, its = GradScaler(**SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [mine.scale(twins.loss(dense_inputs(1)[0]))])
        mine.step(optimizer, context_id)
        mine.update(512.0)
    its.load_state_dict(mine.state_dict())
    fresh = GradScaler()
    fresh.load_state_dict(its.state_dict())
    assert_same_scalers(fresh, its)
    assert_same_scalers(mine, its)
    assert fresh.get_scale() == 512
    assert fresh.get_growth_interval() == 2
    assert isinstance(fresh, torch.amp.GradScaler)


def test_the_order_of_calls_is_checked_as_in_torch(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    scaler = GradScaler(**SETTINGS)
    with dist_autograd.context() as context_id:
        with pytest.raises(AssertionError, match="_scale is None"):
            scaler.unscale_(optimizer, context_id)
        dist_autograd.backward(context_id, [scaler.scale(twins.loss(dense_inputs(1)[0]))])
        scaler.unscale_(optimizer, context_id)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            scaler.unscale_(optimizer, context_id)
        with pytest.raises(MisuseError, match=f"was called with context {context_id}, and step.. with None: give both"):
            scaler.step(optimizer)
        scaler.step(optimizer, context_id)
        with pytest.raises(RuntimeError, match="already been called since the last"):
            scaler.step(optimizer, context_id)
        with pytest.raises(RuntimeError, match="after step"):
            scaler.unscale_(optimizer, context_id)
        scaler.update()
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()


def test_contexts_that_are_wrong(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    scaler = GradScaler(**SETTINGS)
    scaler.scale(torch.ones(1))
    with dist_autograd.context() as context_id:
        pass
    for what in (scaler.unscale_, scaler.step):
        with pytest.raises(rpc.BackhaulError, match="Could not find autograd context"):
            what(optimizer, context_id)
    with pytest.raises(OptionError, match=r"SGD steps with \.grad, not with a context"):
        scaler.unscale_(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 3)
    with pytest.raises(OptionError, match="device must be the device type"):
        GradScaler(1024.0)  # type: ignore[arg-type]


def test_no_gradients_at_all(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer, reference = both(twins, lr=0.1)
    for scaler, each in ((GradScaler(), optimizer), (torch.amp.GradScaler("cpu"), reference)):
        scaler.scale(torch.ones(1))
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            scaler.step(each)


def give(rrefs: Sequence[RRef[Any]], gradients: Sequence[Tensor]) -> None:
    for rref, gradient in zip(rrefs, gradients, strict=True):
        run(rref, set_grad, gradient)


def half_parameter(rows: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(rows, dtype=torch.float16))


def test_gradients_that_could_be_unscaled_on_some_workers_only(workers: InProcessCluster) -> None:
    """As in torch, float16 gradients cannot be unscaled. Then no worker steps, and the scale is reduced."""
    good = rpc.remote("worker1", nn.Parameter, args=(torch.ones(2),))
    bad = rpc.remote("worker2", half_parameter, args=(2,))
    optimizer = DistributedOptimizer(torch.optim.SGD, [good, bad], lr=0.1)
    scaler = GradScaler(**SETTINGS)
    scaler.scale(torch.ones(1))
    give([good, bad], [torch.ones(2), torch.ones(2, dtype=torch.float16)])
    with pytest.raises(
        PartialError, match="float16 gradients cannot be unscaled: keep the parameters in float32"
    ) as caught:
        scaler.step(optimizer)
    assert caught.value.done == ("worker1",)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == SETTINGS["init_scale"] / 2
    assert good.to_here().tolist() == bad.to_here().tolist() == [1, 1]


def test_an_interval_of_accumulated_gradients(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer, reference = both(twins, torch.optim.SGD, lr=0.1)
    mine, its = GradScaler(**SETTINGS), torch.amp.GradScaler("cpu", **SETTINGS)
    for start in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        for x in dense_inputs(3, seed=start):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [mine.scale(twins.loss(x))])
                optimizer.accumulate(context_id)
            torch.autograd.backward(its.scale(twins.loss_alone(x)))
        mine.step(optimizer)
        mine.update()
        its.step(reference)
        its.update()
        twins.assert_same_parameters()
        assert_same_scalers(mine, its)
