"""Calls between workers of one process: what they carry, how they nest, fail and end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import math
import operator
import threading
import time
import traceback
import warnings
import weakref

import pytest
import torch

from backhaul import rpc
from backhaul.agent.pending import Slot
from backhaul.rpc import RpcOptions
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.frames import encode
from backhaul.wire.messages import Call, Ping, Result
from backhaul.worker import current

# -- functions that are called remotely ---------------------------------------------------------


def who() -> str:
    return rpc.get_worker_info().name


def identity(value: object) -> object:
    return value


def keywords(a: int, *, b: int = 2) -> tuple[int, int]:
    return a, b


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


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class Custom(Exception):
    pass


def raise_value_error(text: str) -> None:
    raise ValueError(text)


def raise_custom() -> None:
    raise Custom("mine")


def raise_unpicklable() -> None:
    raise Unpicklable(1, 2)


def leave_process() -> None:
    raise SystemExit(3)


def raise_at(to: str) -> None:
    rpc.rpc_sync(to, raise_value_error, args=("two hops away",))


def bounce(me: str, other: str, depth: int) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_sync(other, bounce, args=(other, me, depth - 1))


def scripted(x: torch.Tensor) -> torch.Tensor:
    return x * 3 + 1


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own plan for TorchScript
    scripted = torch.jit.script(scripted)


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


_gates: dict[str, threading.Event] = {}


def wait_for_gate(name: str) -> bool:
    return _gates[name].wait(20)


def open_gate(name: str) -> None:
    _gates[name].set()


@pytest.fixture
def gate() -> str:
    name = f"gate-{len(_gates)}"
    _gates[name] = threading.Event()
    return name


# -- who is called, and what ----------------------------------------------------------------------


def test_target_by_name_rank_and_info(pair: InProcessCluster) -> None:
    info = pair[0].get_worker_info("worker1")
    assert info == rpc.WorkerInfo(1, "worker1")
    for to in ("worker1", 1, info):
        assert pair[0].rpc_sync(to, who) == "worker1"
        assert pair[0].rpc_async(to, who).wait() == "worker1"


def test_a_worker_can_call_itself(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker0", who) == "worker0"
    assert pair[0].rpc_sync(0, bounce, args=("worker0", "worker0", 5)) == 5


def test_unknown_worker_lists_those_that_exist(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.UnknownWorkerError, match=r"named 'workr1'.*'worker0' \(rank 0\), 'worker1' \(rank 1\)"):
        pair[0].rpc_sync("workr1", who)
    with pytest.raises(rpc.UnknownWorkerError, match="rank 7"):
        pair[0].rpc_async(7, who)
    with pytest.raises(rpc.OptionError, match="name, rank or WorkerInfo"):
        pair[0].rpc_sync(None, who)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("func", "args", "expected"),
    [
        (operator.add, (1, 2), 3),
        (len, ([1, 2, 3],), 3),
        (torch.add, (torch.ones(2), 1), torch.full((2,), 2.0)),
        (torch.nn.functional.relu, (torch.tensor([-1.0, 2.0]),), torch.tensor([0.0, 2.0])),
        (torch.ops.aten.mul.Tensor, (torch.ones(2), torch.tensor(3.0)), torch.full((2,), 3.0)),
        (torch.Tensor.sum, (torch.ones(4),), torch.tensor(4.0)),
        (scripted, (torch.ones(2),), torch.full((2,), 4.0)),
        (Counter.double, (4,), 8),
        (Counter.plus, (Counter(5), 2), 7),
        (Counter(5).plus, (3,), 8),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_callables(pair: InProcessCluster, func: object, args: tuple[object, ...], expected: object) -> None:
    value = pair[0].rpc_sync("worker1", func, args=args)  # type: ignore[arg-type]
    torch.testing.assert_close(value, expected)


def test_classes_and_class_methods_make_objects(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker1", Counter, args=(3,)).value == 3
    assert pair[0].rpc_sync("worker1", Counter.made, args=(4,)).value == 4


def test_keyword_arguments(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker1", keywords, args=(1,), kwargs={"b": 5}) == (1, 5)
    assert pair[0].rpc_sync("worker1", keywords, kwargs={"a": 7}) == (7, 2)


def test_lambda_and_local_function_say_what_to_do(pair: InProcessCluster) -> None:
    def local() -> None: ...

    for function in (lambda: 1, local):
        with pytest.raises(rpc.UnsendableError, match="module level"):
            pair[0].rpc_sync("worker1", function)


def test_a_function_that_the_callee_lacks(pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, packing = pair[0].codec.pack((keywords, (), {}))
    name = f"{__name__}:keywords"
    assert name in str(tree)
    monkeypatch.setattr(
        pair[0].codec, "pack", lambda value, labels: (_renamed(tree, name, f"{__name__}:gone"), packing)
    )
    with pytest.raises(rpc.MisuseError, match="gone"):
        pair[0].rpc_sync("worker1", keywords)


def _renamed(tree: object, old: str, new: str) -> object:
    if isinstance(tree, list):
        return [_renamed(item, old, new) for item in tree]
    return new if tree == old else tree


# -- values ------------------------------------------------------------------------------------------


def test_received_tensors_are_the_receivers_own(pair: InProcessCluster) -> None:
    for size in (10, 3_000_000):
        sent = torch.zeros(size)
        back = pair[0].rpc_sync("worker1", identity, args=(sent,))
        back += 1
        assert sent.sum() == 0
        assert back.sum() == size


def test_one_tensor_twice_arrives_as_one(pair: InProcessCluster) -> None:
    x = torch.randn(3)
    a, b = pair[0].rpc_sync("worker1", identity, args=((x, x),))
    assert a is b


_weights = torch.zeros(40_000)


def get_weights() -> torch.Tensor:
    return _weights


def change_weights() -> None:
    _weights.add_(1)


def test_a_result_is_what_it_was_when_the_function_returned(pair: InProcessCluster) -> None:
    """Also if the next request is at hand, and changes the tensor in place."""
    for _ in range(40):
        before = int(_weights[0])
        first = pair[0].rpc_async("worker1", get_weights)
        second = pair[0].rpc_async("worker1", change_weights)
        assert int(first.wait()[0]) == before
        second.wait()


def test_messages_over_the_limit() -> None:
    for sockets in (False, True):
        with InProcessCluster(2, sockets=sockets, options=RpcOptions(max_message_bytes=100_000)) as workers:
            with pytest.raises(rpc.UnsendableError, match="max_message_bytes"):
                workers[0].rpc_sync("worker1", identity, args=(torch.zeros(100_000),))
            with pytest.raises(rpc.UnsendableError, match="max_message_bytes"):
                workers[0].rpc_sync("worker1", torch.zeros, args=(100_000,))
            assert workers[0].rpc_sync("worker1", who) == "worker1"
            assert workers[0].agent._routes["worker1"].outstanding == 0


def test_arguments_of_the_wrong_kind(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.OptionError, match="args must be a tuple"):
        pair[0].rpc_sync("worker1", identity, args=torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(rpc.OptionError, match="args must be a tuple"):
        pair[0].rpc_async("worker1", identity, args=0)  # type: ignore[arg-type]
    with pytest.raises(rpc.OptionError, match="kwargs must be a dict"):
        pair[0].rpc_sync("worker1", identity, kwargs=[1])  # type: ignore[arg-type]
    with pytest.raises(rpc.OptionError, match="timeout"):
        pair[0].rpc_sync("worker1", who, timeout=None)  # type: ignore[arg-type]


def test_unsendable_argument_and_result(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.UnsendableError, match="lock"):
        pair[0].rpc_sync("worker1", identity, args=(threading.Lock(),))
    with pytest.raises(rpc.UnsendableError, match="lock"):
        pair[0].rpc_sync("worker1", threading.Lock)
    assert pair[0].rpc_sync("worker1", who) == "worker1"


# -- futures -----------------------------------------------------------------------------------------


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
    """Also behind collect_all, where torch attaches them out of our sight."""
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


def test_callbacks_run_in_the_context_of_who_added_them(pair: InProcessCluster) -> None:
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


def test_awaiting_one_after_another_is_quick(pair: InProcessCluster) -> None:
    async def main() -> float:
        await pair[0].rpc_async("worker1", who)
        start = time.perf_counter()
        for _ in range(200):
            await pair[0].rpc_async("worker1", who)
        return (time.perf_counter() - start) / 200

    # A future that waited for the watch thread's next tick would take 2 ms or more each.
    assert asyncio.run(main()) < 0.0018


# -- functions that take their time ------------------------------------------------------------------


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
    with pytest.raises(TypeError, match=r"must return a torch\.futures\.Future"):
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


# -- nesting and threads -----------------------------------------------------------------------------


def test_200_nested_calls_in_a_cycle(pair: InProcessCluster) -> None:
    assert pair[0].rpc_sync("worker1", bounce, args=("worker1", "worker0", 200)) == 200


def test_many_threads_nest_at_once() -> None:
    with InProcessCluster(2, options=RpcOptions(num_worker_threads=1)) as workers:
        results: list[int] = []

        def call(index: int) -> None:
            me, other = ("worker0", "worker1") if index % 2 else ("worker1", "worker0")
            results.append(workers[index % 2].rpc_sync(other, bounce, args=(other, me, 10)))

        threads = [threading.Thread(target=call, args=(i,)) for i in range(30)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == [10] * 30


@pytest.mark.parametrize("count", [1, 40])
def test_blocked_requests_do_not_starve_the_one_that_frees_them(gate: str, count: int) -> None:
    with InProcessCluster(2, options=RpcOptions(num_worker_threads=2)) as workers:
        blocked = [workers[0].rpc_async("worker1", wait_for_gate, args=(gate,)) for _ in range(count)]
        workers[0].rpc_sync("worker1", open_gate, args=(gate,), timeout=15)
        assert all(future.wait() for future in blocked)


def test_a_burst_of_slow_requests_makes_few_threads() -> None:
    with InProcessCluster(2, options=RpcOptions(num_worker_threads=4)) as workers:
        futures = [workers[0].rpc_async("worker1", spin, args=(0.01,)) for _ in range(100)]
        torch.futures.wait_all(futures)
        assert workers[1].agent.pool.size < 20


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_large_messages_both_ways_at_once(pair: InProcessCluster) -> None:
    """Neither side can write all before it reads."""
    x = torch.randn(4_000_000)
    futures = [pair[i % 2].rpc_async(f"worker{1 - i % 2}", identity, args=(x,)) for i in range(8)]
    for future in futures:
        assert torch.equal(future.wait(), x)


def test_replies_are_read_while_a_request_does_not_fit(pair: InProcessCluster) -> None:
    x = torch.randn(2_000_000)
    futures = [pair[0].rpc_async("worker1", identity, args=(x,)) for _ in range(10)]
    assert all(torch.equal(future.wait(), x) for future in futures)


def test_threads_share_one_peer(pair: InProcessCluster) -> None:
    wrong: list[tuple[int, int]] = []

    def work(thread: int) -> None:
        for i in range(100):
            got = pair[0].rpc_sync("worker1", operator.add, args=(thread * 1000, i))
            if got != thread * 1000 + i:
                wrong.append((thread, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_nobody_waits_for_a_reply_that_another_thread_has_read(
    pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between reading a reply and handing it out, another thread may take the reader role."""
    assert pair[0].rpc_sync("worker1", who) == "worker1"
    outbound = pair[0].agent._routes[1]
    entered, release = threading.Event(), threading.Event()

    def read_until_done() -> None:
        while not slot.done:
            outbound.drain()

    def settle_late(finished: list[Slot], *, inline: bool) -> None:
        if finished and threading.current_thread() is reader:
            entered.set()
            assert release.wait(20)

    slot = Slot(10_000, "a ping", math.inf, is_call=False)
    outbound._pending.open(slot, watched=False)
    outbound.post(encode(Ping(slot.id)))
    outbound._channel.wait(read=True, write=False, timeout=10)
    monkeypatch.setattr(outbound, "_settle_all", settle_late)
    reader = threading.Thread(target=read_until_done)
    reader.start()
    assert entered.wait(10)
    start = time.monotonic()
    outbound.wait(slot)
    assert time.monotonic() - start < 2
    release.set()
    reader.join(10)


