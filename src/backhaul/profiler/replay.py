"""Replay: goes through the events of a thread and derives what the thread did, piece by piece and span by span.

A **span** lies between two events that belong together; the spans of a thread nest. A **piece** is the time between two
consecutive events, with the state that the thread was in. The innermost open span decides the state. The exceptions are
stretches between two events with only Backhaul's own work in between: packing, encoding,
writing, reading and decoding.

    compute     a user function or torch's engine runs
    wire        Backhaul works: it packs, encodes, writes, reads, decodes, plans
    gates       waits for gradients during a run
    replies     waits for peers: for a reply, or for the end of a pass
    idle        none of these
"""

from __future__ import annotations

from typing import Any

import msgspec

from backhaul.agent.observing import (
    Asked,
    Began,
    Came,
    Encoded,
    Ended,
    Event,
    FinishedLate,
    GateOpens,
    GateWaits,
    GradientsCame,
    GradientsSent,
    HandedOut,
    Invoked,
    Issued,
    Packed,
    PassBegan,
    PassEnded,
    Queued,
    Read,
    RecvReached,
    RecvRecorded,
    Resumes,
    Returned,
    RunBegan,
    RunEnded,
    SendRecorded,
    Sent,
    Settled,
    Starts,
    Stops,
    TorchBegan,
    TorchEnded,
    Waits,
)
from backhaul.profiler.gathered import Moment, Thread

COMPUTE, WIRE, GATES, REPLIES, IDLE = "compute", "wire", "gates", "replies", "idle"

FUNCTION, SERVE, RUN, ENGINE, GATE, PASS = "function", "serve", "run", "engine", "gate", "pass"
WAIT, GRADIENTS, CALL, LATE, STEP = "wait", "gradients", "call", "late", "step"
REPLY, RESULT, OPENS = "reply", "result", "opens"
"""The last part of an execution, of a call and of a gate, where arrows begin and end. It begins just after the
previous event, so that it does not touch the slice that ends there."""

STATES = {
    FUNCTION: COMPUTE,
    RUN: COMPUTE,
    ENGINE: COMPUTE,
    GATE: GATES,
    WAIT: REPLIES,
    SERVE: WIRE,
    PASS: WIRE,
    GRADIENTS: WIRE,
}

_WORK_BEGINS = frozenset(
    (Asked, Packed, SendRecorded, Issued, Encoded, Read, Came, Ended, RecvRecorded, RecvReached, FinishedLate)
)
_WORK_ENDS = frozenset(
    (Packed, SendRecorded, RecvRecorded, Issued, Encoded, Sent, Came, HandedOut, Settled, Queued, GradientsSent)
)
_ALSO_WORK: frozenset[tuple[type[Event], type[Event]]] = frozenset(
    (
        *((Resumes, after) for after in (Settled, RecvRecorded)),
        *((before, Resumes) for before in (Read, Came, HandedOut)),
        *((HandedOut, after) for after in (Starts, Queued)),
        (Settled, HandedOut),
        (Queued, HandedOut),  # not (Queued, Queued): the watch thread may have slept in between
        (Read, Began),
        (Read, Read),  # only part of a message had arrived
    )
)


class Span(msgspec.Struct):
    """Times are in nanoseconds on the clock of the profiling worker."""

    worker: str
    thread: int
    kind: str
    name: str
    begin: int
    end: int
    details: dict[str, Any]


class Piece(msgspec.Struct, gc=False):
    begin: int
    end: int
    state: str
    what: str
    processor: int
    """The thread's processor time during the span, in nanoseconds."""
    ended_by: Moment | None


