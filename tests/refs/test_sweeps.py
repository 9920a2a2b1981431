"""Sweeps: when the question of another worker about dead workers is answered."""

from __future__ import annotations

from backhaul.ids import RefId
from backhaul.refs.sweeps import Sweeps
from backhaul.wire.messages import Swept

ME, PEER, DEAD, OTHER = range(4)
FIRST, LATER = RefId(OTHER, DEAD, 1), RefId(OTHER, DEAD, 2)


def test_an_answer_waits_for_entries_that_were_registering_when_the_worker_was_dead_here() -> None:
    registering = {FIRST}
    sweeps = Sweeps(ME)
    sweeps.joined([PEER, DEAD, OTHER])
    sweeps.asked(PEER, (DEAD,))
    assert sweeps.answers(registering.copy) == [], "its messages have not all been read"
    sweeps.died(DEAD)
    assert sweeps.answers(registering.copy) == []
    registering.add(LATER)  # after everything that the dead worker sent, so it has nothing to do with that
    sweeps.confirmed(FIRST)
    assert sweeps.answers(registering.copy) == [(PEER, Swept((DEAD,)))]
    assert sweeps.answers(registering.copy) == [], "once"
