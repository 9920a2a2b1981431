"""Backward passes in a profile: the names that torch's own distributed autograd gives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from backhaul.agent.agent import Agent
from backhaul.agent.observing import Event, RunBegan, RunEnded

_SPACE = "torch::distributed::autograd"


@contextmanager
def recorded(agent: Agent) -> Iterator[None]:
    """A block that the profiler of this thread records as a backward pass.

    Inside, each run that gradients of other workers start is also a block: the work of a Send.
    """
    thread = threading.get_ident()
    blocks: list[AbstractContextManager[Any]] = []

    def observe(event: Event) -> None:
        if event.thread != thread:
            return
        if type(event) is RunBegan:
            from_a_send = any(event.sources)  # not from the roots of the pass
            block: AbstractContextManager[Any] = (
                record_function(f"{_SPACE}::SendRpcBackward") if from_a_send else nullcontext()
            )
            block.__enter__()
            blocks.append(block)
        elif type(event) is RunEnded and blocks:
            blocks.pop().__exit__(None, None, None)

    with record_function(f"{_SPACE}::backward"):
        forget = agent.observers.add(observe)
        try:
            yield
        finally:
            forget()
            while blocks:
                blocks.pop().__exit__(None, None, None)
