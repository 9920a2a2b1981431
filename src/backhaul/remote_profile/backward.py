"""Backward passes in a profile: the names that torch's own distributed autograd gives them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.autograd.profiler import record_function

from backhaul.agent.agent import Agent
from backhaul.agent.observing import Event, PassBegan, RunBegan, RunEnded
from backhaul.remote_profile.profilers import watching
from backhaul.remote_profile.rows import PassSpan


@contextmanager
def recorded(agent: Agent) -> Iterator[None]:
    """A block that the profiler of this thread records as a backward pass.

    Inside, each run that gradients of other workers start is also a block: the work of a Send. If another thread of
    this worker makes such a run, it is inserted when the profile is read.
    """
    thread = threading.get_ident()
    blocks: list[AbstractContextManager[Any]] = []
    span = PassSpan(agent.me)
    backward = 0
    elsewhere: dict[tuple[int, tuple[int, ...]], int] = {}  # thread and sources of a run -> when it began

    def observe(event: Event) -> None:
        nonlocal backward
        if event.thread != thread:
            if type(event) is RunBegan and event.backward == backward:
                elsewhere[event.thread, event.sources] = event.at
            elif type(event) is RunEnded and event.backward == backward:
                began = elsewhere.pop((event.thread, event.sources), 0)
                if began:
                    span.runs.append((event.thread, began, event.at))
        elif type(event) is PassBegan:
            backward = backward or event.backward
        elif type(event) is RunBegan:
            from_a_send = any(event.sources)  # not from the roots of the pass
            block: AbstractContextManager[Any] = record_function(PassSpan.RUN) if from_a_send else nullcontext()
            block.__enter__()
            blocks.append(block)
        elif type(event) is RunEnded and blocks:
            blocks.pop().__exit__(None, None, None)

    with record_function(PassSpan.PASS):
        span.began = time.perf_counter_ns()
        for spans in watching()[0]:
            spans[-1 - len(spans)] = span  # no label names a number below zero
        forget = agent.observers.add(observe)
        try:
            yield
        finally:
            forget()
            while blocks:
                blocks.pop().__exit__(None, None, None)
