"""A received tensor that is sent on unchanged: without hooks, its gradient goes back without torch's engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.testing import InProcessCluster


def twice(x: Tensor) -> Tensor:
    return x * 2


def pair_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x * 3


def gradient_of(pair: InProcessCluster, change: Callable[[Tensor], object], *, after: bool = True) -> list[float]:
    """The gradient of x through two calls. ``change`` is applied to the tensor in between."""
    x = torch.ones(3, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context:
        v = rpc.rpc_sync("worker1", twice, args=(x,))
        if not after:
            change(v)
        w = rpc.rpc_sync("worker1", twice, args=(v,))
        if after:
            change(v)
        dist_autograd.backward(context, [w.sum()])
        found: list[float] = dist_autograd.get_gradients(context)[x].tolist()
        return found


@pytest.mark.usefixtures("no_hooks")
def test_a_tensor_that_is_sent_on_needs_no_run(pair: InProcessCluster, runs: list[int]) -> None:
    assert gradient_of(pair, lambda v: None) == [4, 4, 4]
    assert len(runs) == 3  # one for the sum here, and two there


@pytest.mark.parametrize("after", [True, False])
def test_a_hook_set_before_or_after_sending_is_called(pair: InProcessCluster, after: bool) -> None:
    seen: list[list[float]] = []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient.tolist())
        return gradient * 10

    assert gradient_of(pair, lambda v: v.register_hook(hook), after=after) == [40, 40, 40]
    assert seen == [[2, 2, 2]]


def test_a_hook_outlives_its_tensor(pair: InProcessCluster) -> None:
    x = torch.ones(3, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context:
        v = rpc.rpc_sync("worker1", twice, args=(x,))
        w = rpc.rpc_sync("worker1", twice, args=(v,))
        v.register_hook(lambda gradient: gradient * 10)
        del v
        gc.collect()
        dist_autograd.backward(context, [w.sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [40, 40, 40]


@pytest.mark.usefixtures("no_hooks")
def test_a_hook_that_is_gone_again_does_not_count(pair: InProcessCluster, runs: list[int]) -> None:
    def put_and_remove(v: Tensor) -> None:
        v.register_hook(lambda gradient: gradient * 10).remove()

    assert gradient_of(pair, put_and_remove) == [4, 4, 4]
    assert len(runs) == 3


def test_a_retained_gradient_is_stored(pair: InProcessCluster) -> None:
    kept: list[Tensor] = []

    def retain(v: Tensor) -> None:
        v.retain_grad()
        kept.append(v)

    assert gradient_of(pair, retain) == [4, 4, 4]
    assert kept[0].grad is not None
    assert kept[0].grad.tolist() == [2, 2, 2]


def test_hooks_of_the_node_are_called(pair: InProcessCluster) -> None:
    called: list[str] = []

    def hook(v: Tensor) -> None:
        assert v.grad_fn is not None
        handles.append(v.grad_fn.register_prehook(lambda gradients: (gradients[0] * 10,)))
        handles.append(v.grad_fn.register_hook(lambda inputs, outputs: called.append("after")))

    handles: list[Any] = []
    try:
        assert gradient_of(pair, hook) == [40, 40, 40]
        assert called == ["after"]
    finally:
        for handle in handles:
            handle.remove()


def test_one_of_several_tensors_of_a_message(pair: InProcessCluster) -> None:
    x = torch.ones(3, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context:
        u, v = rpc.rpc_sync("worker1", pair_of, args=(x,))
        w = rpc.rpc_sync("worker1", twice, args=(v,))
        dist_autograd.backward(context, [w.sum() + u.sum()])
        assert dist_autograd.get_gradients(context)[x].tolist() == [8, 8, 8]


@pytest.mark.usefixtures("no_hooks")
def test_a_root_that_has_come_from_elsewhere(pair: InProcessCluster, runs: list[int]) -> None:
    x = torch.ones((), requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context:
        loss = rpc.rpc_sync("worker1", twice, args=(x,))
        dist_autograd.backward(context, [loss], retain_graph=True)
        loss.register_hook(lambda gradient: gradient * 10)
        dist_autograd.backward(context, [loss])
        assert dist_autograd.get_gradients(context)[x].item() == 2 + 20
    assert len(runs) == 3


def twice_there(x: Tensor) -> Tensor:
    """The result of another worker, returned as it came."""
    result: Tensor = rpc.rpc_sync("worker2", twice, args=(x,))
    changes[0](result)
    return result


def either(x: Tensor) -> Tensor:
    """The results come from two workers."""
    result: Tensor = rpc.rpc_sync("worker2" if x.sum() > 3 else "worker0", twice, args=(x,))
    return result


def again_there(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors, of which one was sent on twice."""
    result: Tensor = rpc.rpc_sync("worker2", twice, args=(x,))
    return result, rpc.rpc_sync("worker2", twice, args=(result,))


