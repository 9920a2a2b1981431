"""Shortcuts: the gradient of a tensor that the starter has only sent on does not go through the starter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from acts import Latch, work
from endings import backward_later
from models import WITHIN, W, await_no_leftovers, call, check, layer, leaf
from torch import Tensor

import backhaul.autograd as dist_autograd
from awaiting import await_events
from backhaul import rpc
from backhaul.agent.observing import Began, Event, GradientsCame, Starts
from backhaul.autograd.local_pass import MOST_SHORTCUTS
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("quiet", "no_hooks")

Hop = tuple[str, str]
"""A worker, and the name of the weight that it applies."""


@contextmanager
def gradients_to(workers: InProcessCluster, rank: int) -> Iterator[list[str]]:
    """The names of the workers from which gradients come during the block."""
    seen: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, GradientsCame):
            seen.append(event.peer)

    remove = workers[rank].agent.observers.add(note)
    try:
        yield seen
    finally:
        remove()


def along(hops: list[Hop], x: Tensor, between: Callable[[Tensor], Tensor] = lambda v: v) -> Tensor:
    for to, name in hops:
        x = between(call(to, layer, name, x))
    return x.sum()


def connect(workers: InProcessCluster, one: int, other: int) -> None:
    for mine, theirs in ((one, other), (other, one)):
        workers[mine].rpc_sync(f"worker{theirs}", torch.ones, args=(1,))


def test_a_worker_that_gets_its_own_tensors_back_keeps_their_gradients(trio: InProcessCluster) -> None:
    x = leaf(3, 4)
    hops = [("worker1", name) for name in "abcd"]
    with gradients_to(trio, 0) as seen:
        check(trio, lambda: [along(hops, x)], {0: [x], 1: [W[name] for name in "abcd"]})
    assert seen == ["worker1"]  # for x


def test_gradients_go_from_worker_to_worker(trio: InProcessCluster) -> None:
    connect(trio, 1, 2)
    x = leaf(3, 4)
    hops = [("worker1", "a"), ("worker2", "b"), ("worker1", "c"), ("worker2", "d")]
    leaves = {0: [x], 1: [W["a"], W["c"]], 2: [W["b"], W["d"]]}
    with gradients_to(trio, 0) as starter, gradients_to(trio, 1) as first, gradients_to(trio, 2) as second:
        check(trio, lambda: [along(hops, x)], leaves)
    assert starter == ["worker1"]
    assert first == ["worker2", "worker2"]
    assert second == ["worker0", "worker1"]


def test_workers_that_do_not_know_each_other_are_connected_for_the_next_pass(trio: InProcessCluster) -> None:
    x = leaf(3, 4)
    hops = [("worker1", "a"), ("worker2", "b")]
    leaves = {0: [x], 1: [W["a"]], 2: [W["b"]]}
    assert trio[2].agent.connected(1) is None
    with gradients_to(trio, 0) as seen:
        check(trio, lambda: [along(hops, x)], leaves)
    assert seen == ["worker2", "worker1"]
    assert await_events(trio[2], lambda: trio[2].agent.connected(1) is not None, 10)
    with gradients_to(trio, 0) as seen:
        check(trio, lambda: [along(hops, x)], leaves)
    assert seen == ["worker1"]


def test_a_second_pass_over_a_retained_graph_takes_the_same_shortcuts(trio: InProcessCluster) -> None:
    connect(trio, 1, 2)
    x = leaf(3, 4)
    hops = [("worker1", "a"), ("worker2", "b"), ("worker1", "c")]
    with trio[0].as_current(), dist_autograd.context() as context:
        loss = along(hops, x)
        for _ in range(2):
            with gradients_to(trio, 0) as seen:
                dist_autograd.backward(context, [loss], retain_graph=True)
            assert seen == ["worker1"]


def test_a_tensor_that_is_used_again_goes_through_the_starter(trio: InProcessCluster) -> None:
    x = leaf(3, 4)

    def program() -> list[Tensor]:
        v = call("worker1", layer, "a", x)
        return [call("worker1", layer, "b", v).sum() + (v * v).sum()]

    with gradients_to(trio, 0) as seen:
        check(trio, program, {0: [x], 1: [W["a"], W["b"]]})
    assert len(seen) == 2


def test_a_tensor_that_is_sent_on_twice_goes_through_the_starter(trio: InProcessCluster) -> None:
    x = leaf(3, 4)

    def program() -> list[Tensor]:
        v = call("worker1", layer, "a", x)
        return [call("worker1", layer, "b", v).sum() + call("worker2", layer, "c", v).sum()]

    check(trio, program, {0: [x], 1: [W["a"], W["b"]], 2: [W["c"]]})


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sin(x @ W["a"]), torch.cos(y @ W["a"])


def test_tensors_that_share_a_message_go_through_the_starter(trio: InProcessCluster) -> None:
    """The gradients of a message arrive together; with a shortcut, a worker could not know whether one is missing."""
    x, y = leaf(3, 4), leaf(3, 4, seed=2)

    def program() -> list[Tensor]:
        u, v = call("worker1", both, x, y)
        u, v = call("worker1", both, v, u)
        return [call("worker1", layer, "b", u).sum() + v.sum()]

    check(trio, program, {0: [x, y], 1: [W["a"], W["b"]]}, exact=False)


def test_a_tensor_that_is_sent_on_beside_another_goes_through_the_starter(trio: InProcessCluster) -> None:
    connect(trio, 1, 2)
    x, y = leaf(3, 4), leaf(3, 4, seed=2)

    def program() -> list[Tensor]:
        u, v = call("worker1", both, call("worker2", layer, "b", x), y)
        return [u.sum() + v.sum()]

    with gradients_to(trio, 2) as seen:
        check(trio, program, {0: [x, y], 1: [W["a"]], 2: [W["b"]]}, exact=False)
    assert seen == ["worker0"]


STATE: dict[str, Tensor] = {}


def remember(x: Tensor) -> Tensor:
    STATE["h"] = x @ W["a"]
    return torch.sin(STATE["h"])


def with_memory(x: Tensor) -> Tensor:
    return (x * STATE["h"]) @ W["b"]


def test_a_run_waits_for_a_gradient_that_it_makes_itself(trio: InProcessCluster) -> None:
    """The two sources of worker 1 reach a common node. The run that needs the second one's gradient also makes it."""
    x = leaf(3, 4)

    def program() -> list[Tensor]:
        return [call("worker1", with_memory, call("worker1", remember, x)).sum()]

    check(trio, program, {0: [x], 1: [W["a"], W["b"]]})
    STATE.clear()


