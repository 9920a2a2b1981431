"""The contents of ``torch.distributed.rpc._testing``: a backend that loses and delays messages."""

from __future__ import annotations

from backhaul.dropin.rpc._testing import faulty_agent_backend_registry
from backhaul.dropin.rpc._testing.faulty_agent_backend_registry import (
    FaultyTensorPipeAgent,
    FaultyTensorPipeRpcBackendOptions,
)

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]


def is_available() -> bool:
    return True
