"""Future: a torch future that can be awaited. Waiting threads help to complete it; callbacks keep their contexts."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backhaul.agent.future import Future

SOON = 10.0
where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


def done(value: Any = 5) -> Future[Any]:
    future: Future[Any] = Future()
    future.settle(value)
    return future


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.settle(None, error)
    return future


def later(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


# Values and errors.


def test_our_future_is_a_torch_future() -> None:
    future = done()
    assert isinstance(future, torch.futures.Future)
    assert future.done()
    assert future.wait() == future.value() == 5


@pytest.mark.parametrize("value", [None, 0, "text", torch.ones(2), [torch.ones(1), {"a": 1}], object()])
def test_any_value(value: Any) -> None:
    assert done(value).wait() is value


def test_wait_returns_when_another_thread_completes_the_future() -> None:
    future: Future[int] = Future()
    assert not future.done()
    thread = later(lambda: future.settle(7))
    assert future.wait() == 7
    thread.join()


def test_all_waiting_threads_get_the_value() -> None:
    future: Future[int] = Future()
    got: list[int] = []
    threads = [later(lambda: got.append(future.wait())) for _ in range(5)]
    future.set_result(3)
    for thread in threads:
        thread.join(SOON)
    assert got == [3] * 5


@pytest.mark.parametrize("how", ["settle", "set_exception"])
def test_an_error_is_raised_each_time(how: str) -> None:
    future: Future[Any] = Future()
    error = ValueError("no")
    if how == "settle":
        future.settle(None, error)
    else:
        future.set_exception(error)
    raised = []
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            future.wait()
        raised.append(caught.value)
    with pytest.raises(ValueError, match="no"):
        future.value()
    assert future.done()
    # Each raise collects its own frames.
    assert raised[0] is not raised[1]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit])
def test_base_exceptions_are_raised_too(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        failed(kind("over")).wait()


# Help.


def test_a_waiting_thread_helps_to_complete_the_future() -> None:
    helped = []

    def help() -> None:
        helped.append(threading.current_thread())
        future.settle(5)

    future: Future[int] = Future(help=help)
    assert future.wait() == 5
    assert helped == [threading.current_thread()]
    assert future.wait() == 5
    assert len(helped) == 1


def test_a_complete_future_asks_for_no_help() -> None:
    future: Future[int] = Future(help=lambda: pytest.fail("no help was needed"))
    future.set_result(1)
    assert future.wait() == 1
    future.help()
    future.attend()


@pytest.mark.parametrize(
    "use",
    [
        lambda future: future.then(lambda f: f.value()),
        lambda future: future.add_done_callback(lambda f: None),
        lambda future: future.when_done(lambda f: None),
    ],
    ids=["then", "add_done_callback", "when_done"],
)
def test_a_future_with_callbacks_is_attended_to(use: Callable[[Future[Any]], Any]) -> None:
    attended: list[int] = []
    future: Future[int] = Future(attend=lambda: attended.append(1))
    use(future)
    assert attended == [1]
    future.settle(1)


def test_a_thread_that_waits_for_a_chain_helps_with_its_first_future() -> None:
    attended: list[int] = []

    def help() -> None:
        first.settle(1)

    first: Future[int] = Future(help=help, attend=lambda: attended.append(1))
    last = first.then(lambda f: f.value() + 1).then(lambda f: f.value() * 10)
    assert attended
    assert last.wait() == 20


def test_a_complete_future_drops_its_help_functions() -> None:
    class Thing:
        def help(self) -> None:
            pass

    thing = Thing()
    gone = weakref.ref(thing)
    future: Future[int] = Future(help=thing.help, attend=thing.help)
    future.settle(1)
    del thing
    assert gone() is None
    assert future.wait() == 1


# Callbacks.


def test_then_chains() -> None:
    future: Future[int] = Future()
    chained = future.then(lambda f: f.value() + 1).then(lambda f: f.value() * 2)
    assert isinstance(chained, Future)
    assert not chained.done()
    future.settle(4)
    assert chained.wait() == 10


def test_then_on_a_complete_future_runs_at_once() -> None:
    assert done(4).then(lambda f: f.value() + 1).wait() == 5


def test_a_callback_gets_the_future_itself() -> None:
    future: Future[int] = Future()
    got: list[Any] = []
    future.then(got.append)
    future.add_done_callback(got.append)
    future.settle(1)
    assert got == [future, future]


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_exception_of_a_callback_fails_the_child_future(kind: type[BaseException]) -> None:
    def fail(_: Any) -> None:
        raise kind("in the callback")

    child = done().then(fail)
    with pytest.raises(kind, match="in the callback"):
        child.wait()
    with pytest.raises(kind):
        child.then(lambda f: f.value()).wait()


def test_an_error_passes_down_a_chain_until_a_callback_catches_it() -> None:
    def take(future: torch.futures.Future[Any]) -> str:
        try:
            future.value()
        except ValueError as error:
            return f"took {error}"
        return "nothing"

    future: Future[int] = Future()
    chained = future.then(lambda f: f.value()).then(lambda f: f.value()).then(take)
    future.settle(None, ValueError("no"))
    assert chained.wait() == "took no"


def test_only_callbacks_of_the_user_mark_a_future() -> None:
    future: Future[int] = Future()
    future.when_done(lambda f: None)
    assert not future.has_callbacks
    future.add_done_callback(lambda f: None)
    assert future.has_callbacks
    other: Future[int] = Future()
    child = other.then(lambda f: f.value())
    assert other.has_callbacks
    assert not child.has_callbacks
    future.settle(1)
    other.settle(1)


@pytest.mark.parametrize("how", ["then", "add_done_callback"])
def test_callbacks_run_in_the_context_they_were_made_in(how: str) -> None:
    future: Future[int] = Future()
    seen: list[str] = []

    def make() -> None:
        where.set("where it was made")
        getattr(future, how)(lambda f: seen.append(where.get()))

    contextvars.copy_context().run(make)

    def complete() -> None:
        where.set("where it was completed")
        future.settle(1)
        seen.append(where.get())

    later(complete).join()
    assert seen == ["where it was made", "where it was completed"]


def test_context_variables_that_a_callback_sets_do_not_leak() -> None:
    future: Future[int] = Future()
    future.add_done_callback(lambda f: where.set("inside"))
    future.settle(1)
    assert where.get() == "nowhere"


def test_callbacks_run_once_and_in_order() -> None:
    future: Future[int] = Future()
    ran: list[int] = []
    for number in range(5):
        future.add_done_callback(lambda f, number=number: ran.append(number))
    future.settle(1)
    future.add_done_callback(lambda f: ran.append(5))
    assert ran == [0, 1, 2, 3, 4, 5]


# Torch's own functions.


def test_collect_all_and_wait_all() -> None:
    futures: list[Future[int]] = [Future() for _ in range(3)]
    together = torch.futures.collect_all(futures)
    thread = later(lambda: [future.settle(number) for number, future in enumerate(futures)] and None)
    assert [future.value() for future in together.wait()] == [0, 1, 2]
    assert torch.futures.wait_all(futures) == [0, 1, 2]
    thread.join()


def test_wait_all_raises_the_error_of_one_future() -> None:
    futures = [done(1), failed(ValueError("no")), done(2)]
    with pytest.raises(ValueError, match="no"):
        torch.futures.wait_all(futures)


def test_then_of_torch_works_on_our_futures() -> None:
    collected = torch.futures.collect_all([done(1), done(2)])
    total = collected.then(lambda f: sum(future.value() for future in f.value()))
    assert total.wait() == 3


# Asyncio.


def test_a_complete_future_can_be_awaited() -> None:
    async def main() -> int:
        return await done(5)

    assert asyncio.run(main()) == 5


def test_a_future_that_another_thread_completes_can_be_awaited() -> None:
    attended = threading.Event()
    future: Future[int] = Future(attend=attended.set)

    def complete() -> None:
        assert attended.wait(SOON)
        future.settle(7)

    async def main() -> int:
        return await future

    thread = later(complete)
    assert asyncio.run(main()) == 7
    thread.join()


def test_awaiting_does_not_block_the_loop() -> None:
    future: Future[str] = Future()

    async def complete() -> None:
        future.settle("by another task")

    async def main() -> str:
        task = asyncio.create_task(complete())
        value = await future
        await task
        return value

    assert asyncio.run(asyncio.wait_for(main(), SOON)) == "by another task"


def test_awaiting_raises_the_error() -> None:
    future: Future[int] = Future()

    async def main() -> None:
        asyncio.get_running_loop().call_soon(future.settle, None, ValueError("no"))
        await future

    with pytest.raises(ValueError, match="no"):
        asyncio.run(main())


def test_many_futures_can_be_gathered() -> None:
    futures: list[Future[int]] = [Future() for _ in range(20)]

    async def wrap(future: Future[int]) -> int:
        return await future

    async def main() -> list[int]:
        return await asyncio.gather(*map(wrap, futures))

    thread = later(lambda: [future.settle(number) for number, future in enumerate(futures)] and None)
    assert asyncio.run(main()) == list(range(20))
    thread.join()


def test_a_task_that_was_cancelled_is_not_woken() -> None:
    future: Future[int] = Future()

    async def wrap() -> int:
        return await future

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wrap(), 0.01)
        future.settle(1)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert future.wait() == 1


def test_a_loop_that_is_closed_is_not_woken() -> None:
    future: Future[int] = Future()

    async def wrap() -> None:
        await future

    loop = asyncio.new_event_loop()
    task = loop.create_task(wrap())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    future.settle(1)
    assert future.wait() == 1


def test_awaiting_does_not_mark_a_future_as_carrying_user_code() -> None:
    future: Future[int] = Future()

    async def main() -> int:
        asyncio.get_running_loop().call_soon(future.settle, 1)
        return await future

    assert asyncio.run(main()) == 1
    assert not future.has_callbacks


# Memory.


def test_a_failed_future_keeps_nothing_alive() -> None:
    """The garbage collector cannot look inside torch's object, so nothing stored there may refer to frames."""

    class Thing:
        pass

    def fail() -> weakref.ref[Thing]:
        thing = Thing()
        future: Future[int] = Future()
        try:
            raise ValueError("no")
        except ValueError as error:
            future.set_exception(error)
        with pytest.raises(ValueError):
            future.wait()
        assert thing is not None
        return weakref.ref(thing)

    gone = fail()
    gc.collect()
    assert gone() is None


def test_waiting_for_an_unattended_future_uses_no_cpu() -> None:
    future: Future[int] = Future()
    used: list[float] = []

    def wait() -> None:
        before = time.thread_time()
        future.wait()
        used.append(time.thread_time() - before)

    thread = later(wait)
    thread.join(0.2)
    future.settle(1)
    thread.join(SOON)
    assert used[0] < 0.1
