"""OpenTelemetry spans for the calls and passes of this worker. Needs ``pip install 'backhaul[tracing]'``.

``RpcOptions(tracing=True)`` does the same from the start. Do it on every worker that is to have spans: the context of a
call travels with it, and a worker that does not trace ignores it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backhaul.worker import current

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


def enable(provider: TracerProvider | None = None) -> Callable[[], None]:
    """Trace the current worker until its shutdown; returns a function that ends this.

    ``provider`` is the one of `opentelemetry.trace.get_tracer_provider` unless given. Raises `MisuseError` if
    opentelemetry-api is not installed, or the worker is traced already.
    """
    return current().inspection.trace(provider)


__all__ = ["enable"]