# -- errors ------------------------------------------------------------------------------------------


def test_remote_exception_has_its_type_worker_and_traceback(pair: InProcessCluster) -> None:
    with pytest.raises(ValueError, match="bad luck") as caught:
        pair[0].rpc_sync("worker1", raise_value_error, args=("bad luck",))
    cause = caught.value.__cause__
    assert isinstance(cause, BaseException)
    assert cause.worker == "worker1"  # type: ignore[attr-defined]
    text = "".join(traceback.format_exception(caught.value))
    assert "Traceback on worker 'worker1'" in text
    assert "in raise_value_error" in text
    with pytest.raises(Custom, match="mine"):
        pair[0].rpc_sync("worker1", raise_custom)


def test_exception_whose_type_cannot_travel_is_a_remote_error(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.RemoteError, match="1 and 2") as caught:
        pair[0].rpc_sync("worker1", raise_unpicklable)
    assert caught.value.worker == "worker1"
    assert caught.value.type_name.endswith("Unpicklable")
    assert "raise_unpicklable" in caught.value.remote_traceback


def test_a_remote_exit_is_an_error_here(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.RemoteError, match="SystemExit"):
        pair[0].rpc_sync("worker1", leave_process)
    assert pair[0].rpc_sync("worker1", who) == "worker1"


