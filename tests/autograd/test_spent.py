"""Sends whose graphs have been run cost later passes nothing, and can be run again where torch allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import W, alone, assert_same, call, gradients, identity, layer, leaf, new_weights, start
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul.autograd.gradients import without_a_run
from backhaul.autograd.schedule import Schedule
from backhaul.testing import InProcessCluster

pytestmark = pytest.mark.usefixtures("quiet", "no_hooks")


@pytest.fixture
def candidates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of candidates of each new schedule."""
    seen: list[int] = []
    make = Schedule.__init__

    def count(self: Schedule, sources: Any) -> None:
        seen.append(len(sources))
        make(self, sources)

    monkeypatch.setattr(Schedule, "__init__", count)
    return seen


def backward(context_id: int, root: Tensor, **options: Any) -> None:
    dist_autograd.backward(context_id, [root], **options)


@pytest.mark.long
def test_300_passes_in_one_context_have_few_candidates(pair: InProcessCluster, candidates: list[int]) -> None:
    x = leaf(2, 4)
    new_weights("a")
    passes = 300
    with alone():
        torch.autograd.backward([call("worker1", layer, "a", torch.sin(x)).sum() for _ in range(1)])
    expected = x.grad
    x.grad = W["a"].grad = None
    assert expected is not None
    with pair[0].as_current(), dist_autograd.context() as context_id:
        for _ in range(passes):
            backward(context_id, call("worker1", layer, "a", torch.sin(x)).sum())
        records = [worker.autograd.contexts.find(context_id) for worker in pair]
        assert [len(record.sends) for record in records] == [passes, passes]
        assert [len(record.unspent) for record in records] == [0, 0]
        assert_same(gradients(pair, context_id)[0][x], expected * passes, exact=False)
    assert len(candidates) == 2 * passes
    assert max(candidates) <= 2


def test_sends_of_retained_graphs_stay_candidates(pair: InProcessCluster, candidates: list[int]) -> None:
    x = leaf(2, 4)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        for count in range(1, 6):
            backward(context_id, call("worker1", layer, "a", torch.sin(x)).sum(), retain_graph=True)
            record = pair[1].autograd.contexts.find(context_id)
            assert len(record.unspent) == count
    assert max(candidates) == 6  # and the root


def test_sends_of_unused_results_stay_candidates(pair: InProcessCluster) -> None:
    x = leaf(2, 4)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        unused = call("worker1", layer, "a", torch.sin(x))
        backward(context_id, call("worker1", layer, "b", torch.sin(x)).sum())
        assert [len(w.autograd.contexts.find(context_id).unspent) for w in pair] == [1, 1]
        backward(context_id, unused.sum())
        assert [len(w.autograd.contexts.find(context_id).unspent) for w in pair] == [0, 0]


# A second pass over a graph that was not retained: torch raises only if the first pass has freed something.


def twice(x: Tensor) -> Tensor:
    """Nothing is saved for the backward pass of an addition."""
    return x + x


