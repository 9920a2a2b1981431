"""Spans: one trace over several workers, read back from OpenTelemetry's own exporter."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import MisuseError
from backhaul.options import RpcOptions
from backhaul.seeing import spans
from backhaul.testing import InProcessCluster
from backhaul.trust.exposure import expose
from backhaul.wire import frames
from backhaul.wire.messages import Call, Gradients

PATIENCE = 10.0


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def relay(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, double, (x,))


async def relay_later(to: str, x: torch.Tensor) -> torch.Tensor:
    return await rpc.rpc_async(to, double, (x,))


@rpc.functions.async_execution
def relay_future(to: str, x: torch.Tensor) -> Any:
    return rpc.rpc_async(to, double, (x,))


def fail() -> None:
    raise ValueError("on purpose")


async def fail_later() -> None:
    raise ValueError("on purpose")


def current_span() -> int:
    return trace.get_current_span().get_span_context().span_id


@expose
def exposed(x: int) -> int:
    return x


class Exported(SpanProcessor):
    """The spans of a provider, as they end."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.provider.add_span_processor(self)
        self._ended = threading.Condition()

    def on_end(self, span: ReadableSpan) -> None:
        with self._ended:
            self._ended.notify_all()

    def until(self, count: int) -> list[ReadableSpan]:
        """The ended spans, once there are this many. A server's span may end after the reply."""
        with self._ended:
            self._ended.wait_for(lambda: len(self._exporter.get_finished_spans()) >= count, PATIENCE)
        found = self._exporter.get_finished_spans()
        assert len(found) == count, tree(found)
        return list(found)


def label(span: ReadableSpan) -> str:
    attributes = span.attributes or {}
    return f"{span.name} {span.kind.name.lower()} {attributes['backhaul.worker']}"


def tree(found: Any) -> set[tuple[str, str | None]]:
    """Each span with its parent."""
    by_id = {span.context.span_id: span for span in found}
    return {(label(span), None if span.parent is None else label(by_id[span.parent.span_id])) for span in found}


@pytest.fixture
def exported() -> Iterator[Exported]:
    made = Exported()
    yield made
    made.provider.shutdown()


@pytest.fixture
def traced(pair: InProcessCluster, exported: Exported) -> Iterator[InProcessCluster]:
    for worker in pair:
        with worker.as_current():
            spans.enable(exported.provider)
    with pair[0].as_current():
        yield pair


@pytest.mark.usefixtures("traced")
def test_a_call_has_a_span_at_each_end(exported: Exported) -> None:
    rpc.rpc_sync("worker1", double, (torch.ones(1),))
    found = exported.until(2)
    assert tree(found) == {
        ("double client worker0", None),
        ("double server worker1", "double client worker0"),
    }
    assert len({span.context.trace_id for span in found}) == 1
    server, client = sorted(found, key=lambda span: span.kind is SpanKind.CLIENT)
    assert client.attributes == {
        "rpc.system": "backhaul",
        "rpc.method": "double",
        "backhaul.worker": "worker0",
        "backhaul.peer": "worker1",
    }
    assert server.attributes is not None
    assert server.attributes["backhaul.peer"] == "worker0"
    assert client.start_time <= server.start_time <= server.end_time  # type: ignore[operator]


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("function", [relay, relay_later, relay_future])
def test_nested_calls_are_in_one_trace(exported: Exported, function: Any) -> None:
    rpc.rpc_sync("worker1", function, ("worker0", torch.ones(1)))
    name = function.__name__
    found = exported.until(4)
    assert tree(found) == {
        (f"{name} client worker0", None),
        (f"{name} server worker1", f"{name} client worker0"),
        ("double client worker1", f"{name} server worker1"),
        ("double server worker0", "double client worker1"),
    }
    assert len({span.context.trace_id for span in found}) == 1


@pytest.mark.usefixtures("traced")
def test_a_call_belongs_to_the_span_of_the_program(exported: Exported) -> None:
    tracer = trace.get_tracer("program", tracer_provider=exported.provider)
    with tracer.start_as_current_span("step", attributes={"backhaul.worker": "the program"}):
        future = rpc.rpc_async("worker1", double, (torch.ones(1),))
    future.wait()
    assert tree(exported.until(3)) == {
        ("step internal the program", None),
        ("double client worker0", "step internal the program"),
        ("double server worker1", "double client worker0"),
    }


@pytest.mark.usefixtures("traced")
def test_the_span_of_a_call_is_current_in_its_function_and_nowhere_else(exported: Exported) -> None:
    inside = rpc.rpc_sync("worker1", current_span)
    server = next(span for span in exported.until(2) if span.kind is SpanKind.SERVER)
    assert inside == server.context.span_id
    assert current_span() == 0
    rpc.rpc_async("worker1", current_span).wait()
    assert current_span() == 0


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("function", [fail, fail_later])
@pytest.mark.parametrize("waits", [True, False])
def test_errors_are_recorded_at_both_ends(exported: Exported, function: Any, waits: bool) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("worker1", function) if waits else rpc.rpc_async("worker1", function).wait()
    for span in exported.until(2):
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "ValueError: on purpose"
        (event,) = span.events
        assert event.attributes is not None
        assert event.attributes["exception.type"] == "ValueError"


