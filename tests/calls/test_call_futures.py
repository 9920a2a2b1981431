"""Futures of calls, and slow functions."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import operator
import threading
import time
import weakref

import pytest
import torch
from callees import Counter, identity, open_gate, raise_value_error, wait_for_gate, who

from backhaul import rpc
from backhaul.errors import MisuseError
from backhaul.testing import InProcessCluster


def test_futures_are_torchs(pair: InProcessCluster) -> None:
    futures = [pair[0].rpc_async("worker1", operator.add, args=(i, 1)) for i in range(50)]
    assert all(isinstance(future, torch.futures.Future) for future in futures)
    assert torch.futures.wait_all(futures) == [i + 1 for i in range(50)]
    collected = torch.futures.collect_all([pair[0].rpc_async("worker1", who) for _ in range(3)])
    assert [future.wait() for future in collected.wait()] == ["worker1"] * 3


def test_then_and_done_callback_fire_without_a_waiter(pair: InProcessCluster) -> None:
    fired = threading.Event()
    seen: list[object] = []

    def note(done: torch.futures.Future[int]) -> None:
        seen.append(done.value())
        fired.set()

    pair[0].rpc_async("worker1", operator.add, args=(1, 2)).add_done_callback(note)
    assert fired.wait(10)
    assert seen == [3]
    child = pair[0].rpc_async("worker1", operator.add, args=(1, 2)).then(lambda done: done.wait() + 1)
    assert child.then(lambda done: done.value() * 2).wait() == 8


def test_a_future_without_waiter_or_callback_completes(pair: InProcessCluster) -> None:
    future = pair[0].rpc_async("worker1", who)
    deadline = time.monotonic() + 10
    while not future.done():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
    assert future.value() == "worker1"


def test_a_callback_may_call_and_wait(pair: InProcessCluster) -> None:
    def call_again(done: torch.futures.Future[int]) -> int:
        return pair[0].rpc_sync("worker1", operator.add, args=(done.value(), 1))

    future = pair[0].rpc_async("worker1", operator.add, args=(1, 1))
    assert future.then(call_again).then(call_again).wait() == 4


def test_a_slow_callback_does_not_hold_up_other_calls(pair: InProcessCluster, gate: str) -> None:
    entered, release = threading.Event(), threading.Event()

    def block(done: torch.futures.Future[bool]) -> None:
        entered.set()
        assert release.wait(20)

    child = pair[0].rpc_async("worker1", wait_for_gate, args=(gate,)).then(block)
    pair[0].rpc_sync("worker1", open_gate, args=(gate,))
    assert entered.wait(10)
    assert pair[0].rpc_sync("worker1", who) == "worker1"
    release.set()
    child.wait()


def test_a_burst_of_callbacks_needs_few_threads(pair: InProcessCluster, gate: str) -> None:
    first = pair[0].rpc_async("worker1", wait_for_gate, args=(gate,))
    pair[0].rpc_sync("worker1", who)
    threads = pair[0].agent.pool.size
    children = [
        pair[0].rpc_async("worker1", identity, args=(i,)).then(lambda done: done.value() + 1) for i in range(500)
    ]
    assert torch.futures.wait_all(children) == list(range(1, 501))
    assert pair[0].agent.pool.size <= threads + 5
    open_gate(gate)
    assert first.wait()


def test_callbacks_that_wait_for_each_other(pair: InProcessCluster, gate: str) -> None:
    """This covers collect_all, where torch attaches callbacks that Backhaul does not see."""
    later = threading.Event()
    futures = [pair[0].rpc_async("worker1", wait_for_gate, args=(gate,)) for _ in range(2)]
    waits = torch.futures.collect_all(futures[:1]).then(lambda _: later.wait(20))
    futures[1].add_done_callback(lambda _: later.set())
    open_gate(gate)
    assert waits.wait()


def test_results_are_freed_without_the_garbage_collector(pair: InProcessCluster) -> None:
    gc.collect()
    gc.disable()
    try:
        values = [
            pair[0].rpc_sync("worker1", identity, args=(torch.ones(5),)),
            pair[0].rpc_async("worker1", identity, args=(torch.ones(5),)).wait(),
            pair[0].rpc_async("worker1", identity, args=(torch.ones(5),)).then(lambda done: done.value()).wait(),
        ]
        references = [weakref.ref(value) for value in values]
        values.clear()
        deadline = time.monotonic() + 10
        while any(reference() is not None for reference in references):
            assert time.monotonic() < deadline, [reference() for reference in references]
            threading.Event().wait(0.001)
    finally:
        gc.enable()


_setting = contextvars.ContextVar("setting", default="unset")


def set_and_get(value: str | None) -> str:
    before = _setting.get()
    if value is not None:
        _setting.set(value)
    return before


def test_calls_do_not_see_each_others_context_variables(pair: InProcessCluster) -> None:
    assert [pair[0].rpc_sync("worker1", set_and_get, args=(value,)) for value in ("a", "b", None)] == ["unset"] * 3


def test_callbacks_run_in_the_context_in_which_they_were_added(pair: InProcessCluster) -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("inside")
    assert pair[0].rpc_async("worker1", who).then(lambda _: variable.get()).wait() == "inside"


def test_errors_through_then(pair: InProcessCluster) -> None:
    with pytest.raises(ValueError, match="no"):
        pair[0].rpc_async("worker1", raise_value_error, args=("no",)).then(lambda done: done.value()).wait()


def test_futures_can_be_awaited(pair: InProcessCluster) -> None:
    async def main() -> list[int]:
        calls = [pair[0].rpc_async("worker1", operator.add, args=(i, i)) for i in range(20)]
        with pytest.raises(ValueError, match="awaited"):
            await pair[0].rpc_async("worker1", raise_value_error, args=("awaited",))
        return list(await asyncio.gather(*(_await(call) for call in calls)))

    assert asyncio.run(main()) == [2 * i for i in range(20)]


async def _await(future: rpc.Future[int]) -> int:
    return await future


def test_an_awaited_future_needs_no_tick(pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch thread reads the reply at once, and not at its next tick, which may be milliseconds later."""
    monkeypatch.setattr(pair[0].agent.watch, "_attend", lambda: False)  # what a tick does for futures

    async def main() -> list[str]:
        return [await asyncio.wait_for(pair[0].rpc_async("worker1", who), 5) for _ in range(20)]

    assert asyncio.run(main()) == ["worker1"] * 20


