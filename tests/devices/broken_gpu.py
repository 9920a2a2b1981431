"""A driver of a GPU that fails from some moment on, as all calls do after an illegal access."""

from __future__ import annotations

from collections.abc import Sequence

from backhaul.devices.driver import DriverError
from backhaul.devices.handover import Key


class _Event:
    number = 1


class BreakingDriver:
    """A `handover.Driver`."""

    broken = False

    def current_key(self, device: int, /) -> Key:
        return 0, device, 1

    def current_stream(self, device: int) -> int:
        return ~device

    def handle(self, key: Key) -> int:
        return ~key[1]

    def new_stream(self, device: int) -> Key:
        return 1, device, 1

    def make_current(self, keys: Sequence[Key]) -> None:
        pass

    def new_event(self, device: int) -> _Event:
        return _Event()

    def record(self, event: int, stream: int) -> None:
        if self.broken:
            raise DriverError("recording an event failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    def wait(self, event: int, stream: int) -> None:
        if self.broken:
            raise DriverError("waiting for an event failed: CUDA_ERROR_ILLEGAL_ADDRESS")
