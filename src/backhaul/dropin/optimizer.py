"""What ``torch.distributed.optim.optimizer`` has."""

from __future__ import annotations

from backhaul.optim import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
