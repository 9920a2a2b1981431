"""Hooks on remote modules run on the module's worker, as those of a module in one process do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from networks import ask, batch, equal_lists, gradients_in, grads, linear, twins
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import UnsendableError
from backhaul.nn import Pipeline, RemoteModule

pytestmark = pytest.mark.usefixtures("three")

EVENTS: list[tuple[Any, ...]] = []
"""What the hooks have seen. The workers of these tests are in one process."""


@pytest.fixture(autouse=True)
def _no_events() -> Iterator[None]:
    EVENTS.clear()
    yield
    EVENTS.clear()


def here() -> str:
    return rpc.get_worker_info().name


def pre(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> Any:
    EVENTS.append((name, here(), type(module).__name__, args[0].sum().item()))
    return (args[0] + 1,)


def pre_kwargs(module: nn.Module, args: Any, kwargs: Any) -> Any:
    EVENTS.append(("pre_kwargs", sorted(kwargs)))
    return args, {**kwargs, "scale": 2.0}


def post(name: str, module: nn.Module, args: Any, output: Tensor) -> Any:
    EVENTS.append((name, here(), output.sum().item()))
    return output * 3


def post_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
    EVENTS.append(("post_kwargs", kwargs))


def always(module: nn.Module, args: Any, output: Any) -> None:
    EVENTS.append(("always", output))


def backward(name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    EVENTS.append((name, here(), type(module).__name__, grad_input[0].clone(), grad_output[0].clone()))
    return (grad_input[0] * 2,)


def backward_pre(module: nn.Module, grad_output: Any) -> Any:
    EVENTS.append(("backward_pre", here(), grad_output[0].clone()))
    return (grad_output[0] * 10,)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def events_of(act: Callable[[], Any]) -> tuple[Any, list[tuple[Any, ...]]]:
    EVENTS.clear()
    value = act()
    return value, list(EVENTS)


def elsewhere(events: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The events of a module in this process, as if they were on worker1."""
    return [tuple("worker1" if part == "worker0" else part for part in event) for event in events]


def same_events(got: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> bool:
    return len(got) == len(expected) and all(
        len(mine) == len(its)
        and all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(mine, its, strict=True))
        for mine, its in zip(got, expected, strict=True)
    )


def test_forward_hooks() -> None:
    m, local = twins(1, "worker1", Scaled)
    for model in (m, local):
        model.register_forward_pre_hook(partial(pre, "second"))
        model.register_forward_pre_hook(partial(pre, "first"), prepend=True)
        model.register_forward_hook(partial(post, "fourth"))
        model.register_forward_hook(partial(post, "third"), prepend=True)
    got, events = events_of(lambda: m(batch(2, 4)))
    expected, local_events = events_of(lambda: local(batch(2, 4)))
    assert [event[0] for event in events] == ["first", "second", "third", "fourth"]
    assert {event[1] for event in events} == {"worker1"}
    assert same_events(events, elsewhere(local_events))
    assert torch.equal(got, expected)
    _, again = events_of(lambda: m.forward_async(batch(2, 4)).wait())
    assert same_events(again, events)


def test_forward_hooks_with_kwargs() -> None:
    m, local = twins(1, "worker1", Scaled)
    for model in (m, local):
        model.register_forward_pre_hook(pre_kwargs, with_kwargs=True)
        model.register_forward_hook(post_kwargs, with_kwargs=True)
    got, events = events_of(lambda: m(batch(2, 4), scale=5.0))
    expected, local_events = events_of(lambda: local(batch(2, 4), scale=5.0))
    assert events == local_events == [("pre_kwargs", ["scale"]), ("post_kwargs", {"scale": 2.0})]
    assert torch.equal(got, expected)


def test_hooks_that_are_always_called() -> None:
    m = RemoteModule("worker1", Scaled)
    m.register_forward_hook(post_kwargs, with_kwargs=True)
    m.register_forward_hook(always, always_call=True)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        m(batch(2, 3))
    assert EVENTS == [("always", None)]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients are computed")
