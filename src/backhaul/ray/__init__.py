"""Workers on a Ray cluster.

``cluster(n)`` starts one actor for each worker, and ends the actors with its block. ``group(n)`` and
``init_rpc(group=...)`` make workers of existing actors, such as those of Ray Train. Ray starts the processes and
knows when they end; calls use Backhaul's own connections. Needs Ray: ``pip install 'backhaul[ray]'``.
"""

from __future__ import annotations

try:
    from ray import is_initialized as _is_initialized  # noqa: F401 an unrelated package `ray` does not have it
except ImportError as error:
    raise ImportError(
        "backhaul.ray needs Ray 2.40 or later, on this machine and on all nodes: pip install 'backhaul[ray]'",
        name="ray",
    ) from error

from backhaul.ray.driving import RayCluster, RayWorker, cluster
from backhaul.ray.joining import Group, group, init_rpc

__all__ = ["Group", "RayCluster", "RayWorker", "cluster", "group", "init_rpc"]