def test_traceback_survives_two_hops(trio: InProcessCluster) -> None:
    with pytest.raises(ValueError, match="two hops away") as caught:
        trio[0].rpc_sync("worker1", raise_at, args=("worker2",))
    text = "".join(traceback.format_exception(caught.value))
    for piece in ("on worker 'worker1'", "on worker 'worker2'", "in raise_at", "in raise_value_error"):
        assert piece in text


# -- timeouts ----------------------------------------------------------------------------------------


def test_timeout_of_a_call_and_its_late_reply(pair: InProcessCluster, gate: str) -> None:
    for call in (pair[0].rpc_sync, lambda *a, **k: pair[0].rpc_async(*a, **k).wait()):
        start = time.monotonic()
        with pytest.raises(rpc.RpcTimeoutError, match="RPC ran for more than set timeout") as caught:
            call("worker1", wait_for_gate, args=(gate,), timeout=0.1)
        assert 0.09 < time.monotonic() - start < 5
        assert isinstance(caught.value, TimeoutError)
        assert isinstance(caught.value, RuntimeError)
    open_gate(gate)
    assert pair[0].rpc_sync("worker1", who) == "worker1"


def test_timeout_of_a_future_nobody_waits_for(pair: InProcessCluster, gate: str) -> None:
    failed = threading.Event()
    future = pair[0].rpc_async("worker1", wait_for_gate, args=(gate,), timeout=0.05)
    future.add_done_callback(lambda _: failed.set())
    assert failed.wait(10)
    with pytest.raises(rpc.RpcTimeoutError):
        future.value()
    open_gate(gate)


