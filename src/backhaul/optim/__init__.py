"""Optimizers over parameters that live on any workers.

::

    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model), lr=0.001)
    with dist_autograd.context() as context_id:
        loss = model(x).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
"""

from __future__ import annotations

from backhaul.optim.distributed import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
