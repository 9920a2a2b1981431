"""Stages for pipelines. They log what they do, and wait for each other."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from backhaul import rpc

LOG: list[tuple[Any, ...]] = []
"""What the stages have done, in order. The workers of these tests are in one process."""
WITHIN = 10.0


class Told(nn.Module):
    """Logs when it begins and ends a micro-batch. The first value of a micro-batch identifies it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        number = int(x.flatten()[0])
        LOG.append((self.name, "begins", number, rpc.get_worker_info().name))
        y = self.work(x, number)
        LOG.append((self.name, "ends", number, rpc.get_worker_info().name))
        return y

    def work(self, x: Tensor, number: int) -> Tensor:
        return x


class Entered:
    """Which stages have begun which micro-batches. Other stages wait for that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: set[tuple[str, int]] = set()

    def clear(self) -> None:
        with self._changed:
            self._seen.clear()

    def enter(self, name: str, number: int) -> None:
        with self._changed:
            self._seen.add((name, number))
            self._changed.notify_all()

    def wait_for(self, name: str, number: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: (name, number) in self._seen, WITHIN)


ENTERED = Entered()


class Overlapping(Told):
    """Ends a micro-batch only when the other stage has begun the next one, or the previous one.

    So stages that do not overlap would never end.
    """

    def __init__(self, name: str, other: str, distance: int, last: int) -> None:
        super().__init__(name)
        self.other = other
        self.distance = distance
        self.last = last

    def work(self, x: Tensor, number: int) -> Tensor:
        ENTERED.enter(self.name, number)
        awaited = number + self.distance
        if 0 <= awaited <= self.last and not ENTERED.wait_for(self.other, awaited):
            raise TimeoutError(f"{self.other} has not begun with {awaited} while {self.name} works on {number}")
        return x


class Breaks(Told):
    """Raises for one micro-batch."""

    def __init__(self, name: str, at: int) -> None:
        super().__init__(name)
        self.at = at

    def work(self, x: Tensor, number: int) -> Tensor:
        if number == self.at:
            raise LookupError(f"{self.name} has no luck with {number}")
        return x


class Hangs(Told):
    """Waits in one micro-batch until the test lets it go on."""

    go_on = threading.Event()

    def __init__(self, name: str, at: int) -> None:
        super().__init__(name)
        self.at = at

    def work(self, x: Tensor, number: int) -> Tensor:
        if number == self.at:
            Hangs.go_on.wait(WITHIN)
        return x


class Gives(nn.Module):
    """Returns something of another kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return {
            "list": [x, x * 2],
            "dict": {"a": x, "b": (x + 1, None)},
            "named": torch.max(x, 1),
            "none": None,
            "number": 3,
            "scalar": x.sum(),
            "nested": ([x], {"k": x}),
        }[self.kind]


class Takes(nn.Module):
    """Takes several arguments, some of which are not tensors."""

    def forward(self, x: Tensor, factor: float, names: list[str], y: Tensor, scalar: Tensor) -> Any:
        return x * factor + y + scalar + len(names), y


class Crash(nn.Module):
    """Ends the process in one micro-batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, x: Tensor) -> Tensor:
        import os
        import signal

        if int(x.flatten()[0]) == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def numbered(count: int, width: int = 2) -> Tensor:
    """A batch whose rows are the micro-batches: row i is filled with i."""
    return torch.arange(count, dtype=torch.float64).unsqueeze(1).expand(count, width).contiguous()
