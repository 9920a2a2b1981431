"""Compiled functions, which a caller sends by name. To define them imports torch's compiler, which takes seconds."""

from __future__ import annotations

import torch


def scaled_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2


compiled_sine = torch.compile(scaled_sine, backend="aot_eager")


@torch.compile(backend="aot_eager")
def decorated_sine(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) * 2
