"""The contents of ``torch.distributed.optim.optimizer``."""

from __future__ import annotations

from backhaul.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
