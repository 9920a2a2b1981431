"""Default streams, as the driver gets them. No GPU is needed: a fake takes the driver's calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from backhaul.devices import driver

OTHER_STREAM = 0x7F00_0000_1000


class FakeCuda:
    """The driver's calls, and the current device, for which the handle 0 stands."""

    def __init__(self) -> None:
        self.device = 0
        self.done: list[tuple[Any, ...]] = []
        self.code = 0

    def _note(self, what: str, *arguments: int) -> int:
        self.done.append((what, self.device, *arguments))
        return self.code

    def copy(self, *arguments: int) -> int:
        return self._note("copy", *arguments)

    def copy_to_host(self, *arguments: int) -> int:
        return self._note("copy_to_host", *arguments)

    def record(self, *arguments: int) -> int:
        return self._note("record", *arguments)

    def wait(self, *arguments: int) -> int:
        return self._note("wait", *arguments)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        try:
            yield
        finally:
            self.device = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    made = FakeCuda()
    monkeypatch.setattr(driver, "_calls", lambda: made)
    monkeypatch.setattr(driver, "_current_device", lambda: made.device)
    monkeypatch.setattr(torch.cuda, "device", made.on)
    return made


def enqueue_all(stream: int) -> None:
    driver.copy(1, 2, 3, stream)
    driver.copy_to_host(4, 5, 6, stream)
    driver.record(7, stream)
    driver.wait(8, stream)


def expected(device: int, stream: int) -> list[tuple[Any, ...]]:
    return [
        ("copy", device, 1, 2, 3, stream),
        ("copy_to_host", device, 4, 5, 6, stream),
        ("record", device, 7, stream),
        ("wait", device, stream, 8, 0),
    ]


@pytest.mark.parametrize("current", [0, 1, 2])
@pytest.mark.parametrize("device", [0, 1, 2])
def test_a_default_stream_is_that_of_its_device(cuda: FakeCuda, device: int, current: int) -> None:
    """This holds whichever device is current. Work on another device's stream would have no order with this one's."""
    cuda.device = current
    enqueue_all(~device)
    assert cuda.done == expected(device, 0)
    assert cuda.device == current


def test_other_streams_know_their_device(cuda: FakeCuda) -> None:
    cuda.device = 1
    enqueue_all(OTHER_STREAM)
    assert cuda.done == expected(1, OTHER_STREAM)


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("device", [0, 1])
def test_copies_are_enqueued_while_their_gpu_is_current(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, device: int, current: int
) -> None:
    """The driver checks their addresses against the current context, also on a stream of another one."""
    monkeypatch.setattr(driver, "_device_of", {OTHER_STREAM: device})
    cuda.device = current
    enqueue_all(OTHER_STREAM)
    assert cuda.done == expected(device, OTHER_STREAM)[:2] + expected(current, OTHER_STREAM)[2:]
    assert cuda.device == current


def test_the_handles_of_default_streams_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, stream_id: int, device_index: int, device_type: int) -> None:
            self.cuda_stream = OTHER_STREAM + stream_id if stream_id else 0

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(driver, "_handles", {})
    monkeypatch.setattr(driver, "_device_of", {})
    monkeypatch.setattr(driver, "_streams", {})
    assert [driver.handle((0, device, 1)) for device in range(3)] == [-1, -2, -3]
    assert driver.handle((3, 1, 1)) == OTHER_STREAM + 3
    assert driver._device_of == {-1: 0, -2: 1, -3: 2, OTHER_STREAM + 3: 1}


@pytest.mark.parametrize("stream", [-1, -2, OTHER_STREAM])
def test_a_failure_is_reported(cuda: FakeCuda, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.code = 700

    def check(code: int, what: str) -> None:
        raise driver.DriverError(f"{what}: {code}")

    monkeypatch.setattr(driver, "check", check)
    with pytest.raises(driver.DriverError, match="recording an event: 700"):
        driver.record(1, stream)
    assert cuda.device == 0


def test_the_use_of_a_tensor_is_recorded_on_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would record the use of a copy of a tensor that is conjugated or negated lazily, and damage its heap."""
    recorded: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    x = torch.ones(2, dtype=torch.complex64, requires_grad=True)
    stream: Any = object()
    for each in (x, x.conj(), x.conj().imag):
        driver.record_use(each, stream)
    assert [each.is_conj() or each.is_neg() for each in recorded] == [False] * 3
    assert {each.untyped_storage().data_ptr() for each in recorded} == {x.untyped_storage().data_ptr()}
