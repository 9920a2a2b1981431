"""Streams: on which streams of the GPUs a worker's functions run, and which order they can rely on.

A worker has one stream of torch's pool on every GPU that it uses, and all threads that handle its requests use that
stream. So their work runs on the device in the order in which it was enqueued, memory that one thread frees is not
reused before the others are done with it, and a lock orders the work on the device as it orders the threads. A function
that should overlap with others on the device must use its own stream, as in any torch program.

User threads use the streams that the user has chosen. `handover` decides which streams wait for which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from backhaul.devices import driver
from backhaul.devices.handover import Baton, Streams


def on_gpus(value: Any) -> list[torch.Tensor]:
    """The tensors of a value that are on GPUs."""
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor) and each.is_cuda]


def mark(value: Any) -> Callable[[Any], None] | None:
    """Call this after a value was made on the current streams. Returns a function that another thread must call before
    it uses the value; None if the value has no tensors on GPUs.
    """
    tensors = on_gpus(value)
    if not tensors:
        return None
    events = []
    for device in {tensor.device for tensor in tensors}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        events.append((device, event))

    def ready(_: Any) -> None:
        for device, event in events:
            torch.cuda.current_stream(device).wait_event(event)
        use(tensors)

    return ready


def use(tensors: Sequence[torch.Tensor]) -> None:
    """Note that the current streams use these tensors, so that torch does not reuse their memory too early."""
    for tensor in tensors:
        if tensor.is_cuda:
            stream = driver.torch_stream(tensor.get_device())
            if tensor.layout is torch.strided:
                driver.record_use(tensor, stream)
            elif tensor.layout is torch.sparse_coo:
                for part in (tensor._indices(), tensor._values()):
                    driver.record_use(part, stream)


_in_use: set[int] = set()
"""The GPUs that the workers of this process use. What a `Baton` orders may be shared by workers."""


def new_streams(devices: Sequence[int]) -> Streams:
    """The streams of a worker that uses these GPUs."""
    _in_use.update(devices)
    return Streams(devices, driver)


def new_baton() -> Baton:
    """A baton for all GPUs that this process uses."""
    return Baton(driver, _in_use)


@contextmanager
def fresh(devices: Sequence[int]) -> Iterator[None]:
    """A block in which the current stream of each of these GPUs is a new one from torch's pool."""
    before = list(map(driver.current_key, devices))
    driver.make_current(list(map(driver.new_stream, devices)))
    try:
        yield
    finally:
        driver.make_current(before)
