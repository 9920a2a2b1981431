"""Modes of torch that coroutines and functions set: for themselves, not for the calls beside and after them."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent.steps import start_in_steps
from backhaul.testing import InProcessCluster

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.float16),
    "device": lambda: torch.device("meta"),  # type: ignore[return-value]
    "two": lambda: torch.inference_mode() if torch.is_autocast_enabled("cpu") else torch.autocast("cpu"),
}

WEIGHT = torch.full((2,), 3.0, requires_grad=True)

inside = threading.Event()
go_on: list[asyncio.Event] = []


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.empty(1).device.type,
    )


async def look() -> tuple[Any, ...]:
    return modes()


async def hold(mode: str) -> list[tuple[Any, ...]]:
    """Four records of the modes: before entering a mode, inside it before and after an await, and after leaving it."""
    seen = [modes()]
    with MODES[mode](), MODES[mode]():
        seen.append(modes())
        go_on.append(asyncio.Event())
        inside.set()
        await go_on[-1].wait()
        seen.append(modes())
    await asyncio.sleep(0)
    return [*seen, modes()]


async def let_go() -> None:
    go_on.pop().set()


async def weigh(x: Tensor) -> Tensor:
    return x * WEIGHT


async def gather(mode: str) -> list[tuple[Any, ...]]:
    with MODES[mode](), MODES[mode]():
        return [modes(), *await asyncio.gather(look(), look())]


@pytest.fixture
def pair() -> Iterator[InProcessCluster]:
    with InProcessCluster(2) as workers:
        yield workers


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_an_await_does_not_reach_other_coroutines(pair: InProcessCluster, mode: str) -> None:
    """Another coroutine on the same thread computes without the mode, and gets its gradients."""
    plain = modes()
    with MODES[mode](), MODES[mode]():
        special = modes()
    assert special != plain
    x = torch.ones(2, requires_grad=True)
    with pair[0].as_current(), dist_autograd.context() as context_id:
        inside.clear()
        held = rpc.rpc_async("worker1", hold, args=(mode,))
        assert inside.wait(60)
        assert rpc.rpc_sync("worker1", look) == plain
        y = rpc.rpc_sync("worker1", weigh, args=(x,))
        rpc.rpc_sync("worker1", let_go)
        assert held.wait() == [plain, special, special, plain]
        context_id.backward(y.sum())
        assert context_id.gradients()[x].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "device"])
def test_tasks_begin_with_the_modes_of_their_maker(pair: InProcessCluster, mode: str) -> None:
    with pair[0].as_current():
        own, one, two = rpc.rpc_sync("worker1", gather, args=(mode,))
        assert one == two == own
        assert rpc.rpc_sync("worker1", look) == modes()


def test_a_function_runs_under_the_caller_s_autocast_and_its_own(pair: InProcessCluster) -> None:
    with pair[0].as_current(), torch.autocast("cpu", torch.bfloat16):
        inside.clear()
        held = rpc.rpc_async("worker1", hold, args=("autocast",))
        assert inside.wait(60)
        rpc.rpc_sync("worker1", let_go)
        assert [each[2:4] for each in held.wait()] == [
            (True, torch.bfloat16),
            (True, torch.float16),
            (True, torch.float16),
            (True, torch.bfloat16),
        ]


def test_a_task_that_is_cancelled_before_it_begins_or_while_it_waits() -> None:
    async def main() -> list[bool]:
        asyncio.get_running_loop().set_task_factory(start_in_steps)
        early, late = asyncio.ensure_future(look()), asyncio.ensure_future(hold("no_grad"))
        early.cancel()
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.gather(early, late, return_exceptions=True)
        return [early.cancelled(), late.cancelled(), torch.is_grad_enabled()]

    assert asyncio.run(main()) == [True, True, True]
    go_on.clear()
    gc.collect()  # a coroutine that was never awaited would warn


def test_a_task_shows_what_it_runs() -> None:
    async def main() -> str:
        asyncio.get_running_loop().set_task_factory(start_in_steps)
        task = asyncio.ensure_future(look())
        shown = repr(task)
        await task
        return shown

    assert "look()" in asyncio.run(main())


def switch_off(fails: bool) -> None:
    torch.set_grad_enabled(False)
    if fails:
        raise KeyError("x")


@pytest.mark.filterwarnings("ignore:switch_off on worker 'worker1' has switched gradients off")
@pytest.mark.parametrize("fails", [False, True])
def test_a_function_that_leaves_gradients_off(pair: InProcessCluster, fails: bool) -> None:
    with pair[0].as_current():
        for _ in range(3):
            if fails:
                with pytest.raises(KeyError):
                    rpc.rpc_sync("worker1", switch_off, args=(fails,))
            else:
                rpc.rpc_sync("worker1", switch_off, args=(fails,))
            assert rpc.rpc_sync("worker1", torch.is_grad_enabled) is True


def test_a_function_that_leaves_gradients_off_is_warned_about(pair: InProcessCluster) -> None:
    with pair[0].as_current(), pytest.raises(UserWarning, match=r"Write `with torch.no_grad\(\):` in the functions"):
        rpc.rpc_sync("worker1", switch_off, args=(False,))
