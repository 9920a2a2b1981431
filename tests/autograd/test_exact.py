"""Graphs over several workers have the gradients of one process: chains, fans, diamonds, rings, references."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from models import (
    W,
    call,
    check,
    double,
    identity,
    layer,
    leaf,
    make,
    multiply,
    new_weights,
    product,
    relay,
    start,
)
from torch import Tensor

from backhaul import rpc
from backhaul.testing import InProcessCluster


@pytest.fixture(autouse=True)
def _weights() -> None:
    new_weights()


@pytest.fixture(params=["memory", "sockets", "seed 1", "seed 2"])
def workers(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Three workers, with messages in their own order, over sockets, and in the order of a seed."""
    kind, _, seed = request.param.partition(" ")
    with InProcessCluster(3, sockets=kind == "sockets", seed=int(seed) if seed else None) as made:
        yield made


def spread(x: Tensor, count: int) -> list[Tensor]:
    """One call for each, alternating between both other workers, all at the same time."""
    futures = [start(f"worker{1 + i % 2}", layer, "abcdefgh"[i], x) for i in range(count)]
    return [future.wait() for future in futures]


def on_worker(rank: int, names: str) -> list[Tensor]:
    """The weights of `spread` on that worker."""
    return [W[name] for i, name in enumerate(names) if 1 + i % 2 == rank]


