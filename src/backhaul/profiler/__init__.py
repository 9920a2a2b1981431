"""Profiler: one profile over all workers of a cluster: `profile`."""

from __future__ import annotations

from backhaul.profiler.block import profile

__all__ = ["profile"]
