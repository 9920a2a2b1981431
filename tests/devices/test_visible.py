"""GPUs that one worker sees and another worker of the host does not: their tensors go through host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backhaul.devices import staging
from backhaul.devices.maps import Devices, hidden, listed
from backhaul.devices.staging import WorkerDevices, own_devices
from backhaul.wire.headers import EXPECTED


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, 2, None),
        ("0,1", 2, ("0", "1")),
        (" 3 , GPU-8a12 ", 2, ("3", "GPU-8a12")),
        ("2,-1,3", 1, ("2",)),  # CUDA ignores what follows an invalid entry, and so does torch's count
        ("", 0, ()),
    ],
)
def test_a_worker_lists_its_gpus_as_the_variable_does(
    visible: str | None, count: int, expected: tuple[str, ...] | None
) -> None:
    assert listed(visible, count) == expected


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (Devices(2), Devices(2), set()),
        (Devices(1, gpus=("1",)), Devices(2), set()),
        (Devices(1, gpus=("GPU-8a12",)), Devices(2), set()),
        (Devices(2), Devices(1, gpus=("1",)), {0}),
        (Devices(1, gpus=("0",)), Devices(1, gpus=("1",)), {0}),
        (Devices(2, gpus=("2", "1")), Devices(2, gpus=("1", "2")), set()),
        (Devices(3, gpus=("2", "1", "0")), Devices(1, gpus=("1",)), {0, 2}),
        (Devices(1, gpus=("0",)), Devices(1, gpus=("GPU-8a12",)), {0}),
        (Devices(2), Devices(0), {0, 1}),
        (Devices(1), Devices(0, gpus=()), {0}),
    ],
)
def test_a_gpu_is_hidden_unless_the_peer_surely_sees_it(mine: Devices, theirs: Devices, expected: set[int]) -> None:
    assert hidden(mine, theirs) == expected


def test_a_worker_tells_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert own_devices(None, ()) == Devices(2, gpus=("4", "5"))
    assert own_devices("same", (1,)) == Devices(2, same=True, used=(1,), gpus=("4", "5"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert own_devices(None, ()) == Devices(2)


class _Lending:
    """Has room in segments of device memory for every tensor."""

    class Placed:
        id = 7
        descriptors = ()

    def place(self, memory: Any, size: int) -> Any:
        return self.Placed()


class _Memory:
    """A tensor on a GPU."""

    def __init__(self, device: int) -> None:
        self._device = device

    def get_device(self) -> int:
        return self._device


class _ToHost:
    def __init__(self, memory: Any, size: int) -> None:
        self.host = torch.zeros(size, dtype=torch.uint8)


def test_segments_are_only_used_for_gpus_that_the_peer_sees(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(staging, "_ToHost", _ToHost)
    devices = WorkerDevices("a", {"a": Devices(2, gpus=("0", "1")), "b": Devices(1, gpus=("1",)), "c": Devices(2)})
    lending: Any = _Lending()

    def goes_through_host_memory(peer: str, device: int) -> bool:
        memory: Any = _Memory(device)
        place, _, keep = devices.gradients(peer, lending).stage(memory, 8, EXPECTED)
        assert (place == 0) is (type(keep) is _ToHost)
        return place == 0

    assert goes_through_host_memory("b", 0)
    assert not goes_through_host_memory("b", 1)
    assert not goes_through_host_memory("c", 0)
    assert goes_through_host_memory("b", 0)
    (record,) = caplog.records  # once for a peer
    assert record.getMessage() == (
        "tensors on cuda:0 go to worker 'b' through host memory, because that worker does not see the GPU, or has "
        "another name for it: CUDA_VISIBLE_DEVICES is '0,1' here and '1' there"
    )


def test_nothing_is_said_about_workers_without_shared_memory(caplog: pytest.LogCaptureFixture) -> None:
    devices = WorkerDevices("a", {"a": Devices(1, gpus=("0",)), "b": Devices(1, gpus=("1",))})
    devices.gradients("b", None)
    devices.staging("b", None, [torch.zeros(1)], reply=True)
    assert not caplog.records
