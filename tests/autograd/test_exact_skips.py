"""Tensors that are sent and also used locally; results and arguments that get no gradient."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from models import (
    WITHIN,
    W,
    alone,
    await_no_leftovers,
    call,
    check,
    copied,
    gradients,
    identity,
    layer,
    leaf,
    make,
    multiply,
    new_weights,
    product,
    start,
)
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.testing import InProcessCluster


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


def assert_once_each(seen: list[Tensor]) -> None:
    """Check that the hook ran once in the reference and once in the test, with the same gradient."""
    assert len(seen) == 2
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-9, atol=1e-9)


def test_a_tensor_sent_and_used_here(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        return (call("worker1", layer, "a", h) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]})


def test_an_ancestor_of_a_sent_tensor_used_here(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        sent = torch.exp(h)
        return (call("worker1", layer, "a", sent) + h + torch.cos(h) * x).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_hooks_and_retained_gradients_see_the_complete_gradient_once(pair: InProcessCluster) -> None:
    """On the tensor that is sent and used here, on its ancestor, on the leaf, and on the received tensor."""
    x = leaf(4, 4)
    seen: dict[str, list[Tensor]] = {name: [] for name in ("x", "ancestor", "sent", "received")}
    retained: dict[str, list[Tensor]] = {"ancestor": [], "sent": [], "received": []}
    x.register_hook(seen["x"].append)  # type: ignore[no-untyped-call]

    def program() -> Any:
        ancestor = torch.sin(x)
        sent = torch.exp(ancestor)
        received = call("worker1", layer, "a", sent)
        for name, tensor in (("ancestor", ancestor), ("sent", sent), ("received", received)):
            tensor.register_hook(seen[name].append)
            tensor.retain_grad()
            retained[name].append(tensor)
        return (received * sent + received * ancestor + torch.cos(sent)).sum()

    check(pair, program, {0: [x], 1: [W["a"]]}, exact=False)
    for grads in seen.values():
        assert_once_each(grads)
    for name, tensors in retained.items():
        for tensor, grad in zip(tensors, seen[name], strict=True):
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, grad)


def test_a_hook_that_changes_the_gradient_of_a_sent_tensor(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))  # type: ignore[no-untyped-call]
        return (call("worker1", layer, "a", h) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]})


class Halves(torch.nn.Module):
    """Encoder and decoder of a U-shaped model. The middle is on another worker."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double()
        self.decoder = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        middle = call("worker1", layer, "a", h)
        return self.decoder(torch.cat([h, middle], 1))  # type: ignore[no-any-return]


def test_a_u_shaped_model(pair: InProcessCluster) -> None:
    model, x = Halves(), leaf(3, 4)
    check(pair, lambda: model(x).pow(2).mean(), {0: [x, *model.parameters()], 1: [W["a"]]}, exact=False)


def test_module_hooks_of_a_u_shaped_model_fire_once(pair: InProcessCluster) -> None:
    model, x = Halves(), leaf(3, 4)
    seen: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        seen.update({f"{name} {part}": [] for part in ("in", "out", "before")})

        def note(_: object, grad_in: Any, grad_out: Any, name: str = name) -> None:
            seen[f"{name} in"].append(grad_in[0].clone())
            seen[f"{name} out"].append(grad_out[0].clone())

        def note_before(_: object, grad_out: Any, name: str = name) -> None:
            seen[f"{name} before"].append(grad_out[0].clone())

        module.register_full_backward_hook(note)
        module.register_full_backward_pre_hook(note_before)
    check(pair, lambda: model(x).pow(2).mean(), {0: [x, *model.parameters()], 1: [W["a"]]}, exact=False)
    assert len(seen) == 3 * len(list(model.modules()))
    for grads in seen.values():
        assert_once_each(grads)


def u_on_worker(depth: int, x: Tensor) -> Tensor:
    """A U-shaped model whose middle is a U on the other worker."""
    name = "abcdef"[depth]
    h = torch.tanh(x @ W[name])
    if depth == 4:
        return h
    return torch.sin(call(f"worker{depth % 3}", u_on_worker, depth + 1, h) * h + h)


def test_a_u_shaped_model_within_another_over_three_workers(trio: InProcessCluster) -> None:
    x = leaf(2, 4)
    leaves = {0: [x, W["a"], W["b"], W["e"]], 1: [W["c"]], 2: [W["d"]]}
    check(trio, lambda: u_on_worker(0, x).sum(), leaves, exact=False)


def test_skips_over_several_sends(trio: InProcessCluster) -> None:
    """Each result is used in the next call and at the end, as in a dense block."""
    x = leaf(4, 4)

    def program() -> Any:
        values = [torch.sin(x)]
        for i in range(6):
            values.append(call(f"worker{1 + i % 2}", multiply, "abcdef"[i], torch.tanh(sum(values))))  # type: ignore[arg-type]
        return torch.stack(values).prod(0).sum()

    leaves = {0: [x], 1: [W[name] for name in "ace"], 2: [W[name] for name in "bdf"]}
    check(trio, program, leaves, exact=False)


