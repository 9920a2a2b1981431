"""Opening a segment: on which device, in which order, and what remains if a step fails.

No GPU is needed: a fake takes the calls of torch and of the driver. The thread that opens a segment on trial reads
messages, and may never have used a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from backhaul.devices import pages
from backhaul.devices.driver import DriverError
from backhaul.errors import BackhaulError

SIZE = 2 << 20


class Cuda:
    """Torch's and the driver's calls on a machine with two GPUs, in a thread on which no context is current."""

    def __init__(self) -> None:
        self.device = 0
        self.context: int | None = None
        self.calls: list[str] = []
        self.failing = ""

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.failing:
            raise DriverError(f"{name} failed: CUDA_ERROR_OPERATING_SYSTEM")

    @contextmanager
    def on(self, device: torch.device | int) -> Iterator[None]:
        before = self.device, self.context
        self.device = torch.device("cuda", device).index if isinstance(device, int) else device.index
        try:
            yield
        finally:
            self.device, self.context = before

    def open_event(self, device: torch.device, handle: bytes) -> Any:
        self.context = self.device
        self.call("event")
        assert device.index == self.device
        return Event()

    def open_memory(self, device: int, size: int, descriptor: int) -> Any:
        assert self.context == device, "no context of that device is current"
        os.fstat(descriptor)
        self.call("memory")
        return Memory()


class Event:
    cuda_event = 7


class Memory:
    address = 70


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", made.on)
    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", made.open_event, raising=False)
    monkeypatch.setattr(pages, "uuid_of", lambda device: f"GPU-{device}")
    monkeypatch.setattr(pages, "SharedMemory", made.open_memory)
    return made


def opened(uuid: str) -> tuple[pages.Opened, int]:
    """A segment at its receiver, and the descriptor of its memory."""
    page, mapped = pages.new_page(SIZE, (b"f", b"d"), uuid, 1, b"x" * 16)
    os.close(page)
    memory = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    return pages.Opened(mapped, memory), memory


def is_closed(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return True
    return False


@pytest.mark.parametrize("device", [0, 1])
def test_the_context_is_current_when_memory_is_opened(cuda: Cuda, device: int) -> None:
    segment, memory = opened(f"GPU-{device}")
    segment.try_to_open()
    assert segment.page[3] == pages.OPENED
    assert cuda.calls == ["event", "event", "memory"]
    assert (cuda.device, cuda.context) == (0, None)
    assert is_closed(memory)


@pytest.mark.parametrize("step", ["event", "memory", "finding the GPU"])
def test_a_step_that_fails(cuda: Cuda, step: str) -> None:
    cuda.failing = step
    segment, memory = opened("GPU-1" if step in ("event", "memory") else "GPU-5")
    segment.try_to_open()
    assert segment.page[3] == pages.FAILED
    reason = segment.page[258 : 258 + segment.page[256]].decode()
    invisible = "the GPU GPU-5 is not visible to this process"
    assert reason == (f"{step} failed: CUDA_ERROR_OPERATING_SYSTEM" if cuda.calls else invisible)
    assert (cuda.device, cuda.context) == (0, None)
    assert is_closed(memory)
    with pytest.raises(BackhaulError, match="could not open before"):
        segment.drain(torch.zeros(1), 1)