class Request(msgspec.Struct):
    """A request as its sender sees it."""

    caller: str
    peer: str
    call: int
    what: str
    is_call: bool
    thread: int
    begin: int
    size: int | None = None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a request."""

    since: int
    """The time of the previous event on the same thread."""
    at: int
    thread: int
    failed: bool


class Told(msgspec.Struct):
    """The findings from all threads of a worker together."""

    worker: str
    spans: list[Span] = []
    requests: list[Request] = []
    settled: dict[int, Outcome] = {}
    """By request number."""
    late: dict[tuple[str, int], int] = {}
    """Peer and number of a call that ended after its request was handled -> its end."""
    pieces: dict[int, list[Piece]] = {}
    """Thread -> its pieces, without gaps from the beginning of the window to its last event."""


class _Frame(msgspec.Struct):
    kind: str
    name: str
    begin: int
    details: dict[str, Any]


def replay(threads: list[Thread], worker: str, begin: int, end: int, home_thread: int | None = None) -> Told:
    """What the threads of a worker did. On its ``home_thread``, all time without other activity is user code."""
    told = Told(worker)
    for thread in threads:
        _Replay(told, thread, COMPUTE if thread.native == home_thread else IDLE).run(begin, end)
    return told


class _Replay:
    def __init__(self, told: Told, thread: Thread, base: str) -> None:
        self._told = told
        self._thread = thread
        self._base = base
        self._base_name = "the block" if base == COMPUTE else ""
        self._stack: list[_Frame] = []
        self._opened = 0
        """Gates that have opened before their wait ended."""
        self._issued: Request | None = None
        self._answered: Span | None = None

    def run(self, begin: int, end: int) -> None:
        pieces = self._told.pieces.setdefault(self._thread.native, [])
        before: Moment | None = None
        for moment in self._thread.moments:
            if before is None and moment.at > begin:
                pieces.append(Piece(begin, moment.at, self._base, self._base_name, 0, moment))
            elif before is not None and moment.at > before.at:
                state, what = self._state(type(before.event), type(moment.event))
                computed = max(0, moment.processor - before.processor)
                pieces.append(Piece(before.at, moment.at, state, what, computed, moment))
            self._apply(moment, moment if before is None else before)
            before = moment
        while self._stack:
            self._close(max(end, self._stack[-1].begin), unfinished=True)

    def _state(self, before: type[Event], after: type[Event]) -> tuple[str, str]:
        if (before in _WORK_BEGINS and after in _WORK_ENDS) or (before, after) in _ALSO_WORK:
            return WIRE, "Backhaul"
        if not self._stack:
            return self._base, self._base_name
        top = self._stack[-1]
        state = GATES if top.details.get("gate") else STATES[top.kind]
        return state, "Backhaul" if state == WIRE else top.name

    def _open(self, kind: str, name: str, at: int, **details: Any) -> None:
        self._stack.append(_Frame(kind, name, at, details))

    def _close(self, at: int, **details: Any) -> Span:
        frame = self._stack.pop()
        thread = self._thread
        span = Span(thread.worker, thread.native, frame.kind, frame.name, frame.begin, at, {**frame.details, **details})
        if not frame.details.get("gate"):  # the gate's span says the same
            self._told.spans.append(span)
        return span

    def _close_to(self, kind: str, at: int, **details: Any) -> Span | None:
        """Close the innermost span of a kind, and all inside. None if none is open: it began before the window."""
        if not any(frame.kind == kind for frame in self._stack):
            return None
        while self._stack[-1].kind != kind:
            self._close(at)
        return self._close(at, **details)

    def _apply(self, moment: Moment, before: Moment) -> None:
        event: Any = moment.event
        at = moment.at
        match event:
            case Issued():
                request = Request(
                    self._thread.worker, event.peer, event.call, event.what, event.is_call, self._thread.native, at
                )
                self._issued = request
                self._told.requests.append(request)
            case Settled():
                self._told.settled[event.call] = Outcome(before.at, at, self._thread.native, event.failed)
            case Sent():
                self._sent(event, at, before.at)
            case Began() | Starts():
                if event.peer or isinstance(event, Began):
                    self._open(SERVE, event.kind, at, peer=event.peer, message=event.kind, call=event.call)
                else:
                    self._open(SERVE, "callbacks", at)
            case Ended():
                self._answered = self._close_to(SERVE, at, failed=event.failed)
                self._add_reply(self._answered, before.at, at, late=not event.replies)
            case Stops():
                if event.began:
                    self._add_reply(self._close_to(SERVE, at), before.at, at, late=not event.replies)
            case FinishedLate():
                self._told.late[event.peer, event.call] = at
            case Invoked():
                if self._stack and self._stack[-1].kind == SERVE:
                    self._stack[-1].name = f"serve {event.what}"
                    self._stack[-1].details["what"] = event.what
                self._open(FUNCTION, event.what, at)
            case Returned():
                self._close_to(FUNCTION, at, failed=event.failed)
            case Encoded():
                # The reply of a request that is handled asynchronously leaves before its span ends.
                if self._stack and self._stack[-1].kind == SERVE:
                    self._stack[-1].details["encoded"] = [before.at, at]
            case Waits():
                self._open(WAIT, "wait", at, call=moment.call, gate=self._in_gate())
            case Resumes():
                self._resume(at)
            case GateWaits():
                self._open(GATE, "gate", at, backward=event.backward, source=event.source)
            case GateOpens():
                gate = self._close_to(GATE, at)
                if gate is not None:
                    self._opened += 1
                    self._add(OPENS, "gate opens", max(before.at, gate.begin) + 1, at, dict(gate.details))
            case PassBegan():
                self._open(PASS, "backward", at, context=event.context, backward=event.backward)
            case PassEnded():
                self._close_to(PASS, at, failed=event.failed)
            case RunBegan():
                self._open(RUN, "run", at, backward=event.backward, sources=list(event.sources))
            case RunEnded():
                self._close_to(RUN, at)
            case TorchBegan():
                self._open(ENGINE, "torch's engine", at, backward=event.backward)
            case TorchEnded():
                self._close_to(ENGINE, at)
            case GradientsSent():
                self._open(
                    GRADIENTS,
                    f"gradients to {event.peer}",
                    at,
                    backward=event.backward,
                    peer=event.peer,
                    sources=list(event.sources),
                )
            case GradientsCame():
                if self._stack and self._stack[-1].kind == SERVE:
                    self._stack[-1].details.update(backward=event.backward, sources=list(event.sources), came=at)
            case _:
                pass

    def _add_reply(self, execution: Span | None, since: int, at: int, *, late: bool) -> None:
        """Add the last part of an execution, which sends the reply; unless the reply was sent earlier.

        ``late``: there is no reply at the end.
        """
        if execution is None or not execution.details.get("call"):
            return
        encoded = execution.details.pop("encoded", None)
        sent = execution.details.pop("sent", None)
        if late and sent is None:
            return
        since, at = (sent or (since, at)) if late else (encoded or (since, at))
        self._add(REPLY, "reply", max(since, execution.begin) + 1, at, dict(execution.details))

    def _add(self, kind: str, name: str, begin: int, end: int, details: dict[str, Any]) -> None:
        self._told.spans.append(Span(self._thread.worker, self._thread.native, kind, name, begin, end, details))

    def _in_gate(self) -> bool:
        return bool(self._stack) and self._stack[-1].kind == GATE

    def _resume(self, at: int) -> None:
        if self._opened:  # its gate has opened, which ended the wait
            self._opened -= 1
            return
        wait = self._close_to(WAIT, at)
        if wait is not None and wait.details["gate"]:
            self._close_to(GATE, at, failed=True)

    def _sent(self, event: Any, at: int, before: int) -> None:
        if self._stack and self._stack[-1].kind == SERVE and event.replies:
            # The owner of a new reference first confirms the reference, then makes its value.
            self._stack[-1].details.setdefault("sent", [before, at])
        if self._stack and self._stack[-1].kind == GRADIENTS:
            self._close(at, bytes=event.size)
        elif event.replies:
            if self._answered is not None and event.peer == self._answered.details.get("peer"):
                self._answered.details["reply_bytes"] = event.size
            self._answered = None
        elif self._issued is not None and self._issued.peer == event.peer:
            self._issued.size = event.size
            self._issued = None
