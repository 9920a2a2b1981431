"""on_cpu: for state that travels without a device map, so its tensors are copied to the CPU first."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def on_cpu(value: Any) -> Any:
    """The value with all tensors on the CPU. Tensors that are already there are not copied."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return value
    return tree_map_only(torch.Tensor, lambda tensor: tensor.cpu() if tensor.is_cuda else tensor, value)