changes: list[Callable[[Tensor], object]] = [lambda v: None]
NUMBERS = (1, 2, 3, 4)


def gradients_through(cluster: InProcessCluster, function: Callable[[Tensor], Any], **options: Any) -> list[float]:
    """The gradients of four tensors, each through a call of this function on worker1."""
    xs = [torch.full((3,), float(number), requires_grad=True) for number in NUMBERS]
    with cluster[0].as_current(), dist_autograd.context() as context:
        results = [rpc.rpc_sync("worker1", function, args=(x,)) for x in xs]
        parts = [part for result in results for part in (result if isinstance(result, tuple) else (result,))]
        loss = torch.stack([(part * number).sum() for number, part in enumerate(parts, 1)]).sum()
        dist_autograd.backward(context, [loss], **options)
        if options:
            dist_autograd.backward(context, [loss])
        return [dist_autograd.get_gradients(context)[x][0].item() for x in xs]


@pytest.fixture
def three() -> Iterator[InProcessCluster]:
    with InProcessCluster(3) as workers:
        yield workers
    changes[0] = lambda v: None


@pytest.mark.usefixtures("no_hooks")
def test_several_tensors_that_were_sent_on_need_no_run(three: InProcessCluster, runs: list[int]) -> None:
    assert gradients_through(three, twice_there) == [2, 4, 6, 8]
    assert runs == [1, 4]  # for the loss, and for all four at worker2


@pytest.mark.usefixtures("no_hooks")
def test_several_tensors_that_were_sent_on_go_back_in_each_pass(three: InProcessCluster) -> None:
    assert gradients_through(three, twice_there, retain_graph=True) == [4, 8, 12, 16]


@pytest.mark.usefixtures("no_hooks")
def test_several_tensors_go_back_to_the_workers_that_sent_them(three: InProcessCluster) -> None:
    assert gradients_through(three, either) == [2, 4, 6, 8]


@pytest.mark.usefixtures("no_hooks")
def test_a_tensor_that_was_sent_on_twice_needs_a_run_for_its_sum(three: InProcessCluster) -> None:
    assert gradients_through(three, again_there) == [2 * 1 + 4 * 2, 2 * 3 + 4 * 4, 2 * 5 + 4 * 6, 2 * 7 + 4 * 8]


def test_a_hook_on_one_of_several_tensors_is_called(three: InProcessCluster) -> None:
    changes[0] = lambda v: v.register_hook(lambda gradient: gradient * 10) if v[0] == 4 else None
    assert gradients_through(three, twice_there) == [2, 40, 6, 8]


def test_a_gradient_of_one_of_several_tensors_is_retained(three: InProcessCluster) -> None:
    kept: list[Tensor] = []

    def retain(v: Tensor) -> None:
        if v[0] == 6:
            v.retain_grad()
            kept.append(v)

    changes[0] = retain
    assert gradients_through(three, twice_there) == [2, 4, 6, 8]
    assert kept[0].grad is not None
    assert kept[0].grad.tolist() == [3, 3, 3]
