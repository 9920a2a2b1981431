"""Kinds of functions: custom Functions, checkpoints, dropout, no grad, hooks after accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import (
    Accumulate,
    W,
    await_no_leftovers,
    call,
    check,
    double,
    gradients,
    identity,
    layer,
    leaf,
    multiply,
    new_weights,
    start,
    take_grads,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import backhaul.autograd as dist_autograd
from backhaul.testing import InProcessCluster


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


class Cube(torch.autograd.Function):
    """A Function whose backward is wrong on purpose, so that no other way to differentiate gives the same result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * 7  # type: ignore[no-any-return]


def cube(x: Tensor) -> Tensor:
    return Cube.apply(x * W["a"])  # type: ignore[no-any-return, no-untyped-call]


def test_custom_functions(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = Cube.apply(x)  # type: ignore[no-untyped-call]
        return Cube.apply(call("worker1", cube, h) * h).sum()  # type: ignore[no-untyped-call]

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def checkpointed(x: Tensor) -> Tensor:
    return checkpoint(cube, torch.sin(x), use_reentrant=False)  # type: ignore[no-any-return]


def checkpointed_with_a_call(to: str, x: Tensor) -> Tensor:
    return checkpoint(call, to, cube, torch.sin(x), use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpoints_on_the_callee(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        return (call("worker1", checkpointed, h) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]})


def test_checkpoints_around_a_call(pair: InProcessCluster) -> None:
    """The call is made again when the pass recomputes the segment."""
    x = leaf(4, 4)

    def segment(h: Tensor) -> Tensor:
        return torch.sin(call("worker1", multiply, "a", torch.exp(h)) * h)

    def program() -> Any:
        h = torch.sin(x)
        return (checkpoint(segment, h, use_reentrant=False) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_checkpoints_around_a_call_on_the_callee(trio: InProcessCluster) -> None:
    """The pass makes calls on a worker that is not its initiator."""
    x = leaf(4, 4)

    def program() -> Any:
        return torch.sin(call("worker1", checkpointed_with_a_call, "worker2", x * 2)).sum()

    check(trio, program, {0: [x], 2: [W["a"]]})


def reentrant(x: Tensor) -> Tensor:
    return checkpoint(cube, torch.sin(x), use_reentrant=True)  # type: ignore[no-any-return]


def test_reentrant_checkpoints_that_accumulate_in_place(pair: InProcessCluster) -> None:
    """Torch runs a nested engine there, which only knows .grad."""
    x = leaf(4, 4)

    def program() -> Any:
        h = checkpoint(torch.sin, x * 2, use_reentrant=True)
        assert isinstance(h, Tensor)
        return (call("worker1", reentrant, h) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, accumulate="grad")


def test_reentrant_checkpoints_around_a_call_are_refused(pair: InProcessCluster) -> None:
    """The nested engine would not wait for the gradients of the call."""
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = checkpoint(call, "worker1", multiply, "a", torch.sin(x), use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            dist_autograd.backward(ctx, [y.sum()], accumulate="grad")
        del y
    assert x.grad is None
    await_no_leftovers(pair)


def test_reentrant_checkpoints_need_accumulation_in_place(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    with pair[0].as_current(), dist_autograd.context() as ctx:
        y = call("worker1", reentrant, torch.sin(x))
        with pytest.raises(RuntimeError, match="use_reentrant=True") as caught:
            dist_autograd.backward(ctx, [y.sum()])
        assert caught.value.__cause__.worker == "worker1"  # type: ignore[union-attr]
        del y
    await_no_leftovers(pair)


def drop(seed: int, x: Tensor) -> Tensor:
    torch.manual_seed(seed)
    return torch.nn.functional.dropout(x * W["a"], 0.5)


def drop_in_checkpoint(seed: int, x: Tensor) -> Tensor:
    torch.manual_seed(seed)
    return checkpoint(lambda y: torch.sin(torch.nn.functional.dropout(y * W["b"], 0.5)), x, use_reentrant=False)  # type: ignore[no-any-return]


def test_dropout(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        y = call("worker1", drop, 5, torch.sin(x))
        return (torch.nn.functional.dropout(y, 0.3) * call("worker1", drop_in_checkpoint, 6, x)).sum()

    check(pair, program, {0: [x], 1: [W["a"], W["b"]]})


def test_calls_without_grad(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        with torch.no_grad():
            constant = call("worker1", layer, "a", h)
        assert not constant.requires_grad
        return (constant * h).sum()

    check(pair, program, {0: [x]})


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * W["a"] + call("worker0", multiply, "b", x)  # type: ignore[no-any-return]


def test_a_function_without_grad(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        constant = call("worker1", without_grad, h)
        assert not constant.requires_grad
        return (constant * h).sum()

    check(pair, program, {0: [x]})


def test_inference_mode_around_a_call(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        with torch.inference_mode():
            constant = call("worker1", layer, "a", torch.ones(4, 4, dtype=torch.float64))
        assert not constant.requires_grad
        return (constant.clone() * torch.sin(x)).sum()

    check(pair, program, {0: [x]})


def test_a_reply_that_is_waited_for_in_inference_mode(pair: InProcessCluster) -> None:
    """The call was made outside inference mode. The mode of the thread that reads the reply does not matter."""
    x = leaf(4, 4)

    def program() -> Any:
        future = start("worker1", multiply, "a", torch.sin(x))
        with torch.inference_mode():
            y = future.wait()
        return (y * x).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_hooks_after_accumulation(pair: InProcessCluster, accumulate: Accumulate) -> None:
    """Each hook runs once, with the whole gradient in .grad, as in one process."""
    x, y = leaf(4, 4), leaf(4, 4, seed=2)
    seen: dict[str, list[Tensor]] = {"a": [], "x": []}
    for name, tensor in (("a", W["a"]), ("x", x)):

        def note(param: Tensor, kept: list[Tensor] = seen[name]) -> None:
            assert param.grad is not None
            kept.append(param.grad.clone())

        tensor.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def program() -> Any:
        h = call("worker1", multiply, "a", x)
        return (h * x + torch.sin(call("worker1", multiply, "a", y))).sum()

    check(pair, program, {0: [x, y], 1: [W["a"]]}, accumulate=accumulate, exact=False)
    for grads in seen.values():
        assert len(grads) == 2
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


def test_an_optimizer_step_in_a_hook_after_accumulation(pair: InProcessCluster) -> None:
    """The hook removes the gradient, so none is left."""
    x = leaf(4, 4)
    before = W["a"].detach().clone()

    def step(param: Tensor) -> None:
        assert param.grad is not None
        with torch.no_grad():
            param -= 0.1 * param.grad
        param.grad = None

    W["a"].register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    with pair[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [call("worker1", multiply, "a", x).sum()], accumulate="grad")
    assert torch.equal(W["a"].detach(), before - 0.1 * x.detach())
    assert W["a"].grad is None
    assert x.grad is not None
    await_no_leftovers(pair)


def test_an_existing_grad_is_left_alone(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    x.grad, W["a"].grad = torch.ones(4, 4).double(), torch.full((4, 4), 2.0).double()
    W["a"].register_post_accumulate_grad_hook(lambda param: None)  # type: ignore[no-untyped-call]
    with pair[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [call("worker1", multiply, "a", x).sum()])
        found = gradients(pair, ctx)
    assert torch.equal(found[0][x], W["a"].detach())
    assert torch.equal(found[1][W["a"]], x.detach())
    assert x.grad.eq(1).all()
    assert W["a"].grad.eq(2).all()
    take_grads({0: [x], 1: [W["a"]]})


def test_anomaly_mode(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        return (call("worker1", layer, "a", h) * h).sum()

    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        check(pair, program, {0: [x], 1: [W["a"]]})


def packed_away(x: Tensor) -> Tensor:
    return torch.sin(x * W["a"]) * x


def test_saved_tensor_hooks(pair: InProcessCluster) -> None:
    x = leaf(4, 4)
    packed: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.numel())
        return tensor.clone()

    def program() -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            h = torch.sin(x)
            return (call("worker1", packed_away, h) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)
    assert packed


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_hooks_on_several_tensors(pair: InProcessCluster, accumulate: Accumulate) -> None:
    x = leaf(4, 4)
    seen: list[list[Tensor]] = []

    def note(grads: Any) -> None:
        seen.append([grad.clone() for grad in grads])

    def program() -> Any:
        h = torch.sin(x)
        y = call("worker1", layer, "a", h)
        torch.autograd.graph.register_multi_grad_hook((h, y), note)
        return (y * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, accumulate=accumulate)
    assert len(seen) == 2
    assert all(torch.equal(got, expected) for expected, got in zip(*seen, strict=True))


def doubled_by_caller(x: Tensor) -> Tensor:
    y = x * W["a"]
    y.register_hook(lambda grad: call("worker0", double, grad))  # type: ignore[no-untyped-call]
    return y


def test_hooks_that_make_calls(pair: InProcessCluster) -> None:
    """The hook calls the worker that waits for this gradient."""
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        return (call("worker1", doubled_by_caller, h) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]})


def test_a_gradient_shares_memory_with_no_other_tensor(pair: InProcessCluster) -> None:
    """Passes add to gradients in place. That must not change the user's tensors, tensors of a hook, or other leaves."""
    x, y = leaf(4, 4), leaf(4, 4, seed=2)
    given = torch.full((4, 4), 3.0, dtype=torch.float64)
    kept: list[Tensor] = []
    with pair[0].as_current(), dist_autograd.context() as ctx:
        total, both = x + y, call("worker1", identity, torch.cat([x, y]))
        both.register_hook(kept.append)
        x.register_hook(kept.append)  # type: ignore[no-untyped-call]
        for _ in range(3):
            ctx.backward(total, grad_tensors=given, retain_graph=True)
        found = ctx.gradients()
        assert given.eq(3).all()
        assert found[x].eq(9).all()
        assert found[y].eq(9).all()
        for _ in range(3):
            ctx.backward(both.sum(), retain_graph=True)
        assert found[x].eq(12).all()
        assert found[y].eq(12).all()
    assert [int(grad[0, 0]) for grad in kept] == [3, 3, 3, 1, 1, 1, 1, 1, 1]
