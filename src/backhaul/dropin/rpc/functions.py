"""What ``torch.distributed.rpc.functions`` has."""

from __future__ import annotations

from backhaul.functions import async_execution

__all__ = ["async_execution"]
