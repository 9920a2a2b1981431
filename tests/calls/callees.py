"""Functions that the tests of calls run on other workers."""

from __future__ import annotations

import operator
import threading

import torch

from backhaul import rpc


def who() -> str:
    return rpc.get_worker_info().name


def identity(value: object) -> object:
    return value


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    def plus(self, amount: int) -> int:
        return self.value + amount

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    @classmethod
    def made(cls, start: int) -> Counter:
        return cls(start)

    @staticmethod
    @rpc.functions.async_execution
    def later(to: str, x: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, operator.mul, args=(x, 10))


def raise_value_error(text: str) -> None:
    raise ValueError(text)


def bounce(me: str, other: str, depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_sync(other, bounce, args=(other, me, depth - 1))


gates: dict[str, threading.Event] = {}


def wait_for_gate(name: str) -> bool:
    return gates[name].wait(20)


def open_gate(name: str) -> None:
    gates[name].set()


def call_gate(to: str, name: str) -> bool:
    return rpc.rpc_sync(to, wait_for_gate, args=(name,))