def test_a_leaf_hook_sees_the_sum_of_unrelated_parts(pair: InProcessCluster) -> None:
    """The parts on worker1 share only the leaf."""
    x, y = leaf(4, 4), leaf(4, 4, seed=2)
    seen: list[Tensor] = []
    W["a"].register_hook(seen.append)  # type: ignore[no-untyped-call]

    def program() -> Any:
        return (call("worker1", multiply, "a", x) + torch.sin(call("worker1", multiply, "a", y))).sum()

    check(pair, program, {0: [x, y], 1: [W["a"]]})
    assert_once_each(seen)


def test_a_leaf_hook_that_changes_the_gradient(pair: InProcessCluster) -> None:
    x, y = leaf(4, 4), leaf(4, 4, seed=2)
    W["a"].register_hook(lambda grad: grad.clamp(-0.5, 0.5))  # type: ignore[no-untyped-call]
    x.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]

    def program() -> Any:
        return (call("worker1", multiply, "a", x) * x + call("worker1", multiply, "a", y)).sum()

    check(pair, program, {0: [x, y], 1: [W["a"]]}, exact=False)


def test_a_result_that_is_never_used(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        call("worker1", layer, "b", h)
        return (call("worker1", layer, "a", h) * h).sum()

    check(pair, program, {0: [x], 1: [W["a"]]})


@pytest.mark.parametrize("at_once", [False, True])
def test_many_results_that_are_never_used(trio: InProcessCluster, at_once: bool) -> None:
    """Before and after the used result, on both workers, kept or not, fetched or not."""
    x = leaf(4, 4)
    kept: list[Any] = []

    def program() -> Any:
        h = torch.sin(x)
        futures = [start(f"worker{1 + i % 2}", layer, "bcdefgh"[i], h) for i in range(7)]
        if not at_once:
            kept.extend(future.wait() for future in futures)
        used = call("worker1", layer, "a", h)
        rref = make("worker2", layer, "b", h)
        kept.append(call("worker2", product, used, rref.to_here()))
        kept.append(make("worker1", layer, "c", used))
        if at_once:
            kept.extend(future.wait() for future in futures)
        return (used * h).sum()

    check(trio, program, {0: [x], 1: [W["a"]]})
    kept.clear()


def use_some(x: Tensor) -> Tensor:
    """Calls whose results are unused, or used only in other such calls."""
    h = x * W["a"]
    wasted = call("worker2", layer, "b", h)
    call("worker0", product, wasted, h)
    used = call("worker2", layer, "c", h)
    call("worker2", layer, "d", used)
    return used + h  # type: ignore[no-any-return]


def test_results_of_nested_calls_that_are_never_used(trio: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        call("worker1", use_some, h)
        return (call("worker1", use_some, h) * h).sum()

    check(trio, program, {0: [x], 1: [W["a"]], 2: [W["c"]]}, exact=False)


def keep_nothing(x: Tensor) -> int:
    layer("a", x)
    return x.numel()


def test_an_argument_that_is_never_used(pair: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        assert call("worker1", keep_nothing, h) == 16
        return (call("worker1", layer, "b", h) * call("worker1", torch.zeros_like, h) + h).sum()

    check(pair, program, {0: [x], 1: [W["b"]]}, exact=False)


def no_part_is_remote(x: Tensor) -> Tensor:
    return torch.sin(x)


def test_a_loss_that_no_call_leads_to(trio: InProcessCluster) -> None:
    x, y = leaf(4, 4), leaf(4, 4, seed=2)

    def program() -> Any:
        call("worker1", use_some, y)
        call("worker2", layer, "e", x)
        return no_part_is_remote(x).sum()

    check(trio, program, {0: [x]})


def three_parts(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return x * W["a"], y * W["b"], z * W["c"], torch.arange(3)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_some_tensors_of_a_message_get_gradients(trio: InProcessCluster, used: tuple[int, ...]) -> None:
    sent = [leaf(4, 4, seed=i) for i in range(3)]
    middle: list[list[Tensor]] = []

    def program() -> Any:
        hidden = [torch.sin(x) for x in sent]
        for h in hidden:
            h.retain_grad()
        middle.append(hidden)
        *parts, numbers = call("worker1", three_parts, *hidden)
        assert numbers.tolist() == [0, 1, 2]
        again = call("worker2", copied, parts)
        return torch.stack([again[i] for i in used]).sum()

    check(trio, program, {0: [sent[i] for i in used], 1: [W["abc"[i]] for i in used]})
    for hidden in middle:
        assert [h.grad is not None for h in hidden] == [i in used for i in range(3)]


def some_without_grad(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (x * y).detach(), x * y, x > 0


def test_messages_of_which_some_tensors_need_no_grad(pair: InProcessCluster) -> None:
    x, y = leaf(4, 4), leaf(4, 4, seed=2).detach()

    def program() -> Any:
        detached, attached, mask = call("worker1", some_without_grad, x, y)
        assert (detached.requires_grad, attached.requires_grad, mask.dtype) == (False, True, torch.bool)
        return (detached * attached * mask).sum()

    check(pair, program, {0: [x]})


def test_a_gradient_that_is_undefined_is_none_not_zero(pair: InProcessCluster) -> None:
    """A Function gets None for an output, as in one process."""
    x = leaf(4, 4)
    seen.clear()
    check(pair, lambda: call("worker1", both, x)[0].sum(), {0: [x]})
    assert seen == [(True, False), (True, False)]


seen: list[tuple[bool, ...]] = []


class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor:
        seen.append(tuple(grad is not None for grad in grads))
        given = [grad * factor for grad, factor in zip(grads, (2, 3), strict=True) if grad is not None]
        return torch.stack(given).sum(0)


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = Both.apply(x)  # type: ignore[no-untyped-call]
    return first, second


def test_nothing_reaches_a_worker_by_a_result_that_is_not_used(trio: InProcessCluster) -> None:
    """A later pass from another root of the same context includes that worker."""
    x = leaf(4, 4)
    with alone():
        h = torch.sin(x)
        expected = torch.autograd.grad((layer("a", h) * h).sum(), [x, W["a"]])
        later = torch.autograd.grad(layer("b", torch.sin(x)).sum(), [x, W["b"]])
    with trio[0].as_current(), dist_autograd.context() as ctx:
        h = torch.sin(x)
        other = call("worker2", layer, "b", h)
        used = call("worker1", layer, "a", h)
        dist_autograd.backward(ctx, [(used * h).sum()], retain_graph=True)
        assert torch.equal(gradients(trio, ctx)[0][x], expected[0])
        assert not gradients(trio, ctx)[2]
        dist_autograd.backward(ctx, [other.sum()])
        assert torch.equal(gradients(trio, ctx)[2][W["b"]], later[1])
        assert torch.equal(gradients(trio, ctx)[1][W["a"]], expected[1])
        torch.testing.assert_close(gradients(trio, ctx)[0][x], expected[0] + later[0], rtol=1e-9, atol=1e-9)
        del other, used, h
    await_no_leftovers(trio)


class Nothing(torch.autograd.Function):
    """Gives no gradient to its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def cut(x: Tensor) -> Tensor:
    return Nothing.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def test_gradients_that_end_on_the_way(trio: InProcessCluster) -> None:
    """The calls take part, so their senders wait for them, and get None."""
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        y = call("worker1", multiply, "a", h)
        z = call("worker2", cut, y)
        return (cut(y) + z + h + cut(call("worker2", layer, "b", h))).sum()

    check(trio, program, {0: [x]}, exact=False)


def give_lock(x: Tensor) -> tuple[Tensor, Any]:
    return x * 2, threading.Lock()


def call_and_fail(x: Tensor) -> None:
    call("worker2", layer, "b", x * 2)
    raise ValueError("after a call")


_release = threading.Event()


def wait_and_apply(name: str, x: Tensor) -> Tensor:
    assert _release.wait(WITHIN)
    return layer(name, x)


def test_calls_that_failed_and_calls_under_way(trio: InProcessCluster) -> None:
    """A pass does not wait for unsendable requests or replies, failed calls, timeouts, or calls that still run."""
    _release.clear()
    x = leaf(4, 4)
    expected = torch.autograd.grad((layer("a", torch.sin(x)) * torch.sin(x)).sum(), [x, W["a"]])
    later = torch.autograd.grad(layer("c", torch.sin(x)).sum(), [x, W["c"]])
    with trio[0].as_current(), dist_autograd.context() as ctx:
        h = torch.sin(x)
        with pytest.raises(rpc.UnsendableError):
            call("worker1", identity, (h, threading.Lock()))
        with pytest.raises(rpc.UnsendableError):
            call("worker1", give_lock, h)
        with pytest.raises(ValueError, match="after a call"):
            call("worker1", call_and_fail, h)
        with pytest.raises(rpc.RpcTimeoutError):
            rpc.rpc_sync("worker1", wait_and_apply, args=("c", h), timeout=0.05)
        under_way = start("worker1", wait_and_apply, "c", h)
        ctx.backward((call("worker1", layer, "a", h) * h).sum(), retain_graph=True, timeout=WITHIN)
        torch.testing.assert_close(ctx.gradients()[x], expected[0], rtol=1e-9, atol=1e-9)
        _release.set()
        ctx.backward(under_way.wait().sum(), timeout=WITHIN)
        torch.testing.assert_close(ctx.gradients()[x], expected[0] + later[0], rtol=1e-9, atol=1e-9)
        found = gradients(trio, ctx)
        assert torch.equal(found[1][W["a"]], expected[1])
        assert torch.equal(found[1][W["c"]], later[1])
        assert not found[2]
        del h, under_way
    await_no_leftovers(trio)
