"""Following the way of a call through the stamps of two processes, and what most repetitions have in common."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from backhaul.agent.observing import (
    Asked,
    Began,
    Came,
    Encoded,
    Ended,
    Event,
    HandedOut,
    Invoked,
    Packed,
    Queued,
    Read,
    Resumes,
    Returned,
    Sent,
    Settled,
    Starts,
    Waits,
)
from backhaul.bench.stages import IN_BETWEEN, KINDS, OTHER_MESSAGES
from backhaul.bench.ways import (
    BETWEEN_PROCESSES,
    BETWEEN_THREADS,
    History,
    Piece,
    Stamp,
    Stamps,
    Strayed,
    Thread,
    Way,
    follow,
    summarise,
)

MAIN = Thread("client", 1)
READER = Thread("client", 2)
SERVER = Thread("server", 1)
FREE = (0.0, 0.0)  # stamps that cost nothing


def stamps(*pairs: tuple[type[Event], int]) -> list[Stamp]:
    return [Stamp(*pair) for pair in pairs]


def shown(way: Sequence[Piece]) -> list[tuple[int, str, str, float]]:
    return [(piece.leg, piece.where, piece.stage, piece.nanoseconds) for piece in way]


CALL: Stamps = {
    MAIN: stamps(
        (Asked, 5), (Packed, 20), (Encoded, 30), (Sent, 40), (Waits, 45), (Read, 145), (Came, 150), (Settled, 160)
    ),
    SERVER: stamps((Sent, -50), (Read, 60), (Began, 75), (Invoked, 80), (Returned, 100), (Ended, 110), (Sent, 120)),
}


def test_the_way_of_a_call_is_followed() -> None:
    assert shown(follow(CALL, MAIN, 0, 170, FREE)) == [
        (0, "client", IN_BETWEEN, 5),
        (0, "client", "pack the values", 15),
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 10),
        (1, "", BETWEEN_PROCESSES, 20),
        (1, "server", "decode the frame", 15),
        (1, "server", "unpack the values", 5),
        (1, "server", "the function itself", 20),
        (1, "server", "the agent", 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 25),
        (2, "client", "decode the frame", 5),
        (2, "client", "unpack the values", 10),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_the_pieces_of_a_way_add_up_to_the_whole() -> None:
    assert sum(piece.nanoseconds for piece in follow(CALL, MAIN, 0, 170, FREE)) == 170


def test_a_write_counts_up_to_the_read_of_its_bytes() -> None:
    events = {
        MAIN: stamps((Encoded, 10), (Sent, 60), (Read, 100)),
        SERVER: stamps((Sent, -10), (Read, 40), (Ended, 50), (Sent, 105), (Read, 200)),
    }
    assert shown(follow(events, MAIN, 0, 110, FREE)) == [
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 30),
        (1, "", BETWEEN_PROCESSES, 0),
        (1, "server", "the agent", 10),
        (1, "server", "write", 50),
        (2, "", BETWEEN_PROCESSES, 0),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_a_thread_that_loses_its_processor_after_a_write_still_gets_its_reply_from_the_other_process() -> None:
    events = {
        MAIN: stamps((Encoded, 10), (Sent, 80), (Waits, 85), (Read, 90)),
        SERVER: stamps((Read, 40), (Ended, 50), (Sent, 60)),
    }
    assert shown(follow(events, MAIN, 0, 100, FREE)) == [
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 30),
        (1, "", BETWEEN_PROCESSES, 0),
        (1, "server", "the agent", 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 30),
        (2, "client", IN_BETWEEN, 10),
    ]


def test_a_read_of_available_bytes_is_not_a_wait() -> None:
    events = {MAIN: stamps((Encoded, 5), (Packed, 30), (Read, 35)), SERVER: stamps((Ended, 10), (Sent, 20))}
    assert shown(follow(events, MAIN, 0, 50, FREE)) == [
        (0, "client", "encode the frame", 5),
        (0, "client", "pack the values", 25),
        (0, "client", "read", 5),
        (0, "client", IN_BETWEEN, 15),
    ]


@pytest.mark.parametrize(
    ("reader", "goes_on"),
    [(stamps((Read, 70), (Came, 80), (Queued, 90)), Starts), (stamps((Read, 70), (Came, 90)), Resumes)],
)
def test_the_way_goes_through_a_thread_that_reads_for_the_caller(reader: list[Stamp], goes_on: type[Event]) -> None:
    events = {
        MAIN: stamps((Encoded, 10), (Sent, 20), (Waits, 30), (goes_on, 100)),
        READER: reader,
        SERVER: stamps((Read, 40), (Ended, 50), (Sent, 60)),
    }
    found = shown(follow(events, MAIN, 0, 105, FREE))
    assert found[:6] == [
        (0, "client", "encode the frame", 10),
        (0, "client", "write", 10),
        (1, "", BETWEEN_PROCESSES, 20),
        (1, "server", "the agent", 10),
        (1, "server", "write", 10),
        (2, "", BETWEEN_PROCESSES, 10),
    ]
    assert sum(nanoseconds for leg, where, _, nanoseconds in found if (leg, where) == (2, "client")) == 20
    assert found[-2:] == [(3, "", BETWEEN_THREADS, 10), (3, "client", IN_BETWEEN, 5)]


def test_a_job_that_a_thread_queues_for_itself_is_not_a_wait() -> None:
    events = {MAIN: stamps((Queued, 10), (HandedOut, 15), (Starts, 20)), READER: stamps((Queued, 5), (Queued, 50))}
    assert {where for _, where, _, _ in shown(follow(events, MAIN, 0, 30, FREE))} == {"client"}


def test_a_message_that_stands_before_the_call_has_a_stage_of_its_own() -> None:
    events = {
        **CALL,
        SERVER: stamps(
            (Read, 60), (Began, 62), (Ended, 70), (Began, 75), (Invoked, 80), (Returned, 100), (Ended, 110), (Sent, 120)
        ),
    }
    way = shown(follow(events, MAIN, 0, 170, FREE))
    assert (1, "server", OTHER_MESSAGES, 8) in way
    assert sum(nanoseconds for *_, nanoseconds in way) == 170


def test_the_cost_of_a_stamp_is_subtracted_from_the_adjacent_stages() -> None:
    way = follow({MAIN: stamps((Packed, 10), (Encoded, 30))}, MAIN, 0, 100, (1.0, 4.0))
    assert [piece.nanoseconds for piece in way] == [9, 15, 66]


def test_a_way_that_cannot_be_followed_is_an_error() -> None:
    events = {MAIN: stamps((Waits, 10), (Read, 50)), SERVER: stamps((Ended, 30), (Sent, 40))}
    with pytest.raises(Strayed):
        follow(events, MAIN, 0, 100, FREE)


def test_the_summary_describes_the_most_common_way() -> None:
    rows: dict[Thread, list[tuple[int, int, int]]] = {MAIN: [], SERVER: []}
    windows = []
    for number in range(5):
        start = 1000 * number
        windows.append((start, start + 170))
        for thread, row in rows.items():
            if (thread, number) != (SERVER, 3):  # there the reply arrived in another way
                row += [(KINDS.index(each.kind), start + each.at, thread.id) for each in CALL[thread]]
    history = History({"client": torch.tensor(rows[MAIN]), "server": torch.tensor(rows[SERVER])})

    found = summarise("call", history.ways(MAIN, windows, FREE), 150e-9)

    assert (found.repetitions, found.alike) == (5, 4)
    assert found.total == pytest.approx(170e-9)
    assert found.remainder == pytest.approx(0)
    assert found.covered == pytest.approx(155 / 170)
    assert [(stage.where, stage.name) for stage in found.stages][:2] == [
        ("client", IN_BETWEEN),
        ("client", "pack the values"),
    ]


def test_a_work_without_complete_ways_has_no_summary() -> None:
    with pytest.raises(Strayed, match="call: no repetition could be followed"):
        summarise("call", [Way([], 100)], 1.0)
