"""Recording: how the autograd layer hears of messages, so that gradients can go back along them.

The agent moves messages and does not know what a gradient is. It passes the tensors of each request and reply to these
methods, on the way out and on the way in.
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
        """The mark of a request with these tensors that the calling thread sends, and the tensors to send instead."""

    def answering(self, asked: Mark, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        """The mark of the reply to a request with the mark ``asked``, and the tensors to send instead."""

    def received(self, mark: Mark, tensors: Tensors, sender: WorkerInfo) -> Tensors:
        """The tensors to give to the user instead of the recorded tensors of a message that has come."""

    def leaving(self, tensors: Tensors) -> Mark | None:
        """The mark of the reply to a request without a mark, if its tensors lose their history; otherwise None."""

    def enter(self, mark: Mark, sender: WorkerInfo) -> None:
        """Prepare the calling thread's context to run a request with this mark."""


class NoRecording:
    """The default for an agent without autograd."""

    def asking(self, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        return None, tensors

    def answering(self, asked: Mark, tensors: Tensors, to: WorkerInfo) -> tuple[Mark | None, Tensors]:
        return None, tensors

    def received(self, mark: Mark, tensors: Tensors, sender: WorkerInfo) -> Tensors:
        return tensors

    def leaving(self, tensors: Tensors) -> Mark | None:
        return None

    def enter(self, mark: Mark, sender: WorkerInfo) -> None: ...
