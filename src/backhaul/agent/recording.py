"""Recording: what the layer of autograd is told about messages, so that gradients can go back along them.

The agent moves messages and does not know what a gradient is. It shows the tensors of each request and
reply to these, on the way out and on the way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from backhaul.ids import WorkerInfo
from backhaul.wire.messages import Mark

Tensors = Sequence[torch.Tensor]


class Recording(Protocol):
    """See `autograd.recording`. All methods are quick, thread-safe, and call no peer."""

    def asking(self, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        """A request with these tensors leaves the calling thread: its mark, and the tensors to send."""

    def answering(self, asked: Mark, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        """The reply to a request with the mark ``asked`` leaves: its mark, and the tensors to send."""

    def received(self, mark: Mark, tensors: Tensors, sender: WorkerInfo) -> Tensors:
        """A message with recorded tensors has come: what to hand to the user in their place."""

    def leaving(self, tensors: Tensors) -> Mark | None:
        """The reply to a request without a mark leaves: a mark, if it leaves the history of tensors behind."""

    def enter(self, mark: Mark, sender: WorkerInfo) -> None:
        """The calling thread is about to run a request with this mark."""


class NoRecording:
    """For an agent without autograd."""

    def asking(self, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        return None, tensors

    def answering(self, asked: Mark, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        return None, tensors

    def received(self, mark: Mark, tensors: Tensors, sender: WorkerInfo) -> Tensors:
        return tensors

    def leaving(self, tensors: Tensors) -> Mark | None:
        return None

    def enter(self, mark: Mark, sender: WorkerInfo) -> None: ...
