"""Events of calls for torch's legacy profiler, on the side of the caller."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from backhaul.dropin.rpc.internal import RPCExecMode, _build_rpc_profiling_key
from backhaul.worker import current


def recorded(mode: RPCExecMode, function: str, to: str) -> AbstractContextManager[Any]:
    """A block whose time the profiler records as a call, if it is on. As in torch, only the legacy profiler does."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    if torch._C._autograd._profiler_type() != torch._C._profiler.ActiveProfilerType.LEGACY:
        return nullcontext()
    return torch.autograd.profiler.record_function(_build_rpc_profiling_key(mode, function, current().info.name, to))
