"""Spans, pieces and the chain of a call, from handwritten events. Times are in microseconds."""

from __future__ import annotations

from backhaul.agent.observing import (
    Asked,
    Began,
    Came,
    Encoded,
    Ended,
    Event,
    GateOpens,
    GateWaits,
    HandedOut,
    Invoked,
    Issued,
    Packed,
    Queued,
    Read,
    Resumes,
    Returned,
    RunBegan,
    RunEnded,
    Sent,
    Settled,
    TorchBegan,
    TorchEnded,
    Waits,
)
from backhaul.profiler.chain import Walk
from backhaul.profiler.clocks import HOME
from backhaul.profiler.gathered import Moment, Recording, Thread
from backhaul.profiler.replay import Told, replay
from backhaul.profiler.trace import calls_of, nest

US = 1000


def thread(worker: str, native: int, *events: tuple[int, Event]) -> Thread:
    moments = [Moment(event, at * US, at * US, 7 if isinstance(event, Waits | Resumes) else 0) for at, event in events]
    return Thread(worker, native, f"backhaul-{worker}", moments, serves=True)


def recording(*threads: Thread) -> Recording:
    worker = threads[0].worker
    return Recording(worker, 0, "host", 1, HOME, 0, 100 * US, list(threads), 0, False, [], [], None, 0)


CALLER = thread(
    "a",
    1,
    (10, Asked(peer="b", what="f")),
    (12, Packed()),
    (13, Issued(peer="b", call=7, what="f", is_call=True)),
    (14, Encoded()),
    (16, Sent(peer="b", line=1, size=99, replies=False)),
    (17, Waits()),
    (60, Read(peer="b", line=1)),
    (62, Came(peer="b", line=1, count=0)),
    (63, Resumes()),
    (65, Settled(peer="b", call=7, failed=False)),
    (90, Asked(peer="b", what="f")),
)
CALLEE = thread(
    "b",
    2,
    (20, Read(peer="a", line=2)),
    (21, Began(peer="a", kind="Call", call=7)),
    (24, Invoked(what="f")),
    (50, Returned(failed=False)),
    (52, Encoded()),
    (54, Ended(peer="a", kind="Call", replies=True, call=7)),
    (57, Sent(peer="a", line=2, size=11, replies=True)),
)


def told_of(thread: Thread, home: bool = False) -> Told:
    return replay([thread], thread.worker, 0, 100 * US, thread.native if home else None)


def spans(told: Told) -> list[tuple[str, str, int, int]]:
    return [(span.kind, span.name, round(span.begin / US), round(span.end / US)) for span in told.spans]


