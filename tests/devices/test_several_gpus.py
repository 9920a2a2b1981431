"""Segments between several GPUs: the rules of the driver that a machine with one GPU does not show.

- An event belongs to a GPU, and can be recorded only on streams of that GPU. Streams of any GPU can wait for it.
- Memory that two processes share is accessible only to the GPUs for which it was mapped: here, to its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backhaul.devices import pages
from backhaul.devices.discipline import Incoming

SEGMENT, FILLED, DRAINED = 1000, 1, 2  # all of GPU 0


class Cuda:
    """A driver. The stream of GPU n has the number n."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.device_of = {SEGMENT: 0, FILLED: 0, DRAINED: 0}

    def current_stream(self, device: int) -> int:
        return device

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        assert self.device_of[target] == self.device_of[source] == stream, "an invalid address there"
        self.done.append(("copy", stream))

    def record(self, event: int, stream: int) -> None:
        assert self.device_of[event] == stream, "an event of another GPU"
        self.done.append(("record", stream))

    def wait(self, event: int, stream: int) -> None:
        self.done.append(("wait", stream))


class Tensor:
    """A tensor on a GPU, or on the CPU if ``device`` is -1."""

    def __init__(self, cuda: Cuda, device: int) -> None:
        self._cuda, self._device = cuda, device
        cuda.device_of[id(self)] = device
        self.is_cuda = device >= 0

    def get_device(self) -> int:
        return self._device

    def data_ptr(self) -> int:
        return id(self)

    def copy_(self, source: Tensor) -> None:
        """Torch copies between any devices."""
        self._cuda.done.append(("torch", self._device))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(pages, "driver", made)
    monkeypatch.setattr(pages, "_empty_on", lambda device, size: Tensor(made, device))
    monkeypatch.setattr(pages, "_bytes_of", lambda tensor, size: tensor)
    return made


@pytest.mark.parametrize("target", [-1, 0, 1])
def test_data_goes_from_the_gpu_of_its_segment_to_any_device(cuda: Cuda, target: int) -> None:
    opened: Any = pages.Opened.__new__(pages.Opened)
    opened._descriptor, opened._device = None, 0
    opened._incoming = Incoming(cuda, SEGMENT, FILLED, DRAINED)
    opened.drain(Tensor(cuda, target), 100)
    assert cuda.done[:3] == [("wait", 0), ("copy", 0), ("record", 0)]
    assert cuda.done[3:] == ([] if target == 0 else [("torch", target)])


def test_the_bytes_of_a_tensor() -> None:
    tensor = torch.zeros(3, 4, dtype=torch.int32).t()
    pages._bytes_of(tensor, tensor.nbytes).copy_(torch.arange(48, dtype=torch.uint8))
    expected = torch.arange(48, dtype=torch.uint8).view(torch.int32)
    assert torch.equal(tensor.t().flatten(), expected)
    scalar = torch.tensor(1.5, dtype=torch.bfloat16)
    pages._bytes_of(scalar, 2).copy_(torch.zeros(2, dtype=torch.uint8))
    assert scalar.item() == 0
