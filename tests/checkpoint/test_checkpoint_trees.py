"""Random models, saved on random placements and loaded on others: always equal to one process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from training_runs import assert_equal

from backhaul import checkpoint
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer
from backhaul.testing import InProcessCluster

WORKERS = ("worker0", "worker1", "worker2")


class Tree(NamedTuple):
    """The contents of a module, whether it is on a worker of its own, and the modules below it."""

    size: int
    hooked: bool
    worker: str | None
    below: tuple[Tree, ...]


class Node(nn.Module):
    def __init__(self, tree: Tree) -> None:
        super().__init__()
        if tree.size:
            self.weight = nn.Parameter(torch.randn(tree.size))
            self.register_buffer("buffer", torch.randint(0, 1000, (tree.size,)))
        self.first = None
        for number, each in enumerate(tree.below):
            self.add_module(f"child{number}", grow(each))
        if tree.hooked:
            self.register_state_dict_post_hook(add_sum)  # type: ignore[no-untyped-call]
            self.register_load_state_dict_pre_hook(check_sum)  # type: ignore[no-untyped-call]


def add_sum(_: nn.Module, state: dict[str, Tensor], prefix: str, __: object) -> None:
    """Note something about all tensors below: a module that does so must see them."""
    found = [value.double().sum() for key, value in state.items() if key.startswith(prefix)]
    state[f"{prefix}sum"] = torch.stack([*found, torch.zeros((), dtype=torch.float64)]).sum()


def check_sum(_: nn.Module, state: dict[str, Tensor], prefix: str, *__: object) -> None:
    saved = state.pop(f"{prefix}sum")
    found = [value.double().sum() for key, value in state.items() if key.startswith(prefix)]
    assert torch.equal(saved, torch.stack([*found, torch.zeros((), dtype=torch.float64)]).sum())


def grow(tree: Tree) -> nn.Module:
    return Node(tree) if tree.worker is None else RemoteModule(tree.worker, Node, (tree,))


def random_tree(generator: random.Random, depth: int = 4) -> Tree:
    below = [random_tree(generator, depth - 1) for _ in range(generator.randrange(4))] if depth else []
    return Tree(generator.randrange(4), generator.random() < 0.1, None, tuple(below))


def placed(tree: Tree, generator: random.Random) -> Tree:
    """The same model on any workers."""
    worker = generator.choice((None, *WORKERS))
    return tree._replace(worker=worker, below=tuple(placed(each, generator) for each in tree.below))


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.mark.parametrize("seed", range(25))
def test_a_random_model(seed: int, trio: InProcessCluster, tmp_path: Path) -> None:
    generator = random.Random(seed)
    tree = random_tree(generator)
    with trio[generator.randrange(3)].as_current():
        saved, into, alone = grow(placed(tree, generator)), grow(placed(tree, generator)), grow(tree)
        sgd = DistributedOptimizer(torch.optim.SGD, [*parameter_rrefs(saved), torch.zeros(1)], lr=0.5, momentum=0.5)
        checkpoint.save({"model": saved, "sgd": sgd}, tmp_path, gather=generator.random() < 0.3)
        checkpoint.load(tmp_path, {"model": into})
        expected = state_of(saved)
        assert_equal(state_of(into), expected)
        found = checkpoint.read(tmp_path)
        assert list(found["model"]) == list(alone.state_dict())
        assert found["model"]._metadata == alone.state_dict()._metadata  # type: ignore[attr-defined]
        alone.load_state_dict(found["model"])
        assert_equal(state_of(alone), expected)
        again = grow(tree)
        checkpoint.load(tmp_path, {"model": again})
        assert_equal(state_of(again), expected)
        other = DistributedOptimizer(torch.optim.SGD, [*parameter_rrefs(into), torch.zeros(1)], lr=0.1)
        checkpoint.load(tmp_path, {"sgd": other})
        assert_equal(other.state_dict(), sgd.state_dict())
