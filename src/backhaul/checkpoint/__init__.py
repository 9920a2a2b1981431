"""Checkpoints of models and optimizers spread over workers: saved in one call, loaded onto any placement.

::

    checkpoint.save({"model": model, "optimizer": optimizer, "epoch": epoch}, "run/last")
    values = checkpoint.load("run/last", {"model": model, "optimizer": optimizer})
    values["epoch"]

`Resume` runs training steps, saves checkpoints, and continues when workers are lost.
"""

from __future__ import annotations

from backhaul.checkpoint.loading import load, read
from backhaul.checkpoint.resuming import Resume
from backhaul.checkpoint.saving import save

__all__ = ["Resume", "load", "read", "save"]
