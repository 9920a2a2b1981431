"""``cluster(n)``: worker processes on this machine, driven from one script or notebook.

``import backhaul`` imports this module, so it imports neither torch nor the code that starts processes: a worker
started in another way needs neither.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from backhaul.errors import OptionError

if TYPE_CHECKING:
    from backhaul.cluster.processes import Cluster, LocalWorker
    from backhaul.options import RpcOptions

__all__ = ["Cluster", "LocalWorker", "cluster"]

START_SECONDS = 60.0


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("backhaul.cluster.processes"), name)
    raise AttributeError(f"module 'backhaul.cluster' has no attribute {name!r}")


def cluster(
    n: int,
    *,
    name: str = "driver",
    names: Sequence[str] | None = None,
    options: RpcOptions | None = None,
    timeout: float = START_SECONDS,
    env: Mapping[str, str] | None = None,
    output: bool = True,
) -> Cluster:
    """Start ``n`` worker processes on this machine; this process becomes the driver, with rank 0.

    Use it as ``with backhaul.cluster(2) as workers:``, or call `Cluster.close` at the end, as in a
    notebook. The workers' names are ``worker1``, ``worker2``, …, or those in ``names``. ``env`` is
    added to their environment. Their output appears here with their names in front,
    unless ``output`` is False. Functions and classes of the script or notebook are callable on the workers.

    Raises `WorkerLostError` with the worker's last output if a worker does not start, `RpcTimeoutError`
    if one takes longer than ``timeout`` seconds, `MisuseError` if this process is already a worker.
    """
    from backhaul.cluster.processes import Cluster
    from backhaul.launch.main_module import stop_if_loading
    from backhaul.launch.session import added
    from backhaul.options import RpcOptions

    stop_if_loading()
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError(f"cluster() needs a number of workers, at least 1; got {n!r}")
    names = [f"worker{rank}" for rank in range(1, n + 1)] if names is None else list(names)
    if len(names) != n or len({name, *names}) != n + 1:
        raise OptionError(f"cluster({n}) needs {n} names that differ from each other and from {name!r}; got {names}")
    options = RpcOptions() if options is None else options
    if options.init_method != RpcOptions().init_method:
        raise OptionError("cluster() decides where its workers meet: leave out the option init_method")
    if not options.policy.is_one_user:
        raise OptionError(
            'cluster() starts workers of one user, which trust each other: trust="federation" is for parties that '
            "each start their own workers, with init_rpc"
        )
    return Cluster(name, names, options, timeout, added(env), output)