def joined(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two results that depend on one node."""
    both = x + x
    return both + 1, both.sum()


def several(x: Tensor) -> Any:
    """Several Sends that join on each worker, in one message and in several."""
    h = x + 1
    one, total = call("worker1", joined, h)
    other = start("worker1", twice, h)
    return one.sum() + total + other.wait().sum()


def there_and_back(x: Tensor) -> Any:
    return call("worker1", relay, x + 1).sum()


def relay(x: Tensor) -> Tensor:
    return call("worker0", twice, x + x) + x  # type: ignore[no-any-return]


FREE: dict[str, Callable[[Tensor], Any]] = {
    "one call": lambda x: call("worker1", twice, x).sum(),
    "a leaf that comes back": lambda x: call("worker1", identity, x).sum(),
    "two calls": lambda x: (call("worker1", twice, x) + call("worker1", twice, x)).sum(),
    "several that join": several,
    "a call in a call": there_and_back,
    "nothing is called": lambda x: (x + x).sum(),
}


def passes_over(program: Callable[[Tensor], Any], run: Callable[[Tensor], None], x: Tensor, count: int) -> list[Any]:
    root = program(x)
    outcomes: list[Any] = []
    for _ in range(count):
        try:
            run(root)
            outcomes.append(None)
        except RuntimeError as error:
            outcomes.append("second time" in str(error))
    return outcomes


@pytest.mark.parametrize("kind", FREE)
def test_a_second_pass_where_nothing_was_freed(pair: InProcessCluster, kind: str) -> None:
    x = leaf(3, 4)
    with alone():
        expected = passes_over(FREE[kind], lambda root: root.backward(), x, 3)
    grad, x.grad = x.grad, None
    assert grad is not None
    assert expected == [None] * 3
    with pair[0].as_current(), dist_autograd.context() as context_id:
        got = passes_over(FREE[kind], lambda root: backward(context_id, root), x, 3)
        found = gradients(pair, context_id)[0][x]
    assert got == expected
    assert_same(found, grad)


@pytest.mark.parametrize("there", [True, False])
def test_a_second_pass_where_something_was_freed(pair: InProcessCluster, there: bool) -> None:
    x = leaf(3, 4)

    def program(x: Tensor) -> Any:
        return call("worker1", layer, "a", x).sum() if there else torch.sin(call("worker1", twice, x)).sum()

    with alone():
        expected = passes_over(program, lambda root: root.backward(), x, 2)
    x.grad = W["a"].grad = None
    assert expected == [None, True]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        assert passes_over(program, lambda root: backward(context_id, root), x, 2) == expected


def test_new_calls_after_passes_that_were_not_retained(pair: InProcessCluster) -> None:
    """The new call joins a spent graph, so both take part."""
    x = leaf(3, 4)

    def program(run: Callable[[Sequence[Tensor]], None]) -> None:
        h = x + 1
        first = call("worker1", twice, h)
        run([first.sum()])
        second = call("worker1", twice, h)
        run([second.sum(), first.sum()])

    with alone():
        program(lambda roots: torch.autograd.backward(roots))
    grad, x.grad = x.grad, None
    assert grad is not None
    with pair[0].as_current(), dist_autograd.context() as context_id:
        program(lambda roots: dist_autograd.backward(context_id, list(roots)))
        assert_same(gradients(pair, context_id)[0][x], grad)


# Leaves that were sent without a computation.


def squared(*tensors: Tensor) -> Tensor:
    return torch.stack([(tensor * tensor).sum() for tensor in tensors]).sum()


def on_worker0(pair: InProcessCluster, tensors: Sequence[Tensor]) -> list[Tensor]:
    with pair[0].as_current(), dist_autograd.context() as context_id:
        backward(context_id, call("worker1", squared, *tensors))
        found = gradients(pair, context_id)[0]
        return [found[tensor] for tensor in tensors]


@pytest.mark.parametrize("count", [1, 3])
def test_sent_leaves_need_no_run(pair: InProcessCluster, runs: list[int], count: int) -> None:
    leaves = [leaf(5, 4, seed=seed) for seed in range(count)]
    got = on_worker0(pair, leaves)
    assert len(runs) == 1  # on the worker; here the root is the received tensor itself
    for mine, tensor in zip(got, leaves, strict=True):
        assert torch.equal(mine, 2 * tensor.detach())
        assert mine.stride() == tensor.stride()


def test_a_leaf_that_is_sent_several_times(pair: InProcessCluster) -> None:
    x = leaf(5, 4)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        sums = [start("worker1", squared, x) for _ in range(4)]
        backward(context_id, torch.stack([future.wait() for future in sums]).sum())
        assert_same(gradients(pair, context_id)[0][x], 8 * x.detach(), exact=False)


def test_a_leaf_that_is_sent_and_used(pair: InProcessCluster) -> None:
    x = leaf(5, 4)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        backward(context_id, call("worker1", squared, x) + (3 * x).sum())
        assert_same(gradients(pair, context_id)[0][x], 2 * x.detach() + 3, exact=False)


def test_a_leaf_with_a_hook_is_run(pair: InProcessCluster, runs: list[int]) -> None:
    x = leaf(5, 4)
    seen: list[Tensor] = []

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient)
        return gradient * 10

    x.register_hook(hook)
    (got,) = on_worker0(pair, [x])
    assert len(seen) == 1
    assert torch.equal(seen[0], 2 * x.detach())
    assert torch.equal(got, 20 * x.detach())
    assert len(runs) == 2


def test_a_leaf_with_a_post_accumulate_hook(pair: InProcessCluster) -> None:
    x = leaf(5, 4)
    seen: list[Tensor] = []
    x.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))  # type: ignore[union-attr]
    (got,) = on_worker0(pair, [x])
    assert len(seen) == 1
    assert torch.equal(seen[0], 2 * x.detach())
    assert torch.equal(got, seen[0])


def test_a_leaf_whose_node_has_a_hook(pair: InProcessCluster) -> None:
    x = leaf(5, 4)
    seen: list[Any] = []
    node = x.view_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *_: seen.append(True))
    (got,) = on_worker0(pair, [x])
    assert seen == [True]
    assert torch.equal(got, 2 * x.detach())


# The same for the function itself.


def starts_of(*tensors: Tensor) -> list[Any]:
    return [torch.autograd.graph.get_gradient_edge(tensor) for tensor in tensors]


def test_a_leaf_s_gradient_is_stored_as_it_came() -> None:
    x, y = leaf(3), leaf(2, 2)
    ones, twos = torch.ones(3, dtype=torch.float64), torch.full((2, 2), 2.0, dtype=torch.float64)
    found = without_a_run(starts_of(x, y), [ones, twos])
    assert found is not None
    assert found[x] is ones
    assert found[y] is twos
    found = without_a_run(starts_of(x, x, x), [ones, ones, ones])
    assert found is not None
    assert torch.equal(found[x], 3 * ones)
    assert torch.equal(ones, torch.ones(3, dtype=torch.float64))


def test_gradients_that_do_not_match_their_leaf_need_a_run() -> None:
    x = leaf(3)
    good = torch.ones(3, dtype=torch.float64)
    assert without_a_run(starts_of(x), [good]) is not None
    assert without_a_run(starts_of(x), [good.float()]) is None
    assert without_a_run(starts_of(x), [torch.ones(1, 3, dtype=torch.float64)]) is None
    assert without_a_run(starts_of(x), [torch.ones((), dtype=torch.float64)]) is None
    assert without_a_run(starts_of(x * 2), [good]) is None
    assert without_a_run(starts_of(x, x * 2), [good, good]) is None
    assert without_a_run([x * 2], [good]) is None  # the output of a Send
    handle = x.register_hook(lambda _: None)
    assert without_a_run(starts_of(x), [good]) is None
    handle.remove()
    assert without_a_run(starts_of(x), [good]) is not None
