"""Profiler: `profile`, one profile over all workers of a cluster."""

from __future__ import annotations

from backhaul.profiler.block import profile

__all__ = ["profile"]
