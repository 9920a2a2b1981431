"""Training under chaos, seed by seed; and proof that the simulation notices mistakes.

Each mistake below is one that a distributed system makes easily. The simulation finds it within some programs.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import Any

import chaos
import chaos_network
import pytest
from chaos import ChaosError, run

from backhaul.agent.agent import Agent
from backhaul.autograd.autograd import Autograd
from backhaul.autograd.engine import Engine
from backhaul.errors import PartialError, WorkerLostError
from backhaul.optim import DistributedOptimizer
from backhaul.refs.holdings import Holdings

SEEDS_VARIABLE = "BACKHAUL_CHAOS_SEEDS"
"""How many programs `make test` runs. They take about 20 s of processor time."""
_DEFAULT_SEEDS = 150


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Workers warn of everyone that they suspect."""
    logger = logging.getLogger("backhaul")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> Iterator[None]:
    """Each program collects garbage at its end: what was there before is not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.timeout(900)
def test_training_under_chaos() -> None:
    seeds = int(os.environ.get(SEEDS_VARIABLE, _DEFAULT_SEEDS))
    tally = run(range(seeds))
    assert tally["programs"] == seeds
    assert tally["steps"] >= 2 * seeds
    for what in ("cuts", "parts", "heals", "delays", "deaths", "rejoins", "failures"):
        assert tally[what] > seeds / 20, f"{what}: {tally}"


def test_a_program_is_replayed_by_its_seed() -> None:
    """The same faults, to the same workers. (What a step makes of them may depend on who is first to notice.)"""

    def faults_of(seed: int) -> list[tuple[int, str, int, int]]:
        program = chaos.Program(seed)
        program.run()
        return program.planned

    chaos.warm_up()
    assert faults_of(3) == faults_of(3)
    assert len({tuple(faults_of(seed)) for seed in range(5)}) > 1


# Mistakes.


def await_mistake(seeds: int, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "PATIENCE", 5.0)
    chaos.warm_up()
    with pytest.raises(ChaosError, match=match):
        run(range(seeds))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_peer_that_cannot_be_reached_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_network._Transport, "is_over", lambda self, addresses: True)
    await_mistake(200, "a reference was lost|cannot be used|has failed for", monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_call_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Agent.call

    def insist(self: Agent, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except WorkerLostError:
            return call(self, *args, **kwargs)

    monkeypatch.setattr(Agent, "call", insist)
    await_mistake(200, "ran more than once|wrong|between two values", monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_step_that_some_have_missed_is_called_good(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DistributedOptimizer.step

    def forgive(self: DistributedOptimizer, *args: Any) -> None:
        try:
            step(self, *args)
        except PartialError as error:
            if not error.done:
                raise

    monkeypatch.setattr(DistributedOptimizer, "step", forgive)
    await_mistake(300, "was good, and the weight", monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_contexts_are_not_left_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The initiator does not ask again whether a context still exists when a connection has ended."""
    monkeypatch.setattr(Autograd, "_on_present", lambda self, peer: None)
    monkeypatch.setattr(Autograd, "_on_connection_ended", lambda self, connection, peer, error: None)
    await_mistake(300, "left over|took|has failed", monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_pass_does_not_hear_of_lost_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "lost", lambda self, peer, error: None)
    await_mistake(300, "took|still run|left over", monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shares_on_a_broken_connection_are_not_recalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holdings, "_on_connection_ended", lambda self, connection, peer, error: None)
    await_mistake(300, "left over", monkeypatch)