def test_the_pieces_of_a_caller() -> None:
    pieces = told_of(CALLER, home=True).pieces[1]
    assert [(piece.begin // US, piece.end // US, piece.state) for piece in pieces] == [
        (0, 10, "compute"),
        (10, 12, "wire"),
        (12, 13, "wire"),
        (13, 14, "wire"),
        (14, 16, "wire"),
        (16, 17, "compute"),
        (17, 60, "replies"),
        (60, 62, "wire"),
        (62, 63, "wire"),
        (63, 65, "wire"),
        (65, 90, "compute"),
    ]


def test_a_thread_that_sleeps_between_two_jobs_does_not_work() -> None:
    """Like the watch thread, it hands out what it finds, and sleeps until there is more."""
    watch = thread(
        "a", 3, (10, Read(peer="b", line=1)), (12, Queued()), (80, Queued()), (81, HandedOut(peer="b", line=1, count=1))
    )
    pieces = told_of(watch).pieces[3]
    assert sum(piece.end - piece.begin for piece in pieces if piece.state == "wire") == 3 * US


def test_the_call_and_its_execution() -> None:
    (call,) = calls_of(told_of(CALLER))
    assert (call.name, call.begin, call.end) == ("f → b", 13 * US, 65 * US)
    assert (call.details["bytes"], call.details["peer"], call.details["failed"]) == (99, "b", False)
    told = told_of(CALLEE)
    assert spans(told) == [("function", "f", 24, 50), ("serve", "serve f", 21, 54), ("reply", "reply", 50, 52)]
    assert next(span for span in told.spans if span.kind == "serve").details["reply_bytes"] == 11
    states = [(piece.begin // US, piece.end // US, piece.state) for piece in told.pieces[2]]
    assert states[:4] == [(0, 20, "idle"), (20, 21, "wire"), (21, 24, "wire"), (24, 50, "compute")]


def test_the_chain_of_a_call() -> None:
    """Back from the end along the caller, over to the callee where the caller waited, and back to the caller."""
    recordings = [recording(CALLER), recording(CALLEE)]
    walk = Walk(recordings, {"a": told_of(CALLER, home=True), "b": told_of(CALLEE)}, ("a", 1))
    chain = walk.chain("step", 0, 90 * US)
    found = [(segment.worker, segment.what, round(segment.seconds * 1e6)) for segment in chain.segments]
    assert found == [
        ("a", "the block", 10),
        ("a", "Backhaul", 6),
        ("a → b", "between workers", 4),
        ("b", "Backhaul", 4),
        ("b", "f", 26),
        ("b", "Backhaul", 7),
        ("b → a", "between workers", 3),
        ("a", "Backhaul", 5),
        ("a", "the block", 25),
    ]


def test_a_wait_whose_end_was_not_recorded_is_in_the_chain() -> None:
    walk = Walk([recording(CALLER)], {"a": told_of(CALLER, home=True)}, ("a", 1))
    chain = walk.chain("step", 0, 90 * US)
    assert ("wait", 43) in [(segment.what, round(segment.seconds * 1e6)) for segment in chain.segments]
    assert round(sum(segment.seconds for segment in chain.segments) * 1e6) == 90


def test_a_wait_is_not_explained_by_a_thread_that_was_idle() -> None:
    """The last write of the peer may be another message, such as a notice from its watch thread."""
    idler = thread(
        "b", 9, (1, Read(peer="c", line=5)), (2, Queued()), (59, Sent(peer="a", line=2, size=9, replies=False))
    )
    told = {"a": told_of(CALLER, home=True), "b": told_of(idler)}
    chain = Walk([recording(CALLER), recording(idler)], told, ("a", 1)).chain("step", 0, 90 * US)
    found = [(segment.worker, segment.what, round(segment.seconds * 1e6)) for segment in chain.segments]
    assert ("a", "wait", 43) in found
    assert "b" not in {worker for worker, _, _ in found}
    assert round(sum(segment.seconds for segment in chain.segments) * 1e6) == 90


def test_a_gate_opens_before_its_wait_ends() -> None:
    told = told_of(
        thread(
            "a",
            1,
            (10, RunBegan(context=1, backward=2, sources=(0,))),
            (11, TorchBegan(backward=2)),
            (20, GateWaits(backward=2, source=5)),
            (21, Waits()),
            (40, GateOpens(backward=2, source=5)),
            (41, Resumes()),
            (50, TorchEnded(backward=2)),
            (51, RunEnded(backward=2, sources=(0,))),
        )
    )
    assert spans(told) == [
        ("gate", "gate", 20, 40),
        ("opens", "gate opens", 21, 40),
        ("engine", "torch's engine", 11, 50),
        ("run", "run", 10, 51),
    ]
    states = {(piece.begin // US, piece.state) for piece in told.pieces[1]}
    assert {(11, "compute"), (20, "gates"), (21, "gates"), (41, "compute")} <= states


def test_spans_cut_off_by_the_recording() -> None:
    told = told_of(thread("a", 1, (10, Returned(failed=False)), (20, Invoked(what="g"))))
    assert spans(told) == [("function", "g", 20, 100)]
    assert told.spans[0].details["unfinished"]


def test_calls_that_overlap_do_not_share_a_thread() -> None:
    told = told_of(
        thread(
            "a",
            1,
            (10, Issued(peer="b", call=1, what="f", is_call=True)),
            (20, Issued(peer="b", call=2, what="f", is_call=True)),
            (30, Settled(peer="b", call=1, failed=False)),
            (40, Settled(peer="b", call=2, failed=False)),
        )
    )
    nested, apart = nest(calls_of(told))
    assert [span.details["call"] for span in nested] == [2]
    assert [span.details["call"] for span in apart] == [1]
