"""Profiler events for calls made under torch's names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from backhaul.dropin.rpc.internal import RPCExecMode, _build_rpc_profiling_key
from backhaul.worker import current


def recorded(mode: RPCExecMode, function: str, to: str) -> AbstractContextManager[Any]:
    """A block whose time an active profiler records as a call."""
    if not torch.autograd._profiler_enabled():
        return nullcontext()
    return torch.autograd.profiler.record_function(_build_rpc_profiling_key(mode, function, current().info.name, to))