def test_default_timeout_and_no_timeout(gate: str) -> None:
    with InProcessCluster(2, options=RpcOptions(rpc_timeout=0.1)) as workers:
        with pytest.raises(rpc.RpcTimeoutError):
            workers[0].rpc_sync("worker1", wait_for_gate, args=(gate,))
        future = workers[0].rpc_async("worker1", wait_for_gate, args=(gate,), timeout=0)
        threading.Timer(0.3, open_gate, (gate,)).start()
        assert future.wait()


def test_a_lost_reply_times_out_and_others_are_not_harmed() -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as workers:
        assert workers[0].rpc_sync("worker1", who) == "worker1"
        faults.next("drop", Result)
        with pytest.raises(rpc.RpcTimeoutError):
            workers[0].rpc_sync("worker1", who, timeout=0.2)
        assert workers[0].rpc_sync("worker1", who) == "worker1"


# -- peers that vanish ------------------------------------------------------------------------------


def test_a_cut_connection_fails_its_callers_and_is_made_again(gate: str) -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as workers:
        waiting = workers[0].rpc_async("worker1", wait_for_gate, args=(gate,))
        faults.next("cut", Call)
        with pytest.raises(rpc.WorkerLostError, match="worker1") as caught:
            workers[0].rpc_sync("worker1", who)
        assert caught.value.worker == "worker1"
        with pytest.raises(rpc.WorkerLostError):
            waiting.wait()
        open_gate(gate)
        assert workers[0].rpc_sync("worker1", who) == "worker1"


