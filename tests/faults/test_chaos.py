"""Training under chaos, seed by seed; and proof that the simulation notices mistakes.

Each mistake below is easy to make in a distributed system. The simulation finds it within some programs.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos_network
import pytest
from chaos_program import ChaosError, run, simulation

from backhaul.agent.agent import Agent
from backhaul.autograd.autograd import Autograd
from backhaul.autograd.engine import Engine
from backhaul.errors import PartialError, WorkerLostError
from backhaul.optim import DistributedOptimizer
from backhaul.refs.deaths import Deaths

_SEEDS = int(os.environ.get("BACKHAUL_CHAOS_SEEDS", "500"))
"""The number of programs that `make test` runs. They take about 40 s of processor time; `make chaos` runs 20,000."""
_AGAIN = 20
_PROGRAM = Path(__file__).with_name("chaos.py")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Silence the workers' warnings about suspected peers."""
    logger = logging.getLogger("backhaul")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def chaos(*arguments: str) -> tuple[int, str]:
    """Run the script with these arguments. Returns its exit status and its output."""
    command = [sys.executable, str(_PROGRAM), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def digests(text: str) -> dict[int, str]:
    return {int(seed): digest for seed, digest in re.findall(r"^seed (\d+) ([0-9a-f]{16})$", text, re.MULTILINE)}


@pytest.fixture(scope="module")
def many() -> str:
    """The output of the programs that `make test` runs."""
    status, text = chaos("0", str(_SEEDS), "--jobs", "1", "--digests")
    assert status == 0, text
    return text


@pytest.mark.timeout(900)
def test_training_under_chaos(many: str) -> None:
    assert len(digests(many)) == _SEEDS
    tally = {what: int(count) for count, what in re.findall(r"(\d+) ([a-z]+)", many.splitlines()[-1])}
    assert tally["programs"] == _SEEDS
    assert tally["failed"] == 0
    assert tally["steps"] >= 2 * _SEEDS
    for what in ("cuts", "parts", "heals", "delays", "deaths", "rejoins", "failures"):
        assert tally[what] > _SEEDS / 20, f"{what}: {tally}"


@pytest.mark.timeout(900)
def test_a_program_makes_the_same_steps_each_time(many: str) -> None:
    """Another process, after other programs, has the same turns of threads, times, and order of messages."""
    before = digests(many)
    first = max(0, _SEEDS - _AGAIN)
    status, text = chaos(str(first), str(_SEEDS - first), "--jobs", "1", "--digests")
    assert status == 0, text
    assert digests(text) == {seed: before[seed] for seed in range(first, _SEEDS)}
    assert len(set(before.values())) == len(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_program_is_replayed_by_its_seed(many: str) -> None:
    status, text = chaos("7")
    assert status == 0, text
    assert "step 0/0" in text
    assert text.endswith(f"digest {digests(many)[7]}\n")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_that_takes_too_long_is_named() -> None:
    """The stacks of all threads are printed, and the programs after it are run."""
    status, text = chaos("3", "2", "--jobs", "1", "--limit", "0.002")
    assert status != 0
    for seed in (3, 4):
        assert f"seed {seed}: its process ended" in text
        assert f"replay it with: python tests/faults/chaos.py {seed}" in text
    assert "Timeout" in text
    assert "Thread 0x" in text
    assert "2 programs from seed 3 on, 2 failed" in text


# Mistakes.


def await_mistake(seeds: int, match: str) -> None:
    with simulation(), pytest.raises(ChaosError, match=match):
        run(range(seeds))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chaos_finds_an_unreachable_peer_that_is_treated_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_network._Transport, "is_over", lambda self, addresses: True)
    await_mistake(200, "a reference was lost|cannot be used|has failed for")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chaos_finds_a_lost_call_that_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Agent.call

    def insist(self: Agent, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except WorkerLostError:
            return call(self, *args, **kwargs)

    monkeypatch.setattr(Agent, "call", insist)
    await_mistake(200, "ran more than once|wrong|between two values")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chaos_finds_a_step_that_some_workers_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = DistributedOptimizer.step

    def forgive(self: DistributedOptimizer, *args: Any) -> None:
        try:
            step(self, *args)
        except PartialError as error:
            if not error.done:
                raise

    monkeypatch.setattr(DistributedOptimizer, "step", forgive)
    await_mistake(300, "was good, and the weight")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chaos_finds_contexts_that_are_not_left_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The initiator does not ask again whether a context still exists when a connection has ended."""
    monkeypatch.setattr(Autograd, "_on_present", lambda self, peer: None)
    monkeypatch.setattr(Autograd, "_on_connection_ended", lambda self, connection, peer, error: None)
    await_mistake(300, "left over|all threads wait|took|has failed")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chaos_finds_a_pass_that_ignores_lost_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "lost", lambda self, peer, error: None)
    await_mistake(300, "all threads wait|took|still run|left over")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chaos_finds_shares_that_are_not_recalled_from_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deaths, "_on_connection_ended", lambda self, connection, peer, error: None)
    await_mistake(300, "left over")
