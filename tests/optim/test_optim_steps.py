"""Steps with the gradients of a context, with .grad and with accumulated gradients; hooks; and the cost of a step."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from optim_models import (
    Twins,
    assert_same,
    dense_inputs,
    dense_twins,
    forward,
    linear,
    run,
    set_grad,
    sparse_inputs,
    sparse_twins,
)
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.optim import DistributedOptimizer
from backhaul.rpc import OptionError
from backhaul.testing import InProcessCluster
from backhaul.worker import Worker


def backward(twins: Twins, context_id: int, x: Tensor, **options: Any) -> None:
    dist_autograd.backward(context_id, [twins.loss(x)], **options)


def test_grad_is_as_before_after_a_step_with_a_context(workers: InProcessCluster) -> None:
    """A ``.grad`` that was None is None again."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    before = [None if place % 3 == 0 else torch.full_like(p, place) for place, p in enumerate(twins.parameters)]
    for rref, gradient in zip(twins.rrefs, before, strict=True):
        run(rref, set_grad, gradient)
    twins.train(optimizer, torch.optim.SGD(twins.parameters, lr=0.1), dense_inputs(2))
    assert_same(twins.gradients(), before)


def test_grad_is_used_without_a_context(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs, lr=0.1)
    reference = torch.optim.Adam(twins.parameters, lr=0.1)
    for x in dense_inputs(3):
        optimizer.zero_grad()
        with dist_autograd.context() as context_id:
            backward(twins, context_id, x, accumulate="grad")
        optimizer.step()
        reference.zero_grad()
        twins.backward_alone(x)
        reference.step()
        assert_same(twins.gradients(), [parameter.grad for parameter in twins.parameters])
        twins.assert_same_parameters()
    assert_same(optimizer.state_dict(), reference.state_dict())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(workers: InProcessCluster, set_to_none: bool) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs[1:], lr=0.1)
    for rref, parameter in zip(twins.rrefs[:-1], twins.parameters, strict=False):
        run(rref, set_grad, torch.ones_like(parameter))
    optimizer.zero_grad(set_to_none=set_to_none)
    first, *rest, last = twins.gradients()
    assert first is not None  # the gradient is not the optimizer's own tensor
    assert first.eq(1).all()
    assert last is None
    for gradient, parameter in zip(rest, twins.parameters[1:-1], strict=True):
        assert_same(gradient, None if set_to_none else torch.zeros_like(parameter))


def test_parameters_without_a_gradient_are_passed_over(workers: InProcessCluster) -> None:
    """Like those whose .grad is None, they get no weight decay and no state, even if .grad has other values."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs, lr=0.1, weight_decay=0.5)
    reference = torch.optim.Adam(twins.parameters, lr=0.1, weight_decay=0.5)
    for rref, parameter in zip(twins.rrefs, twins.parameters, strict=True):
        run(rref, set_grad, torch.ones_like(parameter))
    x = torch.randn(2, 6)
    with dist_autograd.context() as context_id:  # only the second layer, which is on worker1
        y = rpc.rpc_sync("worker1", forward, args=(twins.layers[1], x))
        dist_autograd.backward(context_id, [y.sum()])
        optimizer.step(context_id)
    torch.autograd.backward(twins.alone[1](x).sum())
    reference.step()
    twins.assert_same_parameters()
    assert optimizer.state_dict()["state"].keys() == {2, 3}
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_a_step_from_outside_of_the_block(workers: InProcessCluster) -> None:
    """A thread outside the context steps parameters of workers that take no part in it."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    x = torch.randn(2, 6)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", forward, args=(twins.layers[1], x))
        dist_autograd.backward(context_id, [y.sum()])
        thread = threading.Thread(target=step_as, args=(workers[0], optimizer, context_id))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    reference = torch.optim.SGD(twins.parameters, lr=0.1)
    torch.autograd.backward(twins.alone[1](x).sum())
    reference.step()
    twins.assert_same_parameters()


def step_as(worker: Worker, optimizer: DistributedOptimizer, context_id: int) -> None:
    with worker.as_current():
        optimizer.step(context_id)


