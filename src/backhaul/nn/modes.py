"""Modes: grad mode and autocast of the calling thread, which travel with a call to the worker that computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

_AUTOCAST = ("cpu", "cuda")


class Modes(NamedTuple):
    """Grad mode, and the autocast dtype of each device type for which autocast is on."""

    grad: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @classmethod
    def here(cls) -> Modes:
        """The modes of the calling thread. Inference mode counts as no grad."""
        found = tuple((kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCAST if torch.is_autocast_enabled(kind))
        return cls(torch.is_grad_enabled(), found)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.set_grad_enabled(self.grad), ExitStack() as stack:
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            yield
