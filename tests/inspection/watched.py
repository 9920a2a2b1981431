"""Functions that workers run for the tests of inspection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from backhaul import rpc
from backhaul.worker import Worker

PATIENCE = 10.0

_opened: dict[str, threading.Event] = {}
_reached: dict[str, threading.Event] = {}


def new_gate(name: str) -> str:
    _opened[name], _reached[name] = threading.Event(), threading.Event()
    return name


def wait_at(name: str) -> str:
    """Wait until the test opens this gate."""
    _reached[name].set()
    assert _opened[name].wait(PATIENCE)
    return name


def await_visitor(name: str) -> None:
    """Return when a function waits at this gate."""
    assert _reached[name].wait(PATIENCE)


def open_gate(name: str) -> None:
    _opened[name].set()


def until(worker: Worker, condition: Callable[[], object]) -> None:
    """Return when a condition holds that becomes true right before an event of this worker."""
    told = threading.Event()
    stop = worker.agent.observers.add(lambda _: told.set())
    try:
        while not condition():
            assert told.wait(PATIENCE)
            told.clear()
    finally:
        stop()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fail(text: str) -> None:
    raise ValueError(text)


async def double_later(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def fail_later(text: str) -> None:
    raise ValueError(text)


@rpc.functions.async_execution
def double_elsewhere(to: str, x: torch.Tensor) -> Any:
    return rpc.rpc_async(to, double, (x,))


def relay(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args)


class Counter:
    def __init__(self) -> None:
        self.value = 0

    def add(self, more: int) -> int:
        self.value += more
        return self.value
