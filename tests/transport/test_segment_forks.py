"""Processes that fork while they have tensors in segments: each has its own copy then, as of all other memory."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from segment_links import Link, MiB, in_segment, numbered, resident

from backhaul import rpc
from crew import Crew, Hand

FAR = 3
"""After this many trips, the memory of a deleted tensor has been used again."""


@pytest.fixture(scope="module")
def hand() -> Iterator[Hand]:
    """A process that forks instead of this one."""
    with Crew(1, group=False) as crew:
        yield crew[0]


class Child:
    """A forked process. It works when the parent tells it to, and reports whether all was well."""

    def __init__(self, work: Callable[[], bool]) -> None:
        readable, self._go = os.pipe()
        self._pid = os.fork()
        if self._pid:
            os.close(readable)
            return
        good = False
        try:
            os.close(self._go)
            os.read(readable, 1)
            good = work()
        finally:
            os._exit(0 if good else 1)

    def finish(self) -> bool:
        os.write(self._go, b"!")  # closing it would not do: children that were forked later have it too
        os.close(self._go)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1]) == 0


def received(link: Link, number: int = 1) -> torch.Tensor:
    link.expect(MiB)
    (got,) = link.trip(numbered(number))
    assert in_segment(got)
    return got


def parent_writes() -> None:
    link = Link()
    got = received(link)
    child = Child(lambda: torch.equal(got, numbered(1)))
    got.fill_(9)  # before the child does anything
    assert child.finish()
    link.close()


def child_writes() -> None:
    link = Link()
    got = received(link)
    part = got[100:]

    def write() -> bool:
        got.fill_(5)
        return bool(part.eq(5).all())

    assert Child(write).finish()
    assert torch.equal(got, numbered(1))
    link.close()


def parent_lets_go() -> None:
    link = Link()
    got = received(link)
    child = Child(partial(torch.equal, got, numbered(1)))
    del got
    for number in range(10, 10 + FAR):
        (other,) = link.trip(numbered(number))
        assert in_segment(other)
        assert torch.equal(other, numbered(number))
        del other
    assert child.finish()
    link.close()


def child_lets_go() -> None:
    link = Link()
    tensors = [received(link)]

    def let_go() -> bool:
        tensors.clear()
        gc.collect()
        return True

    assert Child(let_go).finish()
    for number in range(10, 10 + FAR):
        (other,) = link.trip(numbered(number))
        assert torch.equal(other, numbered(number))
        assert torch.equal(tensors[0], numbered(1))
    link.close()


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def many_forks_and_many_tensors() -> None:
    link = Link()
    link.expect(MiB)
    kept = [link.trip(numbered(number))[0] for number in range(4)]
    children = []
    for round in range(4):
        children.append(Child(partial(are_equal, list(kept), [tensor.clone() for tensor in kept])))
        kept[round].fill_(round)
        kept += link.trip(numbered(10 + round))
    for child in children:
        assert child.finish()
    link.close()


def several_threads_fork() -> None:
    link = Link()
    got = received(link)
    good: list[bool] = []

    def fork() -> None:
        for _ in range(5):
            good.append(Child(lambda: torch.equal(got, numbered(1))).finish())

    threads = [threading.Thread(target=fork) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 20
    link.close()


def memory_is_given_back() -> None:
    """Memory of a tensor that two processes had is not used again, but it is freed."""
    link = Link()
    got = received(link)
    child = Child(lambda: True)
    assert child.finish()
    del got
    gc.collect()
    link.close()
    assert resident() == 0


FORKS = [
    parent_writes,
    child_writes,
    parent_lets_go,
    child_lets_go,
    many_forks_and_many_tensors,
    several_threads_fork,
    memory_is_given_back,
]


@pytest.mark.parametrize("scene", FORKS, ids=lambda scene: scene.__name__)
def test_a_fork(hand: Hand, scene: Callable[[], None]) -> None:
    hand.run(scene)


def check_and_write(tensor: torch.Tensor, expected: torch.Tensor, go: threading.Event) -> None:
    assert go.wait(20)
    assert torch.equal(tensor, expected)
    tensor.fill_(5)


def by_multiprocessing() -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] those may have no children
    context = multiprocessing.get_context("fork")
    link = Link()
    got = received(link)
    go = context.Event()
    process = context.Process(target=check_and_write, args=(got, numbered(1), go))
    process.start()
    got.fill_(9)
    go.set()
    process.join(30)
    assert process.exitcode == 0
    assert got.eq(9).all()
    link.close()


def test_a_fork_by_multiprocessing(hand: Hand) -> None:
    hand.run(by_multiprocessing)


def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


def fork_between_calls() -> None:
    """The child closes its copies of the parent's connections, and the parent goes on using them."""
    x = numbered(1).view(torch.int64)
    for number in range(12):
        y = rpc.rpc_sync("worker1", negated, args=(x + number,))
        assert torch.equal(y, -x - number)
        if number % 4 == 3:
            child = Child(partial(torch.equal, y, y.clone()))
            y.zero_()
            assert child.finish()


def test_a_worker_that_forks_goes_on_with_its_segments() -> None:
    with Crew(2) as crew:
        crew[0].run(fork_between_calls)
        crew[1].run(fork_between_calls_back)


def fork_between_calls_back() -> None:
    x = numbered(3).view(torch.int64)
    for number in range(6):
        assert torch.equal(rpc.rpc_sync("worker0", negated, args=(x + number,)), -x - number)
        assert Child(lambda: True).finish()