# Slow functions.


async def doze_and_add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def ask_other(to: str) -> str:
    return await rpc.rpc_async(to, who)


async def fail_later() -> None:
    await asyncio.sleep(0)
    raise_value_error("from a coroutine")


@rpc.functions.async_execution
def chain(to: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return rpc.rpc_async(to, torch.add, args=(x, 1)).then(lambda done: done.value() * 10)


@rpc.functions.async_execution
def chain_that_fails(to: str) -> torch.futures.Future[None]:
    return rpc.rpc_async(to, raise_value_error, args=("in a chain",))


@rpc.functions.async_execution
def not_a_future() -> int:
    return 3


def test_async_def(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker1", doze_and_add, args=(1, 2)) == 3
    assert pair[0].rpc_sync("worker1", ask_other, args=("worker0",)) == "worker0"
    with pytest.raises(ValueError, match="coroutine"):
        pair[0].rpc_sync("worker1", fail_later)


def test_async_execution(trio: InProcessCluster) -> None:
    assert trio[0].rpc_sync("worker1", chain, args=("worker2", torch.ones(1))).item() == 20
    assert trio[0].rpc_sync("worker1", Counter.later, args=("worker2", 4)) == 40
    with pytest.raises(ValueError, match="in a chain"):
        trio[0].rpc_sync("worker1", chain_that_fails, args=("worker2",))
    with pytest.raises(MisuseError, match=r"must return a torch\.futures\.Future"):
        trio[0].rpc_sync("worker1", not_a_future)


def test_async_execution_holds_no_thread(trio: InProcessCluster, gate: str) -> None:
    assert trio[0].rpc_sync("worker1", chain, args=("worker2", torch.ones(1))).item() == 20
    threads = trio[1].agent.pool.size
    futures = [trio[0].rpc_async("worker1", wait_elsewhere, args=("worker2", gate)) for _ in range(40)]
    assert trio[0].rpc_sync("worker1", who) == "worker1"
    assert trio[1].agent.pool.size <= threads + 5
    open_gate(gate)
    assert all(future.wait() for future in futures)


@rpc.functions.async_execution
def wait_elsewhere(to: str, name: str) -> torch.futures.Future[bool]:
    return rpc.rpc_async(to, wait_for_gate, args=(name,))
