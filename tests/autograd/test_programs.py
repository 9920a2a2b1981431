"""Random programs have the gradients that one process computes, on workers in one process and in several."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from program_generator import generate
from program_ops import OPERATIONS
from program_runs import Mismatch, Outcome, compare, run_locally
from programs import cluster_of, run, run_in_process, run_on_processes

from backhaul.autograd import graph

FEATURES = {operation.feature for operation in OPERATIONS.values()} | {
    "mode sync",
    "mode async",
    "mode remote",
    "mode then",
    "mode coroutine",
    "mode forward",
    "mode direct",
    "references fetched",
    "references fetched by their owner",
    "references fetched by another worker",
    "references sent",
    "methods of references",
    "nested calls",
    "rings",
    "calls to oneself",
    "calls that return nothing",
    "calls that return a leaf",
    "values sent to several workers",
    "received tensors sent on",
    "leaves used",
    "leaves sent",
    "kept values used",
    "sent and used locally",
    "results never used",
    "messages with several tensors",
    "messages of which only some need grad",
    "a tensor twice in one message",
    "several roots",
    "roots without grad",
    "roots that are references",
    "a root given twice",
    "grad_tensors",
    "retain_graph",
    "a second backward over the same roots",
    "backwards over different roots",
    "backward by another worker",
    "in place on received tensors",
    "in place after sending",
    "views sent",
    "sparse gradients of received tensors",
    "hooks on leaves",
    "hooks on tensors",
    "retain_grad",
    "post-accumulate hooks",
    "leaves that have a .grad already",
    "accumulate=grad",
    "accumulate=context",
}


def require_features(tally: Counter[str], least: int) -> None:
    rare = {feature: tally[feature] for feature in FEATURES if tally[feature] < least}
    assert not rare, f"hardly tested: {rare}"


def test_200_programs() -> None:
    tally = run(range(200))
    assert tally["programs"] == 200
    assert tally["messages"] > 2000
    assert tally["components with gates that wait"] > 60
    require_features(tally, 5)


def test_50_programs_whose_messages_do_not_list_their_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass that must be resolved asks all workers."""
    monkeypatch.setattr(graph, "MOST_FORESEEN", 0)
    assert run(range(50))["components with gates that wait"] > 15


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_20_000_programs() -> None:
    tally = run(range(1000, 21_000))
    assert tally["programs"] == 20_000
    require_features(tally, 1000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_2000_programs_whose_messages_do_not_list_their_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "MOST_FORESEEN", 0)
    assert run(range(1000, 3000))["components with gates that wait"] > 600


@pytest.mark.timeout(
    400
)  # 10 s for 100 on a quiet machine of two processors; 57 s have been seen where ten wanted them
@pytest.mark.parametrize("programs", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_programs_on_processes(programs: int) -> None:
    """Several drivers run at once, so contexts and passes overlap on every worker."""
    failures = run_on_processes(range(300, 300 + programs), 300)
    assert not failures, "\n".join(failures)


# The comparison notices.


def first_gradient(outcomes: list[Outcome], name: str) -> Outcome:
    return next(outcome for outcome in outcomes if name in outcome.gradients)


def perturb(outcomes: list[Outcome], name: str) -> None:
    first_gradient(outcomes, name).gradients[name] += 1e-8


def lose(outcomes: list[Outcome], name: str) -> None:
    del first_gradient(outcomes, name).gradients[name]


def double(outcomes: list[Outcome], name: str) -> None:
    first_gradient(outcomes, name).gradients[name] *= 2


def invent(outcomes: list[Outcome], name: str) -> None:
    outcome = next(outcome for outcome in outcomes if set(outcome.grads) - set(outcome.gradients))
    for leaf in set(outcome.grads) - set(outcome.gradients):
        outcome.gradients[leaf] = torch.full((3, 3), 1e-3, dtype=torch.float64)


def put_into_grad(outcomes: list[Outcome], name: str) -> None:
    outcome = first_gradient(outcomes, name)
    outcome.grads[name] = outcome.gradients[name]


def hook_twice(outcomes: list[Outcome], name: str) -> None:
    calls = next(calls for outcome in outcomes for calls in outcome.hooked.values() if calls)
    calls.append(calls[0])


def hook_never(outcomes: list[Outcome], name: str) -> None:
    next(calls for outcome in outcomes for calls in outcome.hooked.values() if calls).clear()


@pytest.mark.parametrize("mistake", [perturb, lose, double, invent, put_into_grad, hook_twice, hook_never])
def test_a_wrong_outcome_is_noticed(mistake: Callable[[list[Outcome], str], None]) -> None:
    noticed = 0
    for seed in range(40):
        program = generate(seed)
        leaves = tuple(leaf._replace(has_grad_before=False) for leaf in program.leaves)
        program = replace(program, accumulate="context", leaves=leaves)
        right, wrong = run_locally(program), run_locally(program)
        for outcome in wrong:
            outcome.grads = dict.fromkeys(outcome.grads)
        compare(program, right, wrong)
        solid = [
            name
            for outcome in right
            for name, grad in outcome.gradients.items()
            if grad.dtype == torch.float64 and not grad.is_sparse and grad.abs().max() > 1e-3
        ]
        if program.tolerance > 1e-9 or not solid:
            continue
        try:
            mistake(wrong, solid[0])
        except StopIteration:
            continue  # this program has nothing to change
        with pytest.raises(Mismatch):
            compare(program, right, wrong)
        noticed += 1
    assert noticed > 5


def test_a_worker_with_another_weight_is_noticed() -> None:
    noticed = 0
    for seed in range(0, 40, 4):
        program = generate(seed)
        leaves = tuple(leaf._replace(seed=leaf.seed + 1) if leaf.worker else leaf for leaf in program.leaves)
        with cluster_of(program.size, seed) as cluster:
            found = run_in_process(program, cluster)
        compare(program, run_locally(program), found)
        try:
            compare(program, run_locally(replace(program, leaves=leaves)), found)
        except Mismatch:
            noticed += 1
    assert noticed > 3  # in the other programs the changed weight does not matter
