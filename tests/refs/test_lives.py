"""Counting, when another process takes the place of a dead worker: a death takes the values of one process only."""

from __future__ import annotations

import pytest
from counting_scripts import FROM_U, FROM_W, O, Step, U, V, W, do, hears, play

from backhaul.ids import RefId, WorkerInfo
from backhaul.refs.actions import Confirm, Seek, Send
from backhaul.refs.losses import Names, lost_value
from backhaul.wire.messages import Register, Registered, Unpin

OLD, NEW = 7, 8  # lives
OF_OLD, OF_NEW = RefId(O, U, 1, OLD), RefId(O, U, 2, NEW)
RESTARTS: dict[str, list[Step]] = {
    "the reference comes when the death is known": [
        (V, do.died(O, OLD), []),
        (V, do.receive(OF_NEW, FROM_U), [Seek(O, NEW)]),
        (V, do.revived(O), [Send(O, Register(OF_NEW))]),
    ],
    "the reference comes before the death is known": [
        (V, do.receive(OF_NEW, FROM_U), [Send(O, Register(OF_NEW))]),  # to the old process, and so lost
        (V, do.receive(OF_OLD, FROM_W), [Send(O, Register(OF_OLD))]),
        (V, do.died(O, OLD), [Confirm(OF_OLD, False), Send(W, Unpin(FROM_W)), Seek(O, NEW)]),
        (V, do.revived(O), [Send(O, Register(OF_NEW))]),
    ],
}


@pytest.mark.parametrize("script", RESTARTS.values(), ids=RESTARTS.keys())
def test_a_reference_to_a_value_of_the_new_process_survives_the_death_of_the_old_one(script: list[Step]) -> None:
    play(script, [(V, hears(O, Registered(OF_NEW)), [Confirm(OF_NEW, True), Send(U, Unpin(FROM_U))])])


def test_a_reference_is_lost_if_the_new_process_is_dead_too() -> None:
    script: list[Step] = [
        (V, do.died(O, OLD), []),
        (V, do.receive(OF_NEW, FROM_U), [Seek(O, NEW)]),
        (V, do.died(O, OLD), []),
        (V, do.died(O, NEW), [Confirm(OF_NEW, False), Send(U, Unpin(FROM_U))]),
        (V, do.drop(OF_NEW), []),
    ]
    assert not list(play(script)[V].used)


def test_a_death_of_an_unknown_process_takes_all_values_of_its_worker() -> None:
    play(
        [
            (V, do.receive(OF_NEW, FROM_U), [Send(O, Register(OF_NEW))]),
            (V, do.died(O), [Confirm(OF_NEW, False), Send(U, Unpin(FROM_U))]),
        ]
    )


def test_the_error_names_the_process_that_had_the_value() -> None:
    names = Names()
    names[O] = WorkerInfo(O, "owner")
    names.replaced[O] = "the old process is over", NEW
    assert "the old process is over" in str(lost_value(OF_OLD, names))
    assert "the old process" not in str(lost_value(OF_NEW, names))
