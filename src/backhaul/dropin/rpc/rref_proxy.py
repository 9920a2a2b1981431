"""The contents of ``torch.distributed.rpc.rref_proxy``."""

from __future__ import annotations

from backhaul.dropin.rpc.rrefs import RRefProxy

__all__ = ["RRefProxy"]
