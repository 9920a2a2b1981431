"""Clipping by the norm of all gradients, on all workers, equals clipping in one process."""

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
from backhaul.optim import DistributedOptimizer, clip_grad_norm_
from backhaul.rpc import BackhaulError, OptionError, RRef
from backhaul.testing import InProcessCluster


def gradient_here(parameter: Tensor, context_id: int) -> Tensor | None:
    """The gradient tensor itself, not a copy."""
    found: Tensor | None = dist_autograd.get_gradients(context_id).get(parameter)
    return found


def context_gradients(twins: Twins, context_id: int) -> list[Tensor | None]:
    return [run(rref, gradient_here, context_id) for rref in twins.rrefs]


@pytest.mark.parametrize("as_optimizer", [False, True])
@pytest.mark.parametrize("norm_type", [1, 2.0, 3, 0.5, math.inf, "inf"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_gradients_of_a_context(workers: InProcessCluster, norm_type: Any, factor: float, as_optimizer: bool) -> None:
    """Some norms are small enough already."""
    twins = dense_twins()
    x = dense_inputs(1)[0]
    twins.backward_alone(x)
    unclipped = [parameter.grad.clone() for parameter in twins.parameters if parameter.grad is not None]
    limit = factor * clip_alone(twins.parameters, math.inf, norm_type).item()
    assert_same([parameter.grad for parameter in twins.parameters], unclipped)
    expected = clip_alone(twins.parameters, limit, norm_type)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [twins.loss(x)])
        params = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1) if as_optimizer else twins.rrefs
        total = clip_grad_norm_(context_id, params, limit, norm_type)
        assert_same(total, expected)
        clipped = context_gradients(twins, context_id)
        assert_same(clipped, [parameter.grad for parameter in twins.parameters])
        changed = [not torch.equal(*each) for each in zip(clipped, unclipped, strict=True)]  # type: ignore[arg-type]
        assert all(changed) if factor < 1 else not any(changed)
    assert twins.gradients() == [None] * len(twins.rrefs)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam])
def test_training_with_clipped_gradients(workers: InProcessCluster, optimizer_class: Any) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(optimizer_class, twins.rrefs, lr=0.1)
    reference = optimizer_class(twins.parameters, lr=0.1)
    for x in dense_inputs(5):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [twins.loss(x)])
            clip_grad_norm_(context_id, optimizer, 0.05)
            optimizer.step(context_id)
        reference.zero_grad()
        twins.backward_alone(x)
        clip_alone(twins.parameters, 0.05)
        reference.step()
        twins.assert_same_parameters()


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_grad_is_clipped_in_place_without_a_context(workers: InProcessCluster, norm_type: float) -> None:
    """Without a context, ``.grad`` is clipped in place, as torch does."""
    twins = dense_twins()
    x = dense_inputs(1)[0]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [twins.loss(x)], accumulate="grad")
    layer: Any = twins.layers[0].local_value()
    own = layer[0].weight.grad
    assert_same(clip_grad_norm_(None, twins.rrefs, 0.01, norm_type), clip(twins, x, 0.01, norm_type))
    assert_same(twins.gradients(), [parameter.grad for parameter in twins.parameters])
    assert layer[0].weight.grad is own


def clip(twins: Twins, x: Tensor, limit: float, norm_type: float) -> Tensor:
    twins.backward_alone(x)
    return clip_alone(twins.parameters, limit, norm_type)


def test_gradients_that_others_look_at_are_not_changed(workers: InProcessCluster) -> None:
    """The gradients were read from the context before they are clipped."""
    twins = dense_twins()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [twins.loss(dense_inputs(1)[0])])
        held = dist_autograd.get_gradients(context_id)
        before = {parameter: gradient.clone() for parameter, gradient in held.items()}
        clip_grad_norm_(context_id, twins.rrefs, 0.001)
        for parameter, gradient in held.items():
            assert_same(gradient, before[parameter])
            assert not torch.equal(dist_autograd.get_gradients(context_id)[parameter], gradient)
        assert len(held) == 2


def test_parameters_without_a_gradient(workers: InProcessCluster) -> None:
    """Such parameters do not count, even if a whole worker has no gradients."""
    twins = dense_twins()
    x = torch.randn(3, 6)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", forward_twice, args=(twins.layers[1], twins.layers[3], x))
        dist_autograd.backward(context_id, [y.sum()])
        total = clip_grad_norm_(context_id, twins.rrefs, 0.1)
        torch.autograd.backward(twins.alone[1](x).sum() + twins.alone[3](x).sum())
        assert_same(total, clip_alone(twins.parameters, 0.1))
        assert_same(context_gradients(twins, context_id), [parameter.grad for parameter in twins.parameters])
    assert twins.parameters[0].grad is None


def forward_twice(one: RRef[nn.Module], other: RRef[nn.Module], x: Tensor) -> Tensor:
    return torch.stack([one.local_value()(x).sum(), other.local_value()(x).sum()])


def test_no_gradients_at_all(workers: InProcessCluster) -> None:
    twins = dense_twins()
    for params in (twins.rrefs, []):
        assert_same(clip_grad_norm_(None, params, 1.0), clip_alone(twins.parameters, 1.0))


def test_one_parameter(workers: InProcessCluster) -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = torch.ones(4)
    for given in (parameter, RRef(parameter), [parameter], iter([parameter])):
        assert clip_grad_norm_(None, given, 10.0).item() == 2
    assert clip_grad_norm_(None, parameter, 1.0).item() == 2
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