@pytest.mark.parametrize("needs_grad", [True, False])
def test_backward_hooks(needs_grad: bool) -> None:
    """Backward hooks run once in a pass, with the gradients of one process, even if no input requires grad."""
    m, local = twins(1, "worker1", linear)
    hook = partial(backward if needs_grad else backward_without_input, "backward")
    for model in (m, local):
        model.register_full_backward_hook(hook)
        model.register_full_backward_hook(partial(backward_without_input, "before"), prepend=True)
        model.register_full_backward_pre_hook(backward_pre)
    x = batch(2, 4).requires_grad_(needs_grad)
    _, local_events = events_of(lambda: local(x * 1).pow(2).sum().backward())
    with dist_autograd.context() as context_id:
        loss = m(x * 1).pow(2).sum()
        _, events = events_of(lambda: context_id.backward(loss))
        got = ask(m, gradients_in, context_id)
        mine = context_id.gradients().get(x)
    assert [event[0] for event in events] == ["backward_pre", "before", "backward"]
    assert same_events(events, elsewhere(local_events))
    assert equal_lists([mine, *got], [x.grad, *grads(local)])


def backward_without_input(name: str, module: nn.Module, grad_input: Any, grad_output: Any) -> None:
    EVENTS.append((name, here(), type(module).__name__, len(grad_input), grad_output[0].clone()))


def test_backward_hooks_fire_once_for_each_call() -> None:
    m, local = twins(1, "worker1", linear)
    for model in (m, local):
        model.register_full_backward_hook(partial(backward, "backward"))
    x = batch(2, 4).requires_grad_()
    _, local_events = events_of(lambda: (local(x) + local(local(x))).sum().backward())
    with dist_autograd.context() as context_id:
        loss = (m(x) + m(m(x))).sum()
        _, events = events_of(lambda: context_id.backward(loss))
    assert len(events) == len(local_events) == 3


def test_backward_hooks_of_a_pipeline_s_stage() -> None:
    stages = [RemoteModule(f"worker{1 + i}", linear) for i in range(2)]
    for index, stage in enumerate(stages):
        stage.register_full_backward_hook(partial(backward_without_input, f"stage {index}"))
    pipeline = Pipeline(stages, chunks=3)
    with dist_autograd.context() as context_id:
        loss = pipeline(batch(6, 4).requires_grad_()).sum()
        _, events = events_of(lambda: context_id.backward(loss))
    assert sorted(event[0] for event in events) == ["stage 0"] * 3 + ["stage 1"] * 3
    assert {event[:2] for event in events} == {("stage 0", "worker1"), ("stage 1", "worker2")}


def test_removal() -> None:
    m = RemoteModule("worker1", linear)
    handle = m.register_forward_hook(partial(post, "a"))
    other = m.register_forward_hook(partial(post, "b"))
    assert [event[0] for event in events_of(lambda: m(batch(2, 4)))[1]] == ["a", "b"]
    handle.remove()
    handle.remove()
    assert [event[0] for event in events_of(lambda: m(batch(2, 4)))[1]] == ["b"]
    del other  # dropping the handle does not remove the hook
    assert [event[0] for event in events_of(lambda: m(batch(2, 4)))[1]] == ["b"]
    with m.register_forward_pre_hook(partial(pre, "c")) as kept:
        assert kept is not None
        assert [event[0] for event in events_of(lambda: m(batch(2, 4)))[1]] == ["c", "b"]
    assert [event[0] for event in events_of(lambda: m(batch(2, 4)))[1]] == ["b"]
    for register in (m.register_full_backward_hook, m.register_full_backward_pre_hook):
        register(backward_pre).remove()
    with dist_autograd.context() as context_id:
        loss = m(batch(2, 4)).sum()
        assert events_of(lambda: context_id.backward(loss))[1] == []


def test_a_hook_that_raises() -> None:
    m = RemoteModule("worker1", linear)
    with m.register_forward_hook(fail), pytest.raises(LookupError, match="hooked") as caught:
        m(batch(2, 4))
    assert caught.value.__cause__.worker == "worker1"  # type: ignore[union-attr]
    m(batch(2, 4))


def fail(*_: Any) -> None:
    raise LookupError("hooked")


def test_a_hook_that_cannot_be_sent() -> None:
    m = RemoteModule("worker1", linear)
    with pytest.raises(UnsendableError):
        m.register_forward_hook(lambda *_: None)


def test_other_remote_modules_of_the_module_see_the_hook() -> None:
    m = RemoteModule("worker1", linear)
    other = RemoteModule.init_from_module_rref("worker1", m.module_rref)
    with other.register_forward_hook(partial(post, "a")):
        assert len(events_of(lambda: m(batch(2, 4)))[1]) == 1
