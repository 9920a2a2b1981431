"""Tracing: what a tracer is told about calls and passes, so that its spans reach from worker to worker.

The agent knows no tracer. While there is one (`Execution.tracing`), the agent has it begin and end a span around each
call, and lets it put its mark on frames. See `inspection.spans`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from backhaul.ids import WorkerInfo
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame

T = TypeVar("T")


class Span(Protocol):
    """A call that this worker makes."""

    def fail(self, error: BaseException) -> None:
        """It has failed with that."""

    def end(self) -> None:
        """It is over. On the thread that has begun it."""

    def end_with(self, future: Any) -> None:
        """It is over when the future is complete; the calling thread goes on."""


def spanning(span: Span, call: Callable[[], T]) -> T:
    """The value of a call. Its span ends with it."""
    try:
        return call()
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        span.end()


def spanning_future(span: Span, call: Callable[[], T]) -> T:
    """The future of a call. Its span ends with the future."""
    try:
        future = call()
    except BaseException as error:
        span.fail(error)
        span.end()
        raise
    span.end_with(future)
    return future


class Tracing(Protocol):
    """See `inspection.spans`. Thread-safe."""

    def begin(self, what: str, to: object) -> Span:
        """A call begins on this thread."""

    def attach(self, frame: Frame) -> Frame:
        """The frame of the call that this thread is at, with the mark of its span."""

    def attach_pass(self, frame: Frame, message: Any) -> Frame:
        """The frame of a message, with the mark of its pass, if it is about one."""

    def serve(self, run: Callable[[], tuple[Any, bool]], what: str, envelope: Envelope, sender: WorkerInfo) -> Any:
        """Run a request of a peer. ``run()`` returns the value, and whether it is a future of it.

        It is called in the context that the function will run in.
        """
