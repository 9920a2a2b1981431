"""What ``torch.distributed.rpc.server_process_global_profiler`` has; it needs the profiling of remote calls."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["_server_process_global_profile"]


class _server_process_global_profile:
    """Not there yet."""

    def __init__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("Backhaul does not profile remote calls yet")
