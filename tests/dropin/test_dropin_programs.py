"""A program that knows nothing of Backhaul, in every way to run it on Backhaul, and on torch itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from dropin_runs import KINDS, PROGRAM, facts, run

pytestmark = pytest.mark.timeout(600)

INSTALL_FIRST = "import backhaul.dropin; backhaul.dropin.install(); import torch_program; torch_program.main('fork')"
WAYS = {
    "install": ["-c", INSTALL_FIRST],
    "-m backhaul.dropin, spawn": ["-m", "backhaul.dropin", PROGRAM, "spawn"],
    "-m backhaul.dropin, forkserver": ["-m", "backhaul.dropin", "-m", "torch_program", "forkserver"],
    "backhaul run --dropin": ["-m", "backhaul", "run", "--dropin", "-n", "3", PROGRAM],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=3", "--standalone", "-m", "backhaul.dropin", PROGRAM],
}


@functools.cache
def on_torch() -> list[dict[str, Any]]:
    return facts(run(PROGRAM, "fork"))


def assert_is_backhaul(found: list[dict[str, Any]]) -> None:
    """Every worker ran on Backhaul, and the results equal torch's."""
    assert [worker["rank"] for worker in found] == [0, 1, 2]
    for worker in found:
        assert worker["agent"] == "backhaul.dropin.rpc.agent"
        assert not worker["torch's agent runs"]
        for name in ("rpc", "optimizer", "remote module"):
            assert worker[name].startswith("backhaul."), worker
    for result in ("served", "parts", "error"):
        assert found[0][result] == on_torch()[0][result], result


def test_the_program_uses_torch_without_backhaul() -> None:
    """The program really uses torch when Backhaul is not installed; otherwise the others would prove nothing."""
    assert len(on_torch()) == 3
    for worker in on_torch():
        assert worker["agent"] == "torch._C._distributed_rpc"
        assert worker["torch's agent runs"]
    losses = on_torch()[0]["parts"]
    assert losses == sorted(losses, reverse=True)
    assert on_torch()[0]["error"] == "ValueError"


SLOW = ("-m backhaul.dropin, forkserver", "-m backhaul.dropin, spawn", "torchrun")


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.slow) if way in SLOW else way for way in WAYS])
def test_the_unmodified_program_uses_backhaul(way: str) -> None:
    assert_is_backhaul(facts(run(*WAYS[way])))


def test_on_a_torch_without_rpc() -> None:
    assert_is_backhaul(facts(run("-m", "backhaul.dropin", PROGRAM, "fork", kind="gone")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[1:])
def test_spawned_on_a_torch_without_rpc(kind: str) -> None:
    assert_is_backhaul(facts(run("-m", "backhaul.dropin", PROGRAM, "spawn", kind=kind)))
