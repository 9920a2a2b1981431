"""The view of a cluster, from its workers' answers. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from backhaul.seeing.view import HISTORY, View, quantile


def peer(name: str, sent: int = 0, shared: int = 0, received: int = 0, calls: int = 0) -> dict[str, Any]:
    return {"name": name, "sent": sent, "shared": shared, "received": received, "calls_sent": calls}


def snapshot(time: float, calls: int = 0, *peers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "worker": {"host": "here", "pid": more.pop("pid", 7), "seconds": 1.0},
        "time": time,
        "process": {"cpu": more.pop("cpu", 0.0), "memory": 1000},
        "threads": {"all": 4},
        "peers": list(peers),
        "calls": {"calls_sent": calls, "calls_received": 0, "outstanding": 0},
        "running": [],
        "waiting": [],
        "references": {"owned": 2, "used": 3},
        "autograd": {"gates": 0, "contexts": 0, "passes": 0, "in_detail": more.pop("contexts", [])},
    }


def meter(*calls: dict[str, Any], recent: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"bounds": [1.0, 2.0], "calls": list(calls), "recent": recent or []}


def calls(function: str, buckets: list[int], direction: str = "sent") -> dict[str, Any]:
    return {"function": function, "direction": direction, "buckets": buckets}


def view(*names: str) -> View:
    found = View()
    for rank, name in enumerate(names):
        found.met(name, rank)
    return found


def test_a_worker_that_has_not_answered_yet() -> None:
    (row,) = view("a").rows()
    assert (row.name, row.state, row.since) == ("a", "unknown", None)


def test_rates_are_differences_of_two_answers() -> None:
    found = view("a", "b")
    found.answered("a", 100, snapshot(50, 10, peer("b", sent=100, shared=0, calls=10), cpu=1.0))
    assert found.rows()[0].calls_sent == 0
    found.answered("a", 102, snapshot(52, 30, peer("b", sent=300, shared=1000, received=50, calls=30), cpu=2.0))
    row = found.rows()[0]
    assert (row.calls_sent, row.bytes_sent, row.bytes_received, row.processor) == (10, 600, 25, 50)
    assert row.references == 5
    assert [(each.sender, each.receiver, each.calls, each.bytes) for each in found.traffic()] == [("a", "b", 10, 600)]
    assert row.history == [{"at": 102, "calls": 10, "bytes": 625, "processor": 50, "memory": 1000}]


def test_a_counter_that_restarts_gives_no_negative_rate() -> None:
    found = view("a")
    found.answered("a", 100, snapshot(50, 100, peer("b", sent=100)))
    found.answered("a", 101, snapshot(51, 1, peer("b", sent=5)))
    assert (found.rows()[0].calls_sent, found.rows()[0].bytes_sent) == (0, 0)


def test_another_process_in_the_place_of_a_worker_has_no_rates_yet() -> None:
    found = view("a")
    found.answered("a", 100, snapshot(50, 1, pid=7))
    found.answered("a", 101, snapshot(51, 100, pid=8))
    assert found.rows()[0].calls_sent == 0


def test_a_lost_worker_stays_with_the_time_when_it_was_lost() -> None:
    found = view("a", "b")
    found.answered("a", 100, snapshot(50))
    found.failed("a", 101, "slow", lost=False)
    assert (found.rows()[0].state, found.rows()[0].since) == ("silent", 101)
    found.failed("a", 105, "gone", lost=True)
    found.failed("a", 109, "gone", lost=True)
    row = found.rows()[0]
    assert (row.state, row.since, row.reason, row.pid, row.calls_sent) == ("lost", 105, "gone", 7, 0)
    found.answered("a", 110, snapshot(60))
    assert (found.rows()[0].state, found.rows()[0].since) == ("live", None)


def test_members_that_have_left_are_forgotten_once_they_are_lost() -> None:
    found = view("a", "b", "c")
    found.failed("b", 1, "gone", lost=True)
    found.failed("c", 1, "gone", lost=True)
    found.left(["c"])
    assert [row.name for row in found.rows()] == ["a", "c"]
    found.failed("b", 2, "an answer that comes too late", lost=True)
    found.answered("b", 2, snapshot(1))
    assert len(found.rows()) == 2


def test_history_is_bounded() -> None:
    found = view("a")
    for second in range(HISTORY + 50):
        found.answered("a", second, snapshot(second), meter(calls("f", [second, 0, 0])))
        found.tick(second)
    assert len(found.rows()[0].history) == HISTORY
    assert len(found.curves()["f"]) <= HISTORY


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ([10, 0, 0], 0.5, 0.5),
        ([0, 10, 0], 0.5, 1.5),
        ([5, 5, 0], 0.5, 1.0),
        ([5, 5, 0], 0.9, 1.8),
        ([0, 0, 10], 0.99, 2.0),  # beyond all bounds
        ([0, 0, 0], 0.5, 0.0),
    ],
)
def test_quantiles(buckets: list[int], share: float, expected: float) -> None:
    assert quantile([1.0, 2.0], buckets, share) == pytest.approx(expected)


def test_latency_curves_are_of_the_last_seconds_over_all_callers() -> None:
    found = view("a", "b")
    found.answered("a", 0, snapshot(0), meter(calls("f", [100, 0, 0])))
    found.answered("b", 0, snapshot(0), meter(calls("f", [0, 0, 0]), calls("g", [0, 9, 0], "served")))
    found.tick(0)
    found.answered("a", 2, snapshot(2), meter(calls("f", [100, 4, 0])))
    found.answered("b", 2, snapshot(2), meter(calls("f", [4, 0, 0])))
    found.tick(2)
    (point,) = found.curves()["f"][-1:]
    assert point == {"at": 2, "calls": 4.0, "p50": 1.0, "p99": pytest.approx(1.98)}
    assert "g" not in found.curves()  # the caller counts it


def share(worker_began: float, ended: float | None, **more: Any) -> dict[str, Any]:
    return {
        "context": 3,
        "backward": 9,
        "started_here": False,
        "began": worker_began,
        "ended": ended,
        "failed": False,
        "runs": [{"began": worker_began, "ended": ended, "sources": 1, "thread": 5}],
        "gates": [],
        "waits": [],
        **more,
    }


def test_the_shares_of_a_pass_are_put_together_on_one_clock() -> None:
    found = view("a", "b")
    found.answered("a", 20, snapshot(0), meter(recent=[share(10.0, 14.0, started_here=True)]))
    found.answered("b", 20, snapshot(0), meter(recent=[share(111.0, 113.0)]), offset=100)
    (one,) = found.passes()
    assert (one["backward"], one["context"], one["starter"], one["began"], one["ended"]) == (9, 3, "a", 10.0, 14.0)
    assert one["complete"]
    assert [(each["worker"], each["runs"][0]["began"]) for each in one["shares"]] == [("a", 10.0), ("b", 11.0)]


def test_a_pass_is_complete_when_all_have_answered_after_it() -> None:
    found = view("a", "b")
    found.answered("a", 20, snapshot(0), meter(recent=[share(10.0, 14.0, started_here=True)]))
    found.answered("b", 13, snapshot(0), meter())
    assert not found.passes()[0]["complete"]
    found.answered("b", 15, snapshot(0), meter())
    assert found.passes()[0]["complete"]


def test_live_contexts() -> None:
    def context(id: int, sends: int) -> dict[str, Any]:
        return {"context": id, "initiator": 0, "sends": sends, "passes": [{}] if sends > 1 else []}

    found = view("a", "b")
    found.answered("a", 1, snapshot(0, contexts=[context(4, 1), context(8, 2)]))
    found.answered("b", 1, snapshot(0, contexts=[context(8, 1)]))
    assert found.contexts() == [
        {"context": 8, "initiator": "a", "workers": ["a", "b"], "tensors": 3, "passes": 1},
        {"context": 4, "initiator": "a", "workers": ["a"], "tensors": 1, "passes": 0},
    ]
    found.failed("b", 2, "gone", lost=True)
    assert found.contexts()[0]["workers"] == ["a"]
