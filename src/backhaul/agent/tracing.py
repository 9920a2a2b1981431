"""Tracing: how a tracer hears of calls and passes, so that its spans reach from worker to worker.

The agent does not depend on a tracer. While there is one (`Execution.tracing`), the agent has the tracer begin and end
a span around each call, and add its mark to frames. See `inspection.spans`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from backhaul.ids import WorkerInfo
from backhaul.wire.decoder import Envelope
from backhaul.wire.frames import Frame

T = TypeVar("T")


class Span(Protocol):
    """The span of a call that this worker makes."""

    def fail(self, error: BaseException) -> None:
        """Note that the call failed with this error."""

    def end(self) -> None:
        """End the span. Call this on the thread that began it."""

    def end_with(self, future: Any) -> None:
        """End the span when the future is complete. Returns at once."""


def spanning(span: Span, call: Callable[[], T]) -> T:
    """The value of ``call()``. The span ends when the call returns or raises."""
    try:
        return call()
    except BaseException as error:
        span.fail(error)
        raise
    finally:
        span.end()


def spanning_future(span: Span, call: Callable[[], T]) -> T:
    """The future that ``call()`` returns. The span ends when the future is complete."""
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
        """Begin a span for a call on this thread. The caller must end it."""

    def attach(self, frame: Frame) -> Frame:
        """The frame of this thread's current call, with the mark of its span."""

    def attach_pass(self, frame: Frame, message: Any) -> Frame:
        """The frame of a message. If the message is about a pass, the frame gets the mark of that pass."""

    def serve(self, run: Callable[[], tuple[Any, bool]], what: str, envelope: Envelope, sender: WorkerInfo) -> Any:
        """Run a request of a peer in a span, and return what ``run()`` returns.

        ``run()`` returns the value or a future of it, and whether it is a future. The agent calls this method in the
        context in which the function will run.
        """