def test_a_worker_that_shuts_down_fails_its_callers(trio: InProcessCluster, gate: str) -> None:
    direct = trio[0].rpc_async("worker1", wait_for_gate, args=(gate,))
    indirect = trio[0].rpc_async("worker2", call_gate, args=("worker1", gate))
    trio[2].rpc_sync("worker1", who)
    trio[1].shutdown(graceful=False)
    for future in (direct, indirect):
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            future.wait()
    open_gate(gate)
    with pytest.raises(rpc.WorkerLostError, match="worker1"):
        trio[0].rpc_sync("worker1", who)
    assert trio[0].rpc_sync("worker2", who) == "worker2"


def call_gate(to: str, name: str) -> bool:
    return rpc.rpc_sync(to, wait_for_gate, args=(name,))


# -- the current worker -------------------------------------------------------------------------------


def test_rpc_functions_act_for_the_current_worker(pair: InProcessCluster) -> None:
    with pytest.raises(rpc.NotInitializedError, match="init_rpc"):
        rpc.rpc_sync("worker1", who)
    with pair[0].as_current():
        assert current() is pair[0]
        assert rpc.get_worker_info().name == "worker0"
        assert rpc.rpc_sync("worker1", who) == "worker1"
        with pair[1].as_current():
            assert rpc.rpc_async("worker0", who).wait() == "worker0"
            assert rpc.get_worker_info().id == 1
    with pytest.raises(rpc.NotInitializedError):
        rpc.get_worker_info()


# -- shutdown -----------------------------------------------------------------------------------------


def shut_down_all(workers: InProcessCluster, **options: float) -> list[BaseException]:
    """Shut all down side by side, as processes would; return what they raised."""
    errors: list[BaseException] = []

    def shut_down(worker: object) -> None:
        try:
            worker.shutdown(**options)  # type: ignore[attr-defined]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=shut_down, args=(worker,)) for worker in workers if not worker.closed]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return errors


def test_graceful_shutdown_waits_for_nested_work(trio: InProcessCluster, gate: str) -> None:
    done: list[bool] = []
    trio[0].rpc_async("worker1", call_gate, args=("worker2", gate)).add_done_callback(lambda f: done.append(f.value()))
    threading.Timer(0.3, open_gate, (gate,)).start()
    assert shut_down_all(trio) == []
    assert done == [True]


def test_graceful_shutdown_waits_for_work_that_a_callback_starts(trio: InProcessCluster, gate: str) -> None:
    done: list[str] = []
    first = trio[0].rpc_async("worker1", wait_for_gate, args=(gate,))
    first.add_done_callback(lambda _: done.append(trio[0].rpc_sync("worker2", who)))
    threading.Timer(0.2, open_gate, (gate,)).start()
    assert shut_down_all(trio) == []
    assert done == ["worker2"]


def test_graceful_shutdown_waits_for_all_to_ask(pair: InProcessCluster) -> None:
    over = threading.Event()
    thread = threading.Thread(target=lambda: (pair[0].shutdown(), over.set()))
    thread.start()
    assert not over.wait(0.2)
    assert pair[1].rpc_sync("worker0", who) == "worker0"
    pair[1].shutdown()
    thread.join(10)
    assert over.is_set()


def test_graceful_shutdown_ends_at_its_timeout(pair: InProcessCluster, gate: str) -> None:
    stuck = pair[0].rpc_async("worker1", wait_for_gate, args=(gate,))
    start = time.monotonic()
    errors = shut_down_all(pair, timeout=0.5)
    assert time.monotonic() - start < 3
    assert errors
    assert all(isinstance(error, rpc.RpcTimeoutError | rpc.WorkerLostError) for error in errors)
    open_gate(gate)
    with pytest.raises(rpc.BackhaulError):
        stuck.wait()


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_graceful_shutdown_with_a_dead_peer_names_it(trio: InProcessCluster, dead: int) -> None:
    trio[dead].shutdown(graceful=False)
    errors = shut_down_all(trio, timeout=20)
    assert len(errors) == 2
    for error in errors:
        assert isinstance(error, rpc.WorkerLostError)
        assert f"worker{dead}" in str(error)
    assert all(worker.closed for worker in trio)


def test_a_worker_that_was_shut_down_says_so(pair: InProcessCluster) -> None:
    pair[0].shutdown(graceful=False)
    with pytest.raises(rpc.NotInitializedError, match="shut down"):
        pair[0].rpc_sync("worker1", who)
    with pytest.raises(rpc.NotInitializedError, match="shut down"):
        pair[0].shutdown()