@pytest.mark.usefixtures("traced")
def test_a_call_that_cannot_be_made_has_failed(exported: Exported) -> None:
    for call in (rpc.rpc_sync, rpc.rpc_async):
        with pytest.raises(rpc.UnknownWorkerError):
            call("nobody", double, (torch.ones(1),))
    assert {span.status.status_code for span in exported.until(2)} == {StatusCode.ERROR}
    assert current_span() == 0


@pytest.mark.usefixtures("traced")
def test_references(exported: Exported) -> None:
    kept = rpc.remote("worker1", double, (torch.ones(1),))
    kept.to_here()
    kept.rpc_sync().sum()
    assert tree(exported.until(5)) == {
        ("double client worker0", None),
        ("double server worker1", "double client worker0"),
        ("to_here client worker0", None),
        ("method sum client worker0", None),
        ("method sum server worker1", "method sum client worker0"),
    }


def run_pass() -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", double, (x,))
        z = rpc.rpc_sync("worker1", double, (y * y,))
        dist_autograd.backward(context, [(z * y).sum()])


@pytest.mark.usefixtures("traced")
def test_a_pass_and_its_runs_on_all_workers(exported: Exported) -> None:
    run_pass()
    found = [span for span in exported.until(9) if span.kind is SpanKind.INTERNAL]
    assert sorted((span.name, (span.attributes or {})["backhaul.worker"]) for span in found) == [
        ("backward", "worker0"),
        ("run", "worker0"),
        ("run", "worker0"),
        ("run", "worker1"),
        ("run", "worker1"),
    ]
    (backward,) = [span for span in found if span.name == "backward"]
    assert {span.parent.span_id for span in found if span.parent is not None} == {backward.context.span_id}
    assert len({span.context.trace_id for span in found}) == 1
    events = [event.name for span in found for event in span.events]
    assert events == ["waits at a gate", "the gate opens"]


def test_a_pass_that_fails(traced: InProcessCluster, exported: Exported) -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", double, (x,))
        y.register_hook(lambda _: fail())
        with pytest.raises(Exception, match="on purpose"):
            dist_autograd.backward(context, [y.sum()])
    (backward,) = [span for span in exported.until(4) if span.name == "backward"]
    assert backward.status.status_code is StatusCode.ERROR


# On and off.


def test_a_worker_that_does_not_trace_ignores_the_mark(pair: InProcessCluster, exported: Exported) -> None:
    with pair[0].as_current():
        end = spans.enable(exported.provider)
        assert rpc.rpc_sync("worker1", relay, ("worker0", torch.ones(1))).tolist() == [2.0]
        # worker1 did not pass the mark on, so its own call begins a new trace.
        assert tree(exported.until(2)) == {("relay client worker0", None), ("double server worker0", None)}
        end()
        rpc.rpc_sync("worker1", double, (torch.ones(1),))
        run_pass()
    exported.until(2)
    assert not pair[0].agent.observers


def test_only_a_worker_that_traces_marks_its_frames(pair: InProcessCluster, exported: Exported) -> None:
    marks: dict[str, list[str]] = {"Call": [], "Gradients": []}
    for message in (Call, Gradients):
        pair[1].agent.intercept(message, lambda envelope: marks[type(envelope.message).__name__].append(envelope.trace))
    with pair[0].as_current():
        run_pass()
        assert marks == {"Call": ["", ""], "Gradients": ["", ""]}
        spans.enable(exported.provider)
        run_pass()
    assert all(marks["Call"][2:] + marks["Gradients"][2:])
    traces = {mark.split("-")[1] for mark in marks["Gradients"][2:]}
    assert len(traces) == 1


def test_a_worker_is_traced_once(traced: InProcessCluster) -> None:
    with pytest.raises(MisuseError, match="worker 'worker0' is already traced"):
        spans.enable()


def test_the_option() -> None:
    with InProcessCluster(2, options=RpcOptions(tracing=True)) as pair:
        assert all(worker.agent.execution.tracing is not None for worker in pair)
        assert pair[0].rpc_sync("worker1", int) == 0
    assert all(worker.agent.execution.tracing is None for worker in pair)


def test_without_opentelemetry() -> None:
    with InProcessCluster(1) as alone, alone[0].as_current(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "opentelemetry", None)
        with pytest.raises(MisuseError, match=r"pip install 'backhaul\[tracing\]'"):
            spans.enable()
        assert alone[0].agent.execution.tracing is None


# A peer's mark.


def test_in_a_federation_a_peer_s_trace_is_only_linked_to(exported: Exported) -> None:
    with InProcessCluster(2, options=RpcOptions(trust="federation")) as pair:
        for worker in pair:
            worker.inspection.trace(exported.provider)
        assert pair[0].rpc_sync("worker1", exposed, (3,)) == 3
        found = exported.until(2)
    server, client = sorted(found, key=lambda span: span.kind is SpanKind.CLIENT)
    assert server.parent is None
    assert server.context.trace_id != client.context.trace_id
    (link,) = server.links
    assert link.context.span_id == client.context.span_id


@pytest.mark.parametrize(
    "mark",
    ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "f" * 255, "00-" + "z" * 32 + "-" + "a" * 16 + "-01"],
)
def test_an_invalid_mark_begins_a_new_trace(
    traced: InProcessCluster, exported: Exported, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracing = traced[0].agent.execution.tracing
    monkeypatch.setattr(tracing, "attach", lambda frame: frames.with_trace(frame, mark))
    rpc.rpc_sync("worker1", double, (torch.ones(1),))
    assert tree(exported.until(2)) == {("double client worker0", None), ("double server worker1", None)}
