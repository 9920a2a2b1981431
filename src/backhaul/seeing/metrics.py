"""Metrics of this worker for Prometheus. Needs ``pip install 'backhaul[metrics]'``.

The option ``metrics_port`` and ``backhaul run --metrics-port`` start the same server. docs/seeing.md lists the
metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from backhaul.inspection import metrics
from backhaul.inspection.metrics import LOOPBACK, Exposition
from backhaul.worker import current

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


def start(port: int, host: str = LOOPBACK, registry: CollectorRegistry | None = None) -> Exposition:
    """Serve the metrics of the current worker at ``http://host:port/metrics`` until its shutdown.

    ``port`` 0 means any free port; ``.port`` of the result has its number. ``.close()`` ends the server. ``host`` must
    be loopback. ``registry`` is `prometheus_client.REGISTRY` by default.

    Raises `OptionError` if the port is taken, and `MisuseError` if `prometheus_client` is not installed.
    """
    return current().inspection.expose(port, host, registry)


def register(registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Add the current worker's metrics to a registry that you serve yourself; returns a function to remove them.

    The worker's shutdown removes them too.
    """
    inspection = current().inspection
    end = metrics.register(inspection, registry)
    inspection.when_closed.append(end)
    return end


__all__ = ["Exposition", "register", "start"]