def give(twins: Twins, gradients: Sequence[Tensor | None]) -> None:
    for rref, parameter, gradient in zip(twins.rrefs, twins.parameters, gradients, strict=True):
        run(rref, set_grad, gradient)
        parameter.grad = None if gradient is None else gradient.clone()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_gradients_that_are_not_finite(workers: InProcessCluster, bad: float, norm_type: float) -> None:
    twins = dense_twins()
    gradients = [torch.full_like(parameter, 2.0) for parameter in twins.parameters]
    gradients[3].view(-1)[1] = bad
    give(twins, list(gradients))
    with pytest.raises(
        BackhaulError, match=r"norm of order .* of the gradients is (inf|nan), so they cannot be clipped"
    ):
        clip_grad_norm_(None, twins.rrefs, 1.0, norm_type, error_if_nonfinite=True)
    assert_same(twins.gradients(), gradients)
    total = clip_grad_norm_(None, twins.rrefs, 1.0, norm_type)
    assert_same(total, clip_alone(twins.parameters, 1.0, norm_type))
    assert_same(twins.gradients(), [parameter.grad for parameter in twins.parameters])


@pytest.mark.parametrize(
    "dtypes",
    [
        [torch.float64, torch.float32, torch.float64, torch.float32],
        [torch.float32, torch.bfloat16, torch.float16, torch.float64],
        [torch.float16, torch.float32, torch.float16, torch.bfloat16],
        [torch.float16] * 4,
    ],
)
def test_several_types_of_numbers(workers: InProcessCluster, dtypes: list[torch.dtype]) -> None:
    """The norms are added in torch's order, which groups them by type."""
    places = [(f"worker{rank % 3}", linear_as, (4, 4, dtype)) for rank, dtype in enumerate(dtypes)]
    twins = Twins(places)
    for seed in range(20):  # the order shows in some of them
        generator = torch.Generator().manual_seed(seed)
        give(twins, [torch.randn(p.shape, generator=generator).to(p.dtype) for p in twins.parameters])
        assert_same(clip_grad_norm_(None, twins.rrefs, 0.5), clip_alone(twins.parameters, 0.5))
        assert_same(twins.gradients(), [parameter.grad for parameter in twins.parameters])


def linear_as(inputs: int, outputs: int, dtype: torch.dtype) -> nn.Module:
    return linear(inputs, outputs).to(dtype)


def test_scalars_of_half_precision_stay_so(workers: InProcessCluster) -> None:
    scalar = nn.Parameter(torch.tensor(3.0, dtype=torch.float16))
    other = nn.Parameter(torch.ones(3))
    twin, its = nn.Parameter(scalar.detach().clone()), nn.Parameter(torch.ones(3))
    for each in (scalar, other, twin, its):
        each.grad = torch.full_like(each, 5.0)
    assert_same(clip_grad_norm_(None, [scalar, other], 1.0), clip_alone([twin, its], 1.0))
    assert_same([scalar.grad, other.grad], [twin.grad, its.grad])


@pytest.mark.parametrize("norm_type", [1, 2, math.inf])
def test_sparse_gradients(workers: InProcessCluster, norm_type: float) -> None:
    """The norm is that of their coalesced values, as if they were dense. (Torch cannot clip them.)"""
    twins = sparse_twins()
    x = sparse_inputs(1)[0]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [twins.loss(x)])
        total = clip_grad_norm_(context_id, twins.rrefs, 0.1, norm_type)
        found = context_gradients(twins, context_id)
    twins.backward_alone(x)
    for parameter in twins.parameters:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.to_dense()
    expected = clip_alone(twins.parameters, 0.1, norm_type)
    torch.testing.assert_close(total, expected)
    for gradient, parameter in zip(found, twins.parameters, strict=True):
        assert gradient is not None
        assert gradient.is_sparse
        torch.testing.assert_close(gradient.to_dense(), parameter.grad)


def test_sparse_grad_is_clipped_in_place(workers: InProcessCluster) -> None:
    parameter = nn.Parameter(torch.ones(4, 2))
    torch.autograd.backward(nn.functional.embedding(torch.tensor([1, 1, 3]), parameter, sparse=True).sum())
    total = clip_grad_norm_(None, [parameter], 1.0)
    assert total.item() == pytest.approx(math.sqrt(2 * 4 + 2))
    assert parameter.grad is not None
    assert parameter.grad.is_sparse
    assert parameter.grad.to_dense().norm().item() == pytest.approx(1.0, rel=1e-5)


def test_invalid_parameters_are_refused(workers: InProcessCluster) -> None:
    with pytest.raises(OptionError, match="7 cannot be optimized"):
        clip_grad_norm_(None, [7], 1.0)
    with pytest.raises(OptionError, match="a set does not have"):
        clip_grad_norm_(None, {nn.Parameter(torch.ones(1))}, 1.0)
    with dist_autograd.context() as context_id:
        pass
    with pytest.raises(BackhaulError, match="Could not find autograd context"):
        clip_grad_norm_(context_id, [], 1.0)
    empty = nn.Parameter(torch.ones(0))
    empty.grad = torch.ones(0)
    with pytest.raises(PartialError, match="does not have an identity"):
        clip_grad_norm_(None, [empty], 1.0, math.inf)