def test_an_ended_context_is_refused_before_any_worker_steps(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    with dist_autograd.context() as context_id:
        backward(twins, context_id, dense_inputs(1)[0])
    for what in (optimizer.step, optimizer.accumulate):
        with pytest.raises(rpc.BackhaulError, match="Could not find autograd context with id"):
            what(context_id)
        with pytest.raises(TypeError, match="the context id must be an int"):
            what("text")  # type: ignore[arg-type]
    twins.assert_same_parameters()


def test_closures_are_refused(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    with pytest.raises(OptionError, match="takes the id of an autograd context, not a closure"):
        optimizer.step(lambda: 1.0)  # type: ignore[arg-type]


def calls_to(workers: InProcessCluster, rank: int) -> int:
    return sum(line.calls_started for line in workers[rank].agent.serving.lines)


def test_each_operation_is_one_call_to_each_worker(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(
        torch.optim.Adam, [{"params": twins.rrefs[::2]}, {"params": twins.rrefs[1::2]}], lr=0.1
    )
    saved = optimizer.state_dict()
    with dist_autograd.context() as context_id:
        backward(twins, context_id, dense_inputs(1)[0])
        for what in (
            lambda: optimizer.step(context_id),
            optimizer.step,
            optimizer.zero_grad,
            lambda: optimizer.accumulate(context_id),
            optimizer.state_dict,
            lambda: optimizer.load_state_dict(saved),
        ):
            optimizer.param_groups[0]["lr"] /= 2
            before = [calls_to(workers, rank) for rank in range(3)]
            what()
            assert [calls_to(workers, rank) for rank in range(3)] == [before[0], before[1] + 1, before[2] + 1]


def test_hooks_of_steps_run_here(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    seen: list[Any] = []

    def before(*given: Any) -> None:
        seen.append(("before", *given))

    def after(*given: Any) -> None:
        seen.append(("after", *given))

    handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    with dist_autograd.context() as context_id:
        backward(twins, context_id, dense_inputs(1)[0])
        optimizer.step(context_id)
        assert seen == [
            ("before", optimizer, (optimizer, context_id), {}),
            ("after", optimizer, (optimizer, context_id), {}),
        ]
        for handle in handles:
            handle.remove()
        optimizer.step(context_id=context_id)
    assert len(seen) == 2


@pytest.mark.parametrize("parts", [2, 5])
def test_gradients_that_are_accumulated_over_contexts(workers: InProcessCluster, parts: int) -> None:
    """The result equals several backward passes in one process."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(twins.parameters, lr=0.1, momentum=0.9)
    for start in range(2):
        optimizer.zero_grad()
        reference.zero_grad()
        for x in dense_inputs(parts, seed=start):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [twins.loss(x) / parts])
                optimizer.accumulate(context_id)
            torch.autograd.backward(twins.loss_alone(x) / parts)
        assert_same(twins.gradients(), [parameter.grad for parameter in twins.parameters])
        optimizer.step()
        reference.step()
        twins.assert_same_parameters()
    assert_same(optimizer.state_dict(), reference.state_dict())


def test_accumulated_gradients_are_those_of_one_large_batch(workers: InProcessCluster) -> None:
    """The sums differ only in their order: in double precision they are nearly equal, and for whole numbers equal."""
    twins = Twins([("worker1", linear_of_doubles, (4, 3)), ("worker2", linear_of_doubles, (3, 2))], seed=3)
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    inputs = [x.double() for x in dense_inputs(4)]
    for x in inputs:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [twins.loss(x) / len(inputs)])
            optimizer.accumulate(context_id)
    twins.backward_alone(torch.cat(inputs))
    for gradient, parameter in zip(twins.gradients(), twins.parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)

    whole = Twins([("worker1", linear_of_integers, (4, 3))])
    optimizer = DistributedOptimizer(torch.optim.SGD, whole.rrefs, lr=0.125)
    batches = [torch.arange(8.0).reshape(2, 4) + i for i in range(3)]
    for x in batches:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", forward, args=(whole.layers[0], x)).sum()])
            optimizer.accumulate(context_id)
    optimizer.step()
    reference = torch.optim.SGD(whole.parameters, lr=0.125)
    whole.alone[0](torch.cat(batches)).sum().backward()
    reference.step()
    whole.assert_same_parameters()


def linear_of_doubles(inputs: int, outputs: int) -> nn.Module:
    return linear(inputs, outputs).double()


def linear_of_integers(inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    return layer


def test_accumulating_without_gradients_leaves_grad_unchanged(workers: InProcessCluster) -> None:
    """On a worker that took no part, and for a parameter without a gradient, .grad stays as it is."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    before = [None if place % 2 else torch.ones_like(p) for place, p in enumerate(twins.parameters)]
    for rref, gradient in zip(twins.rrefs, before, strict=True):
        run(rref, set_grad, gradient)
    x = torch.randn(2, 6)
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", forward, args=(twins.layers[1], x))
        dist_autograd.backward(context_id, [y.sum()])
        optimizer.accumulate(context_id)
    twins.parameters[2].grad = torch.ones_like(twins.parameters[2])
    torch.autograd.backward(twins.alone[1](x).sum())
    expected = [*before[:2], twins.parameters[2].grad, twins.parameters[3].grad, *before[4:]]
    assert_same(twins.gradients(), expected)


def test_accumulated_gradients_are_not_those_of_the_context(workers: InProcessCluster) -> None:
    """A later pass of the context adds to its own gradients only, and accumulating twice adds twice."""
    twins = dense_twins()
    optimizer = DistributedOptimizer(torch.optim.SGD, twins.rrefs, lr=0.1)
    x, y = dense_inputs(2)
    with dist_autograd.context() as context_id:
        backward(twins, context_id, x)
        optimizer.accumulate(context_id)
        once = twins.gradients()
        backward(twins, context_id, y)
        assert_same(twins.gradients(), once)
        optimizer.accumulate(context_id)
    for alone in (x, x, y):
        twins.backward_alone(alone)
    for gradient, parameter in zip(twins.gradients(), twins.parameters, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_sparse_gradients_are_accumulated(workers: InProcessCluster) -> None:
    twins = sparse_twins()
    optimizer = DistributedOptimizer(torch.optim.SparseAdam, twins.rrefs, lr=0.1)
    reference: Any = torch.optim.SparseAdam(twins.parameters, lr=0.1)
    for x in sparse_inputs(3):
        with dist_autograd.context() as context_id:
            backward(twins, context_id, x)
            optimizer.accumulate(context_id)
        twins.backward_alone(x)
    for gradient, parameter in zip(twins.gradients(), twins.parameters, strict=True):
        assert gradient is not None
        assert gradient.is_sparse
        assert_same(gradient, parameter.grad)
    optimizer.step()
    reference.step()
    twins.assert_same_parameters()


def test_dense_and_sparse_gradients_of_one_parameter(workers: InProcessCluster) -> None:
    """The dense one may come first or second."""
    for first, second in ((0, 1), (1, 0)):
        parameter = nn.Parameter(torch.ones(3, 2))
        optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.1)
        twin = copy.deepcopy(parameter)
        for kind in (first, second):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [use(parameter, kind)])
                optimizer.accumulate(context_id)
            torch.autograd.backward(use(twin, kind))
        assert parameter.grad is not None
        assert twin.grad is not None
        assert_same(parameter.grad, twin.grad)


def use(parameter: Tensor, kind: int) -> Tensor:
    if kind:
        return nn.functional.embedding(torch.tensor([0, 2, 2]), parameter, sparse=True).square().sum()
    return parameter.square().sum()


class InGradMode(torch.optim.Optimizer):
    """Does not switch autograd off, and relies on its caller for that."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter -= self.param_groups[0]["lr"] * parameter.grad


def test_autograd_is_switched_off_where_the_caller_has_done_so(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(InGradMode, twins.rrefs, lr=0.1)
    x = dense_inputs(1)[0]
    with dist_autograd.context() as context_id:
        backward(twins, context_id, x)
        with pytest.raises(PartialError, match="a leaf Variable that requires grad") as caught:
            optimizer.step(context_id)
        assert len(caught.value.errors) == 3
        with torch.no_grad():
            optimizer.step(context_id)
    twins.backward_alone(x)
    with torch.no_grad():
        InGradMode(twins.parameters, lr=0.1).step()
    twins.assert_same_parameters()


class Naive(torch.optim.Optimizer):
    """Does not switch autograd off, and changes the gradient in place."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad.mul_(-group["lr"]))


def test_an_optimizer_that_changes_gradients_in_place(workers: InProcessCluster) -> None:
    twins = dense_twins()
    optimizer = DistributedOptimizer(Naive, twins.rrefs, lr=0.1)
    twins.train(optimizer, Naive(twins.parameters, lr=0.1), dense_inputs(3))


def test_other_layouts_of_memory(workers: InProcessCluster) -> None:
    twins = Twins([("worker1", channels_last, ())])
    optimizer = DistributedOptimizer(torch.optim.Adam, twins.rrefs, lr=0.1)
    inputs = [torch.randn(2, 3, 5, 5) for _ in range(2)]
    twins.train(optimizer, torch.optim.Adam(twins.parameters, lr=0.1), inputs)
    assert run(twins.rrefs[0], Tensor.stride) == twins.parameters[0].stride()


def channels_last() -> nn.Module:
    layer: nn.Module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return layer
