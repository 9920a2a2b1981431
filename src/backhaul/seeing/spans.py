"""OpenTelemetry spans for the calls and passes of this worker. Needs ``pip install 'backhaul[tracing]'``.

``RpcOptions(tracing=True)`` does the same from the start. Enable tracing on every worker that should have spans: the
trace context travels with each call, and a worker that does not trace ignores it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backhaul.worker import current

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def enable(provider: TracerProvider | None = None) -> Callable[[], None]:
    """Trace the current worker until its shutdown; returns a function that ends the tracing.

    ``provider`` is `opentelemetry.trace.get_tracer_provider()` by default. Raises `MisuseError` if
    opentelemetry-api is not installed, or the worker is already traced.
    """
    return current().inspection.trace(provider)


__all__ = ["enable"]
