"""Autocast travels with calls, whichever thread runs them, unless the callee sets its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent import autocast
from backhaul.errors import ProtocolError
from backhaul.testing import InProcessCluster

X = torch.ones(2, 2)


def multiply(x: Tensor) -> Tensor:
    return x @ x


async def multiply_later(x: Tensor) -> list[torch.dtype]:
    """A coroutine. Between its steps the thread runs others."""
    first = (x @ x).dtype
    await asyncio.sleep(0)
    try:
        await fail()
    except ValueError:
        pass
    return [first, (x @ x).dtype]


async def fail() -> None:
    await asyncio.sleep(0)
    raise ValueError


async def multiply_plainly(x: Tensor) -> torch.dtype:
    await asyncio.sleep(0)
    return (x @ x).dtype


@rpc.functions.async_execution
def multiply_by_future(x: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(x @ x)
    return future


def multiply_in_full(x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ x


def multiply_in_half(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return x @ x


def relay(x: Tensor) -> Tensor:
    result: Tensor = rpc.rpc_sync("worker2", multiply, args=(x,))
    return result


GO = threading.Event()


class Multiplying:
    def __init__(self, waits: bool = False) -> None:
        assert not waits or GO.wait(10)

    def multiply(self, x: Tensor) -> Tensor:
        return x @ x

    def __call__(self, x: Tensor) -> Tensor:
        return x @ x


CASES = [
    (multiply, torch.bfloat16),
    (torch.mm, torch.bfloat16),
    (multiply_by_future, torch.bfloat16),
    (relay, torch.bfloat16),
    (multiply_in_full, torch.float32),
    (multiply_in_half, torch.float16),
]


@pytest.mark.parametrize(("function", "dtype"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_a_call_runs_under_the_caller_s_autocast(trio: InProcessCluster, function: Any, dtype: torch.dtype) -> None:
    args = (X, X) if function is torch.mm else (X,)
    with trio[0].as_current():
        with torch.autocast("cpu", torch.bfloat16):
            got = [
                rpc.rpc_sync("worker1", function, args=args),
                rpc.rpc_async("worker1", function, args=args).wait(),
                rpc.remote("worker1", function, args=args).to_here(),
            ]
            with torch.autocast("cpu", enabled=False):
                assert rpc.rpc_sync("worker1", multiply, args=(X,)).dtype is torch.float32
        assert [each.dtype for each in got] == [dtype] * 3
        assert rpc.rpc_sync("worker1", multiply, args=(X,)).dtype is torch.float32


def test_a_coroutine_runs_under_the_caller_s_autocast(pair: InProcessCluster) -> None:
    """The coroutine shares a thread with coroutines that have another mode."""
    with pair[0].as_current():
        with torch.autocast("cpu", torch.bfloat16):
            futures = [rpc.rpc_async("worker1", multiply_later, args=(X,)) for _ in range(3)]
        plain = rpc.rpc_async("worker1", multiply_plainly, args=(X,))
        assert [future.wait() for future in futures] == [[torch.bfloat16] * 2] * 3
        assert plain.wait() is torch.float32


def test_methods_of_references_run_under_the_caller_s_autocast(pair: InProcessCluster) -> None:
    with pair[0].as_current():
        GO.set()
        rref = rpc.remote("worker1", Multiplying)
        with torch.autocast("cpu", torch.bfloat16):
            assert rref.rpc_sync().multiply(X).dtype is torch.bfloat16
            assert rref.remote().multiply(X).to_here().dtype is torch.bfloat16
            GO.clear()
            future = rpc.remote("worker1", Multiplying, args=(True,)).rpc_async().multiply(X)
        GO.set()
        assert future.wait().dtype is torch.bfloat16
        assert rref.rpc_sync().multiply(X).dtype is torch.float32


def linear(x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result: Tensor = nn.functional.linear(x, torch.randn(3, 3))
    return result


def test_gradients_are_those_of_one_process(pair: InProcessCluster) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(linear(linear(x)).float().sum(), x)[0]
    with pair[0].as_current(), dist_autograd.context() as context_id:
        with torch.autocast("cpu", torch.bfloat16):
            loss = rpc.rpc_sync("worker1", linear, args=(linear(x),)).float().sum()
        context_id.backward(loss)
        assert torch.equal(context_id.gradients()[x], expected)


def test_a_message_carries_autocast_devices_and_dtypes() -> None:
    assert autocast.here() == ()
    with torch.autocast("cpu", torch.float16):
        assert autocast.here() == (("cpu", "float16"),)
    got = autocast.under((("cpu", "bfloat16"), ("cuda", "float16")), Multiplying())(X)
    assert got.dtype is torch.bfloat16
    for bad in (("tpu", "float16"), ("cpu", "int8")):
        with pytest.raises(ProtocolError, match="autocast for"):
            autocast.under((bad,), multiply)
