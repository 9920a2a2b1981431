"""The contents of ``torch.distributed.rpc.functions``."""

from __future__ import annotations

from backhaul.functions import async_execution

__all__ = ["async_execution"]