@pytest.mark.parametrize("hops", [1, 4, 16])
def test_a_chain(workers: InProcessCluster, hops: int) -> None:
    """Each hop goes there and back. Each weight is used on one worker, and some are used several times."""
    x = leaf(2, 4)
    names = [("ac" if i % 2 == 0 else "bd")[i // 2 % 2] for i in range(hops)]

    def program() -> Any:
        y = x
        for i, name in enumerate(names):
            y = call(f"worker{1 + i % 2}", layer, name, y)
        return y.sum()

    leaves = {0: [x], 1: [W[n] for n in "ac" if n in names], 2: [W[n] for n in "bd" if n in names]}
    check(workers, program, leaves, exact=hops < 16)


@pytest.mark.parametrize("hops", [2, 4, 16])
def test_a_chain_of_calls_within_calls(workers: InProcessCluster, hops: int) -> None:
    x = leaf(2, 4)
    path = [(f"worker{1 + i % 2}", "ab"[i % 2]) for i in range(hops)]
    check(workers, lambda: relay(path, x).sum(), {0: [x], 1: [W["a"]], 2: [W["b"]]}, exact=hops == 2)


def test_fan_out_from_a_leaf(workers: InProcessCluster) -> None:
    x = leaf(2, 4)
    leaves = {0: [x], 1: on_worker(1, "abcdefgh"), 2: on_worker(2, "abcdefgh")}
    check(workers, lambda: torch.stack(spread(x, 8)).sum(), leaves, exact=False)


def test_fan_out_from_a_tensor_within_the_graph(workers: InProcessCluster) -> None:
    x, w = leaf(2, 4), leaf(4, 4, seed=2)
    leaves = {0: [x, w], 1: on_worker(1, "abcdefgh"), 2: on_worker(2, "abcdefgh")}
    check(workers, lambda: torch.stack(spread(torch.exp(x @ w), 8)).prod(0).sum(), leaves, exact=False)


def test_fan_in(workers: InProcessCluster) -> None:
    """A third worker gets the results of two workers in one message."""
    x, y = leaf(2, 4), leaf(2, 4, seed=2)

    def program() -> Any:
        first, second = start("worker1", layer, "a", x), start("worker2", layer, "b", y)
        return torch.sin(call("worker2", product, first.wait(), second.wait())).sum()

    check(workers, program, {0: [x, y], 1: [W["a"]], 2: [W["b"]]})


def weigh_and_pass(name: str, to: str, other: str, x: Tensor) -> Tensor:
    return call(to, layer, other, x * W[name])  # type: ignore[no-any-return]


def test_a_diamond_over_three_workers(workers: InProcessCluster) -> None:
    """worker0 -> worker1 and worker2 -> joined on worker1 -> worker0, all from one tensor."""
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        left = start("worker1", layer, "a", h)
        right = start("worker2", layer, "b", h)
        return call("worker1", product, left.wait(), right.wait()).sum()

    check(workers, program, {0: [x], 1: [W["a"]], 2: [W["b"]]})


def split_and_join(x: Tensor) -> Tensor:
    h = x * W["a"]
    left, right = start("worker2", layer, "b", h), start("worker0", layer, "c", h)
    return left.wait() * right.wait() + h  # type: ignore[no-any-return]


def test_a_diamond_inside_a_call(workers: InProcessCluster) -> None:
    """One of its calls goes back to the caller, which waits."""
    x = leaf(4, 4)
    leaves = {0: [x, W["c"]], 1: [W["a"]], 2: [W["b"]]}
    check(workers, lambda: call("worker1", split_and_join, x * 3).sum(), leaves, exact=False)


def go_round(ring: Sequence[str], x: Tensor, times: int) -> Tensor:
    """Call the next worker of the ring, which calls the next, ``times`` times."""
    if times == 0:
        return x
    y = torch.tanh(x @ W[ring[0]])
    return call(ring[1], go_round, [*ring[1:], ring[0]], y, times - 1) + y  # type: ignore[no-any-return]


@pytest.mark.parametrize("times", [3, 4, 9])
def test_a_ring_of_calls(workers: InProcessCluster, times: int) -> None:
    """A -> B -> C -> A: each worker is called again while it waits for its own call."""
    x = leaf(2, 4)
    for i, name in enumerate("abc"):
        W[f"worker{i}"] = W[name]
    leaves = {0: [x, W["a"]], 1: [W["b"]], 2: [W["c"]]}
    program_ring = ["worker0", "worker1", "worker2"]
    check(workers, lambda: go_round(program_ring, x, times).sum(), leaves, exact=False)


def test_a_call_to_oneself(workers: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        return (call("worker0", layer, "a", h) * h).sum()

    check(workers, program, {0: [x, W["a"]]}, exact=False)


def test_calls_to_oneself_within_a_call(workers: InProcessCluster) -> None:
    x = leaf(2, 4)
    path = [("worker1", "a"), ("worker1", "b"), ("worker1", "c")]
    check(workers, lambda: relay(path, x).sum(), {0: [x], 1: [W["a"], W["b"], W["c"]]}, exact=False)


def test_a_reference_fetched_once(workers: InProcessCluster) -> None:
    x = leaf(2, 4)
    check(workers, lambda: make("worker1", layer, "a", x).to_here().sum(), {0: [x], 1: [W["a"]]})


def fetch_and(name: str, rref: Any) -> Tensor:
    return layer(name, rref.to_here())


def apply_to_local(name: str, rref: Any) -> Tensor:
    return layer(name, rref.local_value())


def test_a_reference_used_by_several(workers: InProcessCluster) -> None:
    """The maker fetches it twice, a third worker fetches it, and a later call uses it at its owner."""
    x = leaf(2, 4)

    def program() -> Any:
        rref = make("worker1", layer, "a", torch.sin(x))
        there = call("worker2", fetch_and, "b", rref)
        at_home = call("worker1", apply_to_local, "c", rref)
        return (rref.to_here() * there + rref.to_here() * at_home).sum()

    check(workers, program, {0: [x], 1: [W["a"], W["c"]], 2: [W["b"]]}, exact=False)


def make_there(to: str, name: str, x: Tensor) -> Any:
    return make(to, layer, name, x * 2)


def test_a_reference_made_by_another_worker(workers: InProcessCluster) -> None:
    """worker1 makes it on worker2 and hands it to worker0."""
    x = leaf(2, 4)

    def program() -> Any:
        return call("worker1", make_there, "worker2", "a", torch.sin(x)).to_here().sum()

    check(workers, program, {0: [x], 2: [W["a"]]})


def test_a_reference_to_ones_own_value(workers: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        rref = make("worker0", identity, h)
        return (call("worker1", fetch_and, "a", rref) * h).sum()

    check(workers, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_one_value_to_several_workers(workers: InProcessCluster) -> None:
    """Twice in one message, in several messages, to several workers, and to the sender itself."""
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        parts = [
            call("worker1", product, h, h),
            call("worker2", product, h, h),
            call("worker2", multiply, "a", h),
            call("worker0", double, h),
        ]
        return (parts[0] + parts[1] * parts[2] + parts[3]).sum()

    check(workers, program, {0: [x], 2: [W["a"]]}, exact=False)


def test_a_weight_shared_by_calls(workers: InProcessCluster) -> None:
    x = leaf(2, 4)

    def program() -> Any:
        y = call("worker1", layer, "a", x)
        z = call("worker1", layer, "a", y)
        return (z + call("worker1", layer, "a", y.detach())).sum()

    check(workers, program, {0: [x], 1: [W["a"]]}, exact=False)


def test_a_leaf_and_tensors_computed_from_it(workers: InProcessCluster) -> None:
    """A leaf and tensors computed from it, each sent from its own worker."""
    x = leaf(4, 4)

    def program() -> Any:
        y = call("worker1", multiply, "a", x)
        z = call("worker2", product, y, x)
        return (z * x + call("worker1", product, z, y)).sum()

    check(workers, program, {0: [x], 1: [W["a"]]}, exact=False)


def sum_tree(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return tree.sum()
    values = tree.values() if isinstance(tree, dict) else tree
    return torch.stack([sum_tree(value) for value in values]).prod()


def test_tensors_within_containers(workers: InProcessCluster) -> None:
    x, y, z = leaf(3), leaf(2, 2, seed=2), leaf(4, seed=3)
    tree = {"x": x, "rest": [y, (z, x)]}

    def program() -> Any:
        back = call("worker2", identity, tree)
        return call("worker1", sum_tree, tree) * sum_tree(back)

    check(workers, program, {0: [x, y, z]}, exact=False)


def test_a_large_tensor(workers: InProcessCluster) -> None:
    x = leaf(300, 500)
    check(workers, lambda: torch.sin(call("worker1", product, x, torch.cos(x))).sum(), {0: [x]})


def test_a_context_without_calls(workers: InProcessCluster) -> None:
    x, w = leaf(2, 4), leaf(4, 4, seed=2)
    check(workers, lambda: torch.tanh(x @ w).sum(), {0: [x, w]})


def test_a_zero_dimensional_and_an_empty_tensor(workers: InProcessCluster) -> None:
    x, empty = leaf(), leaf(0, 3, seed=2)

    def program() -> Any:
        scalar, nothing = call("worker1", identity, (x * 2, empty * 2))
        return scalar * 3 + nothing.sum()

    check(workers, program, {0: [x, empty]})


def test_a_model_of_many_calls(workers: InProcessCluster) -> None:
    """Thirty calls in one graph. Some results are used again much later."""
    x = leaf(4, 4)

    def program() -> Any:
        values = [x]
        for i in range(30):
            name = ("ac" if i % 2 == 0 else "bd")[i // 2 % 2]
            values.append(call(f"worker{1 + i % 2}", layer, name, values[-1] + values[i // 2]))
        return (values[-1] + values[10]).sum()

    check(workers, program, {0: [x], 1: [W["a"], W["c"]], 2: [W["b"], W["d"]]}, exact=False)


@pytest.mark.parametrize("hops", [60, pytest.param(150, marks=pytest.mark.long)])
def test_a_deep_ring(workers: InProcessCluster, hops: int) -> None:
    """Each call runs inside the previous one, and so do the waits for their gradients."""
    x = leaf(2, 4)
    for i, name in enumerate("abc"):
        W[f"worker{i}"] = W[name]
    leaves = {0: [x, W["a"]], 1: [W["b"]], 2: [W["c"]]}
    check(workers, lambda: go_round(["worker0", "worker1", "worker2"], x, hops).sum(), leaves, exact=False)


class Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return layer(self.name, x)

    async def later(self, x: Tensor) -> Tensor:
        return layer(self.name, x)


def test_methods_of_referenced_modules(workers: InProcessCluster) -> None:
    x = leaf(4, 4)

    def program() -> Any:
        h = torch.sin(x)
        y = first.rpc_async().forward(first.rpc_sync()(h)).wait()
        return (second.rpc_sync().later(second.remote().forward(y).to_here()) * h).sum()

    def alone_too() -> Any:
        h = torch.sin(x)
        return (layer("b", layer("b", layer("a", layer("a", h)))) * h).sum()

    with workers[0].as_current():
        first, second = rpc.remote("worker1", Layer, args=("a",)), rpc.remote("worker2", Layer, args=("b",))
        check(workers, program, {0: [x], 1: [W["a"]], 2: [W["b"]]}, exact=False, same_as=alone_too)
