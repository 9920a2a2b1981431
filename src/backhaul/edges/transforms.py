"""Clip and GaussianNoise: Clip bounds how much one row can change a tensor, and the noise hides what is left.

The noise comes from the operating system's randomness, not from a generator of torch. Torch's generator has a seed of
32 bits on the CPU, and a peer that knows some of its numbers can compute all others.
"""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Literal

import torch

from backhaul.edges.edge import Transform
from backhaul.errors import OptionError

_log = logging.getLogger(__name__)

_SMALLEST = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_PIECE = 1 << 20
_BITS = 53


class Clip(Transform):
    """Scales each row whose 2-norm is larger than ``norm`` down to ``norm``.

    A row is all that belongs to one index of the first dimension: an example of a batch. ``per="tensor"`` takes the
    whole tensor as one row, as ``torch.nn.utils.clip_grad_norm_`` does with one gradient. Gradients go through the
    scaling, as if it were part of the model.

    A row that is not finite is sent as zeros, and logged, since neither a bound nor noise would work for it.
    """

    def __init__(self, norm: float, *, per: Literal["row", "tensor"] = "row") -> None:
        self.norm: float = positive("Clip", "norm", norm)
        if per not in ("row", "tensor"):
            raise OptionError(f"Clip: per={per!r} must be 'row' or 'tensor'")
        self.per = per

    def __repr__(self) -> str:
        return f"Clip({self.norm:g}, per={self.per!r})"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return tensor
        rows = tensor.reshape(len(tensor) if self.per == "row" and tensor.dim() else 1, -1)
        finite = rows.detach().isfinite().all(dim=1, keepdim=True)
        if not finite.all():
            _warn(int((~finite).sum()))
            rows = torch.where(finite, rows, 0.0)
        norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        return (rows * torch.clamp(self.norm / (norms + _SMALLEST), max=1.0)).reshape(tensor.shape)


_warned = -math.inf  # global to the process, like its log


def _warn(rows: int) -> None:
    """Log a warning, at most once in a second, because a peer may cause such rows."""
    global _warned
    now = time.monotonic()
    recently, _warned = now - _warned < 1.0, now
    if not recently:
        _log.warning("%s rows that leave over an edge are not finite; they are sent as zeros", rows)


class GaussianNoise(Transform):
    """Adds independent noise of the normal distribution to each number.

    - ``multiplier``: the standard deviation, as a multiple of the norm of the `Clip` right before it. Then
      `backhaul.federation.epsilon` computes how much privacy the noise gives.
    - ``std``: the standard deviation itself, for noise without a `Clip`.
    - ``releases``: how many tensors may be sent to each peer; after that, `QuotaError`. A peer that gets the same rows
      many times can average the noise away.
    - ``generator``: a torch generator, for repeatable experiments. It is not safe: see the module's docstring.

    The noise does not change gradients.
    """

    def __init__(
        self,
        multiplier: float | None = None,
        *,
        std: float | None = None,
        releases: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if (multiplier is None) == (std is None):
            raise OptionError("GaussianNoise: give a multiplier, for noise after a Clip, or std")
        self.multiplier = None if multiplier is None else positive("GaussianNoise", "multiplier", multiplier)
        self.std = None if std is None else positive("GaussianNoise", "std", std)
        if releases is not None and (isinstance(releases, bool) or not isinstance(releases, int) or releases < 1):
            raise OptionError(f"GaussianNoise: releases={releases!r} must be a whole number of at least 1, or None")
        self.releases = releases
        self.generator = generator

    def __repr__(self) -> str:
        how = f"{self.multiplier:g}" if self.multiplier is not None else f"std={self.std:g}"
        return f"GaussianNoise({how})"

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.std is None:
            raise OptionError("GaussianNoise(multiplier) works only in a chain, after a Clip: give std to use it alone")
        return self.add(tensor, self.std)

    def add(self, tensor: torch.Tensor, std: float) -> torch.Tensor:
        """The tensor plus noise of standard deviation ``std``."""
        if self.generator is not None:
            noise = torch.randn(tensor.shape, generator=self.generator, dtype=torch.float64)
        else:
            noise = gaussian(tensor.numel()).reshape(tensor.shape)
        return tensor + (noise * std).to(tensor.dtype).to(tensor.device)


def gaussian(count: int) -> torch.Tensor:
    """Numbers of the standard normal distribution, in float64, from the operating system's randomness."""
    pieces = [_box_muller(min(_PIECE, count - start)) for start in range(0, count, _PIECE)]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.float64)


def _box_muller(count: int) -> torch.Tensor:
    pairs = (count + 1) // 2
    words = torch.frombuffer(bytearray(os.urandom(16 * pairs)), dtype=torch.int64)
    uniform = ((words >> (64 - _BITS)) & ((1 << _BITS) - 1)).double().add_(0.5).mul_(2.0**-_BITS)  # above 0
    radius, angle = uniform[:pairs].log_().mul_(-2).sqrt_(), uniform[pairs:].mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def positive(what: str, name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{what}: {name}={value!r} must be a positive number")
    return float(value)
