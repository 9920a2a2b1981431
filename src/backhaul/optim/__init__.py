"""Optimizers of parameters on any workers.

::

    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model), lr=0.001)
    with dist_autograd.context() as context_id:
        loss = model(x).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
"""

from __future__ import annotations

from backhaul.optim.clipping import clip_grad_norm_
from backhaul.optim.distributed import DistributedOptimizer
from backhaul.optim.scaler import GradScaler

__all__ = ["DistributedOptimizer", "GradScaler", "clip_grad_norm_"]
