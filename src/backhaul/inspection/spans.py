"""Spans: calls and backward passes as OpenTelemetry spans that reach from worker to worker.

    worker0   call train_step (CLIENT) ────────────────────────────┐      backward (INTERNAL)
    worker1     └─ train_step (SERVER) ──┐                         │        ├─ run (INTERNAL)
    worker2          └─ … a call of its own                        │        └─ run, on another worker

The mark of a span, the ``traceparent`` of W3C Trace Context, travels in the frame of a call and in the frames that
carry gradients. A worker that does not trace ignores it. In a federation, a peer may not extend the traces of
others: the span of its request begins a new trace, and only links to the peer's span.

Only `opentelemetry-api` is needed, and it is imported when tracing begins. The program's own SDK decides what happens
to the spans.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backhaul.agent.agent import Agent
from backhaul.agent.execution import follow
from backhaul.agent.naming import short_name
from backhaul.agent.observing import Event, GateOpens, GateWaits, PassBegan, PassEnded, RunBegan, RunEnded
from backhaul.errors import MisuseError
from backhaul.ids import WorkerInfo
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame, with_trace
from backhaul.wire.messages import Gradients

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, TracerProvider

_LONGEST = 64  # a traceparent has 55 characters
_MOST_PASSES = 1024
_PARENT = "traceparent"
_NAME = "backhaul"


class Spans:
    """Traces one worker. Thread-safe. It is also an observer."""

    def __init__(self, agent: Agent, provider: TracerProvider | None = None) -> None:
        """Raises `MisuseError` if opentelemetry-api is not installed."""
        try:
            from opentelemetry import context, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MisuseError("tracing needs opentelemetry-api: pip install 'backhaul[tracing]'") from error
        self._api = trace
        self._contexts = context
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer(_NAME, tracer_provider=provider)
        self._agent = agent
        self._believes = agent.trust.believes
        self._lock = threading.Lock()
        # All guarded by _lock:
        self._marks: OrderedDict[int, str] = OrderedDict()  # by pass
        self._passes: dict[int, Span] = {}  # those that were started here
        self._runs: dict[int, list[Span]] = {}  # by thread, the innermost last
        agent.execution.tracing = self
        self._forget = agent.observers.add(self._observe)
        self._release = agent.intercept(Gradients, self._on_gradients)

    def close(self) -> None:
        """End the tracing."""
        self._agent.execution.tracing = None
        self._forget()
        self._release()

    # Calls that this worker makes.

    def begin(self, what: str, to: object) -> _Call:
        what = short_name(what)
        attributes = self._attributes(str(getattr(to, "name", to)), what)
        span = self._tracer.start_span(what, kind=self._api.SpanKind.CLIENT, attributes=attributes)
        token = self._contexts.attach(self._api.set_span_in_context(span))
        return _Call(span, lambda: self._contexts.detach(token), self._note)

    def attach(self, frame: Frame) -> Frame:
        mark = self._mark(None)
        return frame if mark is None else with_trace(frame, mark)

    def attach_pass(self, frame: Frame, message: Any) -> Frame:
        if type(message) is not Gradients:
            return frame
        with self._lock:
            mark = self._marks.get(message.backward.id)
        return frame if mark is None else with_trace(frame, mark)

    def _mark(self, context: Context | None) -> str | None:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context)
        return carrier.get(_PARENT)

    def _attributes(self, peer: str, what: str) -> dict[str, str]:
        return {
            "rpc.system": _NAME,
            "rpc.method": what,
            "backhaul.worker": self._agent.me.name,
            "backhaul.peer": peer,
        }

    def _note(self, span: Span, error: BaseException) -> None:
        if span.is_recording():
            span.record_exception(error)
            span.set_status(self._api.StatusCode.ERROR, f"{type(error).__qualname__}: {error}")

    # Calls that this worker serves.

    def serve(self, run: Callable[[], tuple[Any, bool]], what: str, envelope: Envelope, sender: WorkerInfo) -> Any:
        parent, links = self._origin(envelope.trace)
        what = short_name(what, envelope.message)
        span = self._tracer.start_span(
            what,
            context=parent,
            kind=self._api.SpanKind.SERVER,
            attributes=self._attributes(sender.name, what),
            links=links,
        )
        self._contexts.attach(self._api.set_span_in_context(span))  # the context ends with this request
        try:
            value, later = run()
        except BaseException as error:
            self._note(span, error)
            span.end()
            raise
        if later:
            follow(value, lambda done: self._end_late(span, done))
        else:
            span.end()
        return value, later

    def _end_late(self, span: Span, done: Any) -> None:
        try:
            done.value()
        except BaseException as error:  # the caller receives the error
            self._note(span, error)
        span.end()

    def _origin(self, mark: str) -> tuple[Context, list[Any]]:
        """The place of a peer request's span: its parent, and its links."""
        nowhere = self._contexts.Context()
        remote = self._context_of(mark)
        if remote is None:
            return nowhere, []
        if not self._believes:
            return nowhere, [self._api.Link(remote)]
        return self._api.set_span_in_context(self._api.NonRecordingSpan(remote), nowhere), []

    def _context_of(self, mark: str) -> SpanContext | None:
        """The span that a mark names, if the mark is valid."""
        if not mark or len(mark) > _LONGEST:
            return None
        found = self._propagator.extract({_PARENT: mark}, self._contexts.Context())
        context = self._api.get_current_span(found).get_span_context()
        return context if context.is_valid else None

    # Passes.

    def _on_gradients(self, envelope: Envelope) -> None:
        if envelope.trace and len(envelope.trace) <= _LONGEST:
            self._remember(envelope.message.backward.id, envelope.trace)

    def _remember(self, backward: int, mark: str | None) -> None:
        with self._lock:
            if mark is not None and backward not in self._marks:
                self._marks[backward] = mark
                if len(self._marks) > _MOST_PASSES:
                    self._marks.popitem(last=False)

    def _observe(self, event: Event) -> None:
        act = _ACTS.get(type(event))
        if act is not None:
            act(self, event)

    def _on_pass_began(self, event: PassBegan) -> None:
        attributes = self._pass_attributes(event)
        span = self._tracer.start_span("backward", attributes=attributes)
        with self._lock:
            self._passes[event.backward] = span
        self._remember(event.backward, self._mark(self._api.set_span_in_context(span)))

    def _on_pass_ended(self, event: PassEnded) -> None:
        with self._lock:
            span = self._passes.pop(event.backward, None)
            self._marks.pop(event.backward, None)
        if span is not None:
            if event.failed:
                span.set_status(self._api.StatusCode.ERROR, "the pass failed")
            span.end()

    def _on_run_began(self, event: RunBegan) -> None:
        with self._lock:
            mark = self._marks.get(event.backward, "")
        parent, links = self._origin(mark)
        attributes = {**self._pass_attributes(event), "backhaul.sources": len(event.sources)}
        span = self._tracer.start_span("run", context=parent, attributes=attributes, links=links)
        with self._lock:
            self._runs.setdefault(event.thread, []).append(span)

    def _on_run_ended(self, event: RunEnded) -> None:
        with self._lock:
            runs = self._runs.get(event.thread)
            span = runs.pop() if runs else None
            if runs is not None and not runs:
                del self._runs[event.thread]
        if span is not None:
            span.end()

    def _on_gate(self, event: GateWaits | GateOpens) -> None:
        with self._lock:
            runs = self._runs.get(event.thread)
            span = runs[-1] if runs else None
        if span is not None:
            what = "waits at a gate" if type(event) is GateWaits else "the gate opens"
            span.add_event(what, {"backhaul.source": event.source})

    def _pass_attributes(self, event: PassBegan | RunBegan) -> dict[str, str | int]:
        return {
            "backhaul.worker": self._agent.me.name,
            "backhaul.context": event.context,
            "backhaul.pass": event.backward,
        }


class _Call:
    """See `agent.tracing.Span`."""

    __slots__ = ("_leave", "_note", "_span")

    def __init__(self, span: Span, leave: Callable[[], None], note: Callable[[Span, BaseException], None]) -> None:
        self._span = span
        self._leave = leave
        self._note = note

    def fail(self, error: BaseException) -> None:
        self._note(self._span, error)

    def end(self) -> None:
        self._leave()
        self._span.end()

    def end_with(self, future: Any) -> None:
        self._leave()
        span, note = self._span, self._note

        def end(done: Any) -> None:
            try:
                done.value()
            except BaseException as error:  # the waiting thread receives the error
                note(span, error)
            span.end()

        follow(future, end)


_ACTS: dict[type[Event], Callable[[Spans, Any], None]] = {
    PassBegan: Spans._on_pass_began,
    PassEnded: Spans._on_pass_ended,
    RunBegan: Spans._on_run_began,
    RunEnded: Spans._on_run_ended,
    GateWaits: Spans._on_gate,
    GateOpens: Spans._on_gate,
}
