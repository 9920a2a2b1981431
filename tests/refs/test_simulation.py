"""Counting under random programs, broken connections and deaths; and proof that the simulation notices errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulation import SimulationError, run

from backhaul.ids import RefId, ShareId
from backhaul.refs.counting import Action, Counting


def test_400_programs() -> None:
    tally = run(range(400))
    assert tally["programs"] == 400
    assert tally["deaths"] > 100
    assert tally["breaks"] > 100


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_10_000_programs() -> None:
    assert run(range(10_000))["programs"] == 10_000


class UnpinsAtOnce(Counting):
    """A sharer that trusts its own reference to last until the receiver is listed."""

    def share(self, ref: RefId, to: int, over: object = None) -> ShareId:
        share = super().share(ref, to, over)
        pin = self._pins.pop(share, None)
        entry = self._entry(ref)
        if pin is not None and entry is not None:
            entry.pins.discard(share)
        return share


class DoesNotSweep(Counting):
    """An owner that strikes a dead worker off at once."""

    def _start_sweep(self) -> list[Action]:
        return self._strike_off_the_dead()


class NeverAsksForLostShares(Counting):
    """A sharer that waits for ever for what a broken connection has lost."""

    def connection_ended(self, over: object) -> list[Action]:
        return []


@pytest.mark.parametrize("mistaken", [UnpinsAtOnce, DoesNotSweep, NeverAsksForLostShares])
def test_the_simulation_notices_mistakes(mistaken: type[Counting]) -> None:
    with pytest.raises(SimulationError):
        run(range(3_000), counting=mistaken)