def test_a_chain_with_more_hops_than_a_message_has_shortcuts(trio: InProcessCluster) -> None:
    x = leaf(3, 4)
    hops = [("worker1", "a")] * (2 * MOST_SHORTCUTS + 2)
    with gradients_to(trio, 0) as seen:
        check(trio, lambda: [along(hops, x)], {0: [x], 1: [W["a"]]}, exact=False)
    assert len(seen) == 2  # for x, and where the shortcuts of the message end


def test_a_graph_that_is_retained_can_be_run_again_and_one_that_is_not_cannot(trio: InProcessCluster) -> None:
    x = leaf(3, 4)
    with trio[0].as_current(), dist_autograd.context() as context:
        loss = along([("worker1", "a"), ("worker1", "b"), ("worker2", "c"), ("worker2", "d")], x)
        dist_autograd.backward(context, [loss], retain_graph=True)
        once = dist_autograd.get_gradients(context)[x].clone()
        dist_autograd.backward(context, [loss])
        assert torch.equal(dist_autograd.get_gradients(context)[x], 2 * once)
        assert not trio[0].autograd.contexts.find(context).unspent
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            dist_autograd.backward(context, [loss])
    await_no_leftovers(trio)


def failing(gradient: Tensor) -> Tensor:
    raise ValueError("no gradient for you")


def layer_that_fails(name: str, x: Tensor) -> Tensor:
    y = layer(name, x)
    y.register_hook(failing)
    return y


def test_an_error_behind_a_shortcut_reaches_the_starter(trio: InProcessCluster) -> None:
    with trio[0].as_current(), dist_autograd.context() as context:
        v = call("worker1", layer_that_fails, "a", leaf(3, 4))
        loss = along([("worker1", "b")], v)
        with pytest.raises(ValueError, match="no gradient for you"):
            dist_autograd.backward(context, [loss])
    await_no_leftovers(trio)


def test_the_starter_of_a_chain_gets_one_report(trio: InProcessCluster) -> None:
    """Each worker gives its report to the next one, together with the gradients."""
    connect(trio, 1, 2)
    x = leaf(3, 4)
    hops = [("worker1", "a"), ("worker2", "b"), ("worker1", "c"), ("worker2", "d")]
    kinds: list[str] = []

    def note(event: Event) -> None:
        if isinstance(event, Starts | Began):
            kinds.append(event.kind)

    remove = trio[0].agent.observers.add(note)
    try:
        check(trio, lambda: [along(hops, x)], {0: [x], 1: [W["a"], W["c"]], 2: [W["b"], W["d"]]})
    finally:
        remove()
    assert [kind for kind in kinds if kind in ("Gradients", "Report")] == ["Gradients", "Report"]


@pytest.mark.parametrize("dies", [1, 2])
def test_a_worker_that_dies_behind_a_shortcut_is_named(trio: InProcessCluster, dies: int) -> None:
    """Worker 1 works on a gradient that worker 2 has sent. Neither has said anything to the starter by then."""
    connect(trio, 1, 2)
    with Latch("a") as latch, trio[0].as_current(), dist_autograd.context() as context:
        v = call("worker1", work, "a", leaf(3, 4))
        loss = along([("worker2", "b")], v)
        running = backward_later(trio, 0, context, loss)
        latch.await_entered()
        trio[dies].agent.close(0.0)
        trio[dies].autograd.close()
        error = running.exception(WITHIN)
        assert isinstance(error, rpc.WorkerLostError)
        assert error.worker == f"worker{dies}"


def test_a_starter_that_loses_a_worker_behind_a_shortcut_gives_up(trio: InProcessCluster) -> None:
    """The starter has given worker 1 no work. But only worker 1 could tell it that the pass is over."""
    connect(trio, 1, 2)
    with Latch("b") as latch, trio[0].as_current(), dist_autograd.context() as context:
        v = call("worker1", layer, "a", leaf(3, 4).detach())
        loss = call("worker2", work, "b", v).sum()
        running = backward_later(trio, 0, context, loss)
        latch.await_entered()
        for line in [*trio[0].agent.calling(), *trio[0].agent.serving.lines]:
            if line.peer.name == "worker1":
                line.shutdown()
        error = running.exception(WITHIN)
        assert isinstance(error, rpc.WorkerLostError)
        assert error.worker == "worker1"
