"""Why threads hang, from the workers' answers. Pure."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from backhaul.seeing.findings import Stuck
from backhaul.seeing.stuck import ASKER, INSPECTION, explain

Thread = dict[str, Any]


def frame(line: int = 17, code: str = "work()", file: str = "/home/me/train.py", whose: str = "user") -> dict[str, Any]:
    return {"file": file, "line": line, "function": "f", "code": code, "whose": whose}


def thread(id: int, name: str = "MainThread", **more: Any) -> Thread:
    return {"id": id, "name": name, "handles": [], "waits": [], "stack": [frame()], "blocked": None, **more}


def handles(peer: str, call: int, what: str = "train.f", seconds: float = 5.0, **more: Any) -> dict[str, Any]:
    return {"peer": peer, "kind": "Call", "call": call, "what": what, "seconds": seconds, **more}


def reply(peer: str, call: int, what: str, seconds: float = 4.0) -> dict[str, Any]:
    return {"kind": "reply", "peer": peer, "call": call, "what": what, "seconds": seconds}


def gate(peer: str, backward: int, seconds: float = 4.0) -> dict[str, Any]:
    return {"kind": "gate", "peer": peer, "context": 1, "backward": backward, "source": 3, "seconds": seconds}


def worker(rank: int, *threads: Thread, **snapshot: Any) -> dict[str, Any]:
    autograd = {"runs": snapshot.pop("runs", []), "in_detail": snapshot.pop("contexts", [])}
    about = {"rank": rank, "host": "here", "pid": 100 + rank}
    return {"threads": list(threads), "snapshot": {"worker": about, "autograd": autograd, **snapshot}}


def cluster(*workers: dict[str, Any]) -> Stuck:
    return explain({f"worker{rank}": each for rank, each in enumerate(workers)})


def only(stuck: Stuck) -> tuple[str, str]:
    assert len(stuck.chains) == 1, [chain.sentence for chain in stuck.chains]
    return stuck.chains[0].end, stuck.chains[0].sentence


def test_a_cycle_over_three_workers_through_a_lock() -> None:
    stuck = cluster(
        worker(
            0,
            thread(1, waits=[reply("worker1", 7, "f")]),
            thread(
                2,
                "backhaul-worker0",
                handles=[handles("worker2", 3, "train.h", 1.0)],
                blocked={"on": "lock", "what": "lock", "holder": 1},
                stack=[frame(21, "with lock:")],
            ),
        ),
        worker(1, thread(1, "pool", handles=[handles("worker0", 7)], waits=[reply("worker2", 9, "g", 2.0)])),
        worker(2, thread(1, "pool", handles=[handles("worker1", 9)], waits=[reply("worker0", 3, "h", 1.5)])),
    )
    end, sentence = only(stuck)
    assert end == "cycle"
    assert sentence == (
        "worker0's main thread waits for f on worker1, which waits for g on worker2, which waits for h on worker0, "
        "which waits for the lock lock (line 21 of train.py: with lock:), held by worker0's main thread: "
        "a cycle, none of them can continue."
    )
    assert stuck.lasting == stuck.chains
    keys = stuck.chains[0].nodes
    assert len(keys) == 5
    assert keys[0] == keys[-1]
    assert {(edge.source, edge.target) for edge in stuck.edges} == set(itertools.pairwise(keys))
    assert {node.worker for node in stuck.nodes} == {"worker0", "worker1", "worker2"}


def test_a_cycle_is_described_from_the_thread_that_has_waited_longest() -> None:
    def answers(seconds: float) -> dict[str, Any]:
        at = {"on": "lock", "what": "lock", "holder": 1}
        return {
            "a": worker(0, thread(1, "first", handles=[handles("b", 4)], waits=[reply("b", 7, "f", seconds)])),
            "b": worker(1, thread(2, "second", handles=[handles("a", 7)], waits=[reply("a", 4, "g", 3.0)])),
            "c": worker(2, thread(1, "alone", handles=[handles("b", 9)], blocked=at)),
        }

    assert only(explain(answers(1.0)))[1].startswith("b's thread in f waits for g on a, which waits for f on b")
    assert only(explain(answers(5.0)))[1].startswith("a's thread in f waits for f on b, which waits for g on a")


def test_a_thread_that_waits_for_itself() -> None:
    blocked = {"on": "lock", "what": "self.lock", "holder": 1}
    stuck = cluster(
        worker(0, thread(1, waits=[reply("worker1", 7, "f")])),
        worker(1, thread(1, "pool", handles=[handles("worker0", 7)], blocked=blocked)),
    )
    end, sentence = only(stuck)
    assert end == "cycle"
    assert sentence.endswith("held by worker1's thread in f: a cycle, it can never continue.")


def at_lock(holder: int | None = None, on: str = "lock") -> Thread:
    blocked = {"on": on, "what": "lock" if on == "lock" else "", "holder": holder}
    return thread(1, "pool", handles=[handles("worker0", 7)], blocked=blocked, stack=[frame(17, "lock.acquire()")])


ENDS: dict[str, tuple[dict[str, Any], str, str]] = {
    "it runs": (
        worker(1, thread(1, "pool", handles=[handles("worker0", 7, seconds=12.34)])),
        "runs",
        "which has run train.f for 12.3 s, now at line 17 of train.py: work().",
    ),
    "a lock": (
        worker(1, at_lock()),
        "blocked",
        "which waits for the lock lock (line 17 of train.py: lock.acquire()): its holder is unknown.",
    ),
    "an event": (
        worker(1, at_lock(on="event")),
        "blocked",
        "which waits for an event (line 17 of train.py: lock.acquire()): no thread has set it.",
    ),
    "a lock of a thread that runs": (
        worker(1, at_lock(holder=5), thread(5, "loader", stack=[frame(3, "read()")])),
        "runs",
        "held by worker1's thread loader, which is at line 3 of train.py: read().",
    ),
    "not begun": (worker(1), "unknown", "no thread of worker1 has started it"),
    "late": (
        worker(1, running=[{**handles("worker0", 7), "thread": None}]),
        "late",
        "train.f has run there without a thread for 5.0 s: it is a coroutine, or has returned a future",
    ),
    "dead": ({"error": "its process has ended", "lost": True}, "lost", "worker1 is lost: its process has ended."),
    "silent": ({"error": "it does not answer"}, "lost", "worker1: it does not answer."),
    "a call of another worker has the same number": (
        worker(1, thread(1, "pool", handles=[handles("worker9", 7)])),
        "unknown",
        "no thread of worker1 has started it",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_last_cause_of_a_waiting_call_is_found(name: str) -> None:
    there, end, text = ENDS[name]
    stuck = cluster(worker(0, thread(1, waits=[reply("worker1", 7, "f")])), there)
    assert only(stuck)[0] == end
    assert stuck.chains[0].sentence.startswith("worker0's main thread waits for f on worker1")
    assert text in stuck.chains[0].sentence


def test_a_lost_worker_is_said_first() -> None:
    stuck = explain({"a": worker(0), "b": {"error": "gone", "lost": True}})
    assert str(stuck).startswith("b: gone")


def test_a_call_made_by_a_coroutine_is_followed() -> None:
    """An async function that waits for another worker."""
    stuck = cluster(
        worker(0, thread(1, waits=[reply("worker1", 7, "f")])),
        worker(
            1,
            running=[{**handles("worker0", 7), "thread": None}],
            asked=[{"peer": "worker2", "call": 4, "what": "g"}],
        ),
        worker(2, thread(1, "pool", handles=[handles("worker1", 4, "train.g")])),
    )
    end, sentence = only(stuck)
    assert end == "runs"
    assert "which runs without a thread and probably waits for g on worker2, which has run train.g" in sentence


def test_a_gate_waits_for_a_run_that_blocks() -> None:
    run = {"context": 1, "backward": 8, "sources": [3], "thread": 5, "seconds": 4.5}
    stuck = cluster(
        worker(
            0,
            thread(1, waits=[gate("worker1", 8), {"kind": "pass", "backward": 8, "ranks": [1], "seconds": 5.0}]),
        ),
        worker(
            1,
            thread(
                5,
                "pool",
                handles=[{**handles("worker0", 0, "Gradients"), "kind": "Gradients", "backward": 8}],
                stack=[frame(30, "time.sleep(60)")],
            ),
            runs=[run],
        ),
    )
    end, sentence = only(stuck)
    assert end == "runs"
    assert sentence == (
        "worker0's main thread waits at a gate of backward pass 8 for gradients from worker1, which has run its part "
        "of backward pass 8 for 4.5 s, now at line 30 of train.py: time.sleep(60)."
    )


def test_a_pass_waits_for_several_workers() -> None:
    run = {"context": 1, "backward": 8, "sources": [3], "thread": 5, "seconds": 4.5}
    stuck = cluster(
        worker(0, thread(1, waits=[{"kind": "pass", "backward": 8, "ranks": [1, 2], "seconds": 5.0}])),
        worker(1, thread(5, "pool"), runs=[run]),
        worker(2),
    )
    assert {chain.end for chain in stuck.chains} == {"runs", "unknown"}
    texts = sorted(chain.sentence for chain in stuck.chains)
    assert "backward pass 8 for worker1, which has run its part" in texts[0]
    assert "no thread of worker2 works on that pass" in texts[1]


def test_a_pass_that_lacks_the_gradients_of_a_third_worker() -> None:
    run = {"context": 1, "backward": 8, "sources": [3], "thread": 5, "seconds": 4.5}
    context = {"context": 1, "passes": [{"backward": 8, "missing": [{"source": 3, "rank": 2}]}]}
    stuck = cluster(
        worker(0, thread(1, waits=[{"kind": "pass", "backward": 8, "ranks": [1], "seconds": 5.0}])),
        worker(1, contexts=[context]),
        worker(2, thread(5, "pool"), runs=[run]),
    )
    end, sentence = only(stuck)
    assert end == "runs"
    assert "for worker1, which cannot continue without gradients from worker2, which has run its part" in sentence


def test_two_gates_that_wait_for_each_other() -> None:
    def at_gate(peer: str) -> Thread:
        return thread(5, "pool", waits=[gate(peer, 8)])

    run = {"context": 1, "backward": 8, "sources": [3], "thread": 5, "seconds": 4.5}
    stuck = cluster(worker(0, at_gate("worker1"), runs=[run]), worker(1, at_gate("worker0"), runs=[run]))
    end, sentence = only(stuck)
    assert end == "cycle"
    assert sentence.endswith(
        "from worker0, where worker0's thread pool waits for it in turn: a cycle, none of them can continue."
    )


def test_a_run_whose_gate_waits_on_a_thread_of_torch_s() -> None:
    run = {"context": 1, "backward": 8, "sources": [3], "thread": 5, "seconds": 4.5}
    stuck = cluster(
        worker(0, thread(1, waits=[reply("worker1", 7, "f")])),
        worker(
            1,
            thread(5, "pool", handles=[handles("worker0", 7)]),
            thread(6, "a device's", waits=[gate("worker2", 8)]),
            runs=[run],
        ),
        {"error": "gone", "lost": True},
    )
    end, sentence = only(stuck)
    assert end == "lost"
    assert "which runs torch's engine, which waits at a gate of backward pass 8 for gradients from worker2" in sentence


def test_a_value_that_is_being_made() -> None:
    making = {**handles("worker0", 3, "train.build"), "kind": "Create", "ref": "1/0.4"}
    for wait in (
        reply("worker1", 9, "to_here of 1/0.4"),
        {"kind": "value", "ref": "1/0.4", "seconds": 2.0},
    ):
        where = 0 if wait["kind"] == "reply" else 1
        threads: list[list[Thread]] = [[], [thread(5, "pool", handles=[making])]]
        threads[where].append(thread(1, waits=[wait]))
        stuck = cluster(worker(0, *threads[0]), worker(1, *threads[1]))
        end, sentence = only(stuck)
        assert end == "runs"
        assert "which has run train.build for 5.0 s" in sentence


def test_a_connection_to_a_dead_worker() -> None:
    wait = {"kind": "connection", "peer": "worker1", "seconds": 2.0}
    stuck = cluster(worker(0, thread(1, waits=[wait])), {"error": "gone", "lost": True})
    assert only(stuck) == (
        "lost",
        "worker0's main thread waits for a connection to worker1: worker1 is lost: gone.",
    )


def test_a_connection_that_is_being_made() -> None:
    wait = {"kind": "connection", "peer": "worker1", "seconds": 2.0}
    end, sentence = only(cluster(worker(0, thread(1, waits=[wait])), worker(1)))
    assert (end, sentence) == ("unknown", "worker0's main thread waits for a connection to worker1: it is being made.")


@pytest.mark.parametrize(
    ("peer", "end", "says"),
    [
        ({"error": "no answer"}, "lost", "worker1: no answer."),
        (None, "unknown", "they are on their way, or worker1 does not read."),
    ],
)
def test_a_message_that_a_worker_does_not_take(peer: dict[str, Any] | None, end: str, says: str) -> None:
    wait = {"kind": "room", "peer": "worker1", "bytes": 4_000_000, "seconds": 2.0}
    found = only(cluster(worker(0, thread(1, waits=[wait])), worker(1) if peer is None else peer))
    assert found == (end, f"worker0's main thread waits until worker1 takes 4,000,000 bytes: {says}")


def test_a_future_that_nothing_completes() -> None:
    stack = [frame(40, "future.wait()"), {**frame(), "file": "/x/torch/futures/__init__.py", "whose": "installed"}]
    stack[-1]["function"] = "wait"
    end, sentence = only(cluster(worker(0, thread(1, stack=stack))))
    assert end == "blocked"
    assert sentence == (
        "worker0's main thread waits for a future: nothing has completed that future "
        "(line 40 of train.py: future.wait())."
    )


def test_several_workers_in_one_process() -> None:
    """A thread may have several notes: the last activity that it began is what it does."""
    about = {"host": "here", "pid": 1}
    one = {
        "threads": [thread(1, waits=[reply("b", 7, "f", 9.0)]), thread(2, "pool")],
        "snapshot": {"worker": {**about, "rank": 0}},
    }
    two = {
        "threads": [thread(1), thread(2, "pool", handles=[handles("a", 7)])],
        "snapshot": {"worker": {**about, "rank": 1}},
    }
    end, sentence = only(explain({"a": one, "b": two}))
    assert end == "runs"
    assert sentence.startswith("a's main thread waits for f on b, which has run train.f")


def test_the_end_of_several_waits_is_described_once() -> None:
    stuck = cluster(
        worker(0, thread(1, waits=[reply("worker1", 7, "f")]), thread(2, "second", waits=[reply("worker1", 8, "f")])),
        worker(
            1,
            thread(1, "pool", handles=[handles("worker0", 7)], waits=[reply("worker2", 1, "g")]),
            thread(2, "pool", handles=[handles("worker0", 8)], waits=[reply("worker2", 2, "g")]),
        ),
        {"error": "gone", "lost": True},
    )
    assert [chain.sentence.split("'s")[0] for chain in stuck.chains] == ["worker0", "worker0"]
    assert len([node for node in stuck.nodes if node.kind == "lost"]) == 1


def test_threads_that_only_inspect_are_not_reported() -> None:
    looks = thread(1, waits=[reply("worker1", 7, INSPECTION)])
    connects = thread(2, f"{ASKER}worker1", waits=[{"kind": "connection", "peer": "worker1", "seconds": 2.0}])
    answers = thread(2, "pool", handles=[{**handles("guest", 1), "kind": "Inspect"}])
    stuck = cluster(worker(0, looks, connects), worker(1, answers))
    assert not stuck.chains
    assert str(stuck) == "No thread of any worker waits for another worker."


def test_a_short_wait_is_only_counted() -> None:
    stuck = cluster(
        worker(0, thread(1, waits=[reply("worker1", 7, "f", 0.01)])),
        worker(1, thread(1, "pool", handles=[handles("worker0", 7, seconds=0.01)])),
    )
    assert len(stuck.chains) == 1
    assert str(stuck) == "1 thread has waited for less than 1 s."


def test_workers_that_wait_in_shutdown_are_summarised() -> None:
    ending = thread(1, waits=[reply("worker0", 1, "the end of the group", 50.0)])
    stuck = cluster(worker(0), worker(1, ending), worker(2, ending))
    assert {chain.end for chain in stuck.chains} == {"shutdown"}
    assert str(stuck) == "2 workers wait in shutdown() for the others: worker0 did not call it yet."
