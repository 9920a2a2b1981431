"""A pass ends with an error, at its deadline, or by an interrupt, and then no thread waits for it."""

from __future__ import annotations

import gc
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from acts import ACTS, Broken, Latch, act, behind_a_gate, break_on_purpose, chain, work
from endings import (
    await_gates,
    await_idle,
    backward_later,
    backward_via,
    chain_of_two,
    later,
    local_fork,
    remote_fork,
    times_out,
)
from models import WITHIN, W, await_no_leftovers, gradients, leaf, multiply
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import ProtocolError, RemoteError, RemoteTraceback, RpcTimeoutError
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Failed, Gradients

pytestmark = pytest.mark.usefixtures("quiet")


class Place(NamedTuple):
    """A model over several workers, and where a test can make it fail."""

    act: str
    worker: int
    program: Callable[[Tensor], Tensor]
    leaves: dict[int, str]
    """The weights, by the rank of their worker."""


PLACES = {
    "callee": Place("a", 1, lambda x: chain([("worker1", "a")], x), {1: "a"}),
    "two hops away": Place("b", 2, lambda x: chain([("worker1", "a"), ("worker2", "b")], x), {1: "a", 2: "b"}),
    "three hops away": Place(
        "c",
        3,
        lambda x: chain([("worker1", "a"), ("worker2", "b"), ("worker3", "c")], x),
        {1: "a", 2: "b", 3: "c"},
    ),
    "on the way back": Place("a", 1, lambda x: chain([("worker1", "a"), ("worker2", "b")], x), {1: "a", 2: "b"}),
    "initiator, at the start": Place("d", 0, lambda x: act("d", chain([("worker1", "a")], x)), {1: "a"}),
    "initiator, at the end": Place("d", 0, lambda x: chain([("worker1", "a")], act("d", x)), {1: "a"}),
    "called back": Place("c", 0, lambda x: chain([("worker1", "a"), ("worker0", "c")], x), {1: "a", 0: "c"}),
    "a worker that a gate waits for": Place("b", 2, lambda x: remote_fork(x), {2: "b", 3: "c"}),
    "a worker that another gate waits for": Place("c", 3, lambda x: remote_fork(x), {2: "b", 3: "c"}),
    "before its gates": Place("y!", 1, lambda x: remote_fork(x), {2: "b", 3: "c"}),
    "after its gates": Place("y", 1, lambda x: remote_fork(x), {2: "b", 3: "c"}),
    "a worker that the initiator's gate waits for": Place("c", 2, lambda x: local_fork(x), {1: "b", 2: "c"}),
    "initiator, before its gates": Place("y!", 0, lambda x: local_fork(x), {1: "b", 2: "c"}),
    "initiator, after its gates": Place("y", 0, lambda x: local_fork(x), {1: "b", 2: "c"}),
}


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)


def fails_there(ctx: int, loss: Tensor, worker: int, kind: type[Exception] = Broken, **options: Any) -> None:
    """Check that the pass raises the error of that worker, and names the worker."""
    with pytest.raises(kind, match="on purpose") as caught:
        dist_autograd.backward(ctx, [loss], **options)
    assert type(caught.value) is kind
    if worker == 0:
        text = "".join(traceback.format_exception(caught.value))
    else:
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteTraceback)
        assert cause.worker == f"worker{worker}"
        assert f"worker{worker}" in str(cause)
        text = cause.text
    assert "break_on_purpose" in text


@pytest.mark.parametrize("name", PLACES)
def test_an_error_is_raised_where_the_pass_was_started(five: InProcessCluster, name: str) -> None:
    place = PLACES[name]
    x = leaf(2, 4)
    ACTS[place.act] = break_on_purpose
    with five[0].as_current(), dist_autograd.context() as ctx:
        fails_there(ctx, place.program(x).sum(), place.worker)
        await_idle(five)
        # A new graph in the same context.
        ACTS.clear()
        dist_autograd.backward(ctx, [place.program(x).sum()])
        assert x in dist_autograd.get_gradients(ctx)
    await_no_leftovers(five)


@pytest.mark.parametrize("name", PLACES)
def test_failing_passes_harm_no_later_ones(five: InProcessCluster, name: str) -> None:
    """50 failing passes, then 51 good ones, over one graph."""
    place = PLACES[name]
    x = leaf(2, 4)
    leaves = [(0, x), *((rank, W[weight]) for rank, weight in place.leaves.items())]
    with five[0].as_current(), dist_autograd.context() as ctx:
        loss = place.program(x).sum()
        ACTS[place.act] = break_on_purpose
        for _ in range(50):
            fails_there(ctx, loss, place.worker, retain_graph=True)
        await_idle(five)
        assert all(worker.autograd.counts()["passes"] <= 2 for worker in five)
        ACTS.clear()
        # Workers that did not fail keep their gradients of failed passes. This pass makes sure that all are stored.
        dist_autograd.backward(ctx, [loss], retain_graph=True)
        before = [gradients(five, ctx)[rank].get(tensor, torch.zeros_like(tensor)).clone() for rank, tensor in leaves]
        dist_autograd.backward(ctx, [loss], retain_graph=True)
        once = [gradients(five, ctx)[rank][tensor] - old for (rank, tensor), old in zip(leaves, before, strict=True)]
        for _ in range(49):
            dist_autograd.backward(ctx, [loss], retain_graph=True)
        for (rank, tensor), old, one in zip(leaves, before, once, strict=True):
            torch.testing.assert_close(gradients(five, ctx)[rank][tensor] - old, 50 * one, rtol=1e-6, atol=1e-9)
        assert all(worker.autograd.counts()["passes"] <= 2 for worker in five)
    await_no_leftovers(five)
    # And the gradients are right.
    with five[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [place.program(x).sum()])
        for (rank, tensor), one in zip(leaves, once, strict=True):
            torch.testing.assert_close(gradients(five, ctx)[rank][tensor], one, rtol=1e-6, atol=1e-9)


def hooked(x: Tensor) -> Tensor:
    y = torch.sin(x)
    y.register_hook(lambda gradient: break_on_purpose())  # type: ignore[no-untyped-call]
    return y * 2


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_an_error_in_a_hook(trio: InProcessCluster, accumulate: Any) -> None:
    x = leaf(2, 4)
    with trio[0].as_current(), dist_autograd.context() as ctx:
        fails_there(ctx, rpc.rpc_sync("worker1", hooked, args=(x,)).sum(), 1, accumulate=accumulate)
        fails_there(ctx, hooked(x).sum(), 0, accumulate=accumulate)
        await_idle(trio)
        for register in (W["a"].register_hook, W["a"].register_post_accumulate_grad_hook):
            handle = register(lambda _: break_on_purpose())  # type: ignore[no-untyped-call]
            loss = rpc.rpc_sync("worker2", multiply, args=("a", leaf(4, 4))).sum()
            fails_there(ctx, loss, 2, retain_graph=True, accumulate=accumulate)
            handle.remove()
            dist_autograd.backward(ctx, [loss], accumulate=accumulate)
            await_idle(trio)
    x.grad = W["a"].grad = None
    await_no_leftovers(trio)


def test_an_error_frees_a_gate_that_waits_for_another_worker(five: InProcessCluster) -> None:
    """Worker 2 fails while worker 1 waits for worker 3, which is in the middle of its part."""
    with five[0].as_current(), dist_autograd.context() as ctx, Latch("c") as latch:
        loss = remote_fork(leaf(2, 4)).sum()

        def break_when_a_gate_waits() -> None:
            latch.await_entered()
            await_gates(five[1], 1)
            break_on_purpose()

        ACTS["b"] = break_when_a_gate_waits
        fails_there(ctx, loss, 2)
        await_gates(five[1], 0)
        assert not latch.released.is_set()
    await_idle(five)
    await_no_leftovers(five)


def test_an_error_elsewhere_frees_the_initiators_gate(trio: InProcessCluster) -> None:
    with trio[0].as_current(), dist_autograd.context() as ctx, Latch("c") as latch:
        loss = local_fork(leaf(2, 4)).sum()

        def break_when_a_gate_waits() -> None:
            latch.await_entered()
            await_gates(trio[0], 1)
            break_on_purpose()

        ACTS["b"] = break_when_a_gate_waits
        fails_there(ctx, loss, 1)
        await_gates(trio[0], 0)
    await_idle(trio)
    await_no_leftovers(trio)


def work_to_undo_last(name: str, x: Tensor) -> Tensor:
    """`work`, whose act comes after everything else that torch's engine runs with it."""
    result = work(name, x)
    result.grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]
    return result


def test_an_error_frees_gates_of_workers_that_only_a_third_one_knows(five: InProcessCluster) -> None:
    """Worker 0 calls 1, which calls 2, which calls 3, which waits in a gate for 4."""
    path = [("worker1", "a"), ("worker2", "b"), ("worker3", "c")]
    for breaks_at in ("timeout", "a1"):
        with five[0].as_current(), dist_autograd.context() as ctx, Latch("d") as latch:
            x = leaf(2, 4)
            loss = behind_a_gate("d", "worker4", path, x).sum() + act("a1", x * 2).sum()
            ACTS["d!"] = lambda: None
            if breaks_at == "timeout":
                with pytest.raises(rpc.RpcTimeoutError):
                    dist_autograd.backward(ctx, [loss], timeout=0.5)
            else:
                other = rpc.rpc_sync("worker1", work_to_undo_last, args=("e", x)).sum()

                def break_when_a_gate_waits(latch: Latch = latch) -> None:
                    latch.await_entered()
                    await_gates(five[3], 1)
                    break_on_purpose()

                ACTS["e"] = break_when_a_gate_waits
                fails_there(ctx, loss + other, 1)
            await_gates(five[3], 0)
            assert latch.entered.is_set()
            assert not latch.released.is_set()
        await_idle(five)
        await_no_leftovers(five)
        ACTS.clear()


def test_a_failed_pass_frees_a_gate_even_if_the_next_pass_comes_first() -> None:
    """Worker 1 hears of the next pass before it hears that the current pass, in which it waits, has failed."""
    faults = Faults(delay=1.0, kinds=(Failed,), delay_seconds=None)
    with InProcessCluster(4, faults=faults) as workers, workers[0].as_current():
        with dist_autograd.context() as ctx:
            loss = remote_fork(leaf(2, 4)).sum()
            with Latch("c") as latch:

                def break_when_a_gate_waits() -> None:
                    latch.await_entered()
                    await_gates(workers[1], 1)
                    break_on_purpose()

                ACTS["b"] = break_when_a_gate_waits
                faults.next("pass", Failed)
                fails_there(ctx, loss, 2, retain_graph=True)
                ACTS.clear()
                dist_autograd.backward(ctx, [loss], timeout=WITHIN)
                faults.release()
            await_idle(workers)
        await_no_leftovers(workers)


def test_errors_on_several_workers_at_once(five: InProcessCluster) -> None:
    """One of the errors is raised."""
    together = threading.Barrier(3)

    def break_together() -> None:
        together.wait(WITHIN)
        break_on_purpose()

    names = {"worker1": "a", "worker2": "b", "worker3": "c"}
    for name in names.values():
        ACTS[name] = break_together
    with five[0].as_current(), dist_autograd.context() as ctx:
        loss = torch.stack([rpc.rpc_sync(to, work, args=(name, leaf(2, 4))) for to, name in names.items()]).sum()
        for _ in range(20):
            with pytest.raises(Broken) as caught:
                dist_autograd.backward(ctx, [loss], retain_graph=True)
            assert isinstance(caught.value.__cause__, RemoteTraceback)
            assert caught.value.__cause__.worker in names
            await_idle(five)
        ACTS.clear()
        dist_autograd.backward(ctx, [loss])
    await_no_leftovers(five)


def test_an_error_whose_type_is_not_available_here(pair: InProcessCluster) -> None:
    class Local(Exception):
        pass

    def break_locally() -> None:
        raise Local("on purpose")

    def leave_python() -> None:
        raise SystemExit("on purpose")

    with pair[0].as_current(), dist_autograd.context() as ctx:
        loss = rpc.rpc_sync("worker1", work, args=("a", leaf(2, 4))).sum()
        for act_, type_name in ((break_locally, "Local"), (leave_python, "SystemExit")):
            ACTS["a"] = act_
            with pytest.raises(RemoteError, match="on purpose") as caught:
                dist_autograd.backward(ctx, [loss], retain_graph=True)
            assert caught.value.worker == "worker1"
            assert caught.value.type_name.endswith(type_name)
            assert act_.__name__ in caught.value.remote_traceback
        ACTS.clear()
        dist_autograd.backward(ctx, [loss])
    await_no_leftovers(pair)


def test_an_error_with_arguments_of_its_own(pair: InProcessCluster) -> None:
    def look_up() -> None:
        raise KeyError("on purpose", 7)

    ACTS["a"] = look_up
    with pair[0].as_current(), dist_autograd.context() as ctx:
        loss = rpc.rpc_sync("worker1", work, args=("a", leaf(2, 4))).sum()
        with pytest.raises(KeyError, match="on purpose") as caught:
            dist_autograd.backward(ctx, [loss])
        assert caught.value.args == ("on purpose", 7)


def mismatched(x: Tensor) -> Tensor:
    y = x.exp()
    y_old = y * 1
    y.add_(1)  # exp saves its result
    return y + y_old


def test_an_error_of_torchs_own(pair: InProcessCluster) -> None:
    with pair[0].as_current(), dist_autograd.context() as ctx:
        loss = rpc.rpc_sync("worker1", mismatched, args=(leaf(2, 4),)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            dist_autograd.backward(ctx, [loss])
        assert isinstance(caught.value.__cause__, RemoteTraceback)
        assert caught.value.__cause__.worker == "worker1"
        await_idle(pair)
    await_no_leftovers(pair)


def test_a_second_pass_without_retain_graph(trio: InProcessCluster) -> None:
    """Every attempt raises torch's own error, from the first worker that has it."""
    with trio[0].as_current(), dist_autograd.context() as ctx:
        loss = remote_square(leaf(2, 4))
        dist_autograd.backward(ctx, [loss])
        for _ in range(5):
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                dist_autograd.backward(ctx, [loss])
        await_idle(trio)
        dist_autograd.backward(ctx, [remote_square(leaf(2, 4))])
    await_no_leftovers(trio)


def remote_square(x: Tensor) -> Tensor:
    loss: Tensor = rpc.rpc_sync("worker1", torch.square, args=(x,)).sum()
    return loss


def test_a_pass_that_another_worker_started_fails_there(trio: InProcessCluster) -> None:
    """Worker 1 runs a pass in the context of worker 0."""
    ACTS["b"] = break_on_purpose
    with trio[0].as_current(), dist_autograd.context() as ctx:
        with pytest.raises(Broken, match="on purpose"):
            rpc.rpc_sync("worker1", backward_via, args=(ctx, "worker2", leaf(2, 4)))
        assert rpc.rpc_sync("worker1", error_of_backward_via, args=(ctx, "worker2", leaf(2, 4))) == (
            "Broken",
            "worker2",
        )
        await_idle(trio)
        ACTS.clear()
        rpc.rpc_sync("worker1", backward_via, args=(ctx, "worker2", leaf(2, 4)))
    await_no_leftovers(trio)


def error_of_backward_via(ctx: int, to: str, x: Tensor) -> tuple[str, str]:
    try:
        backward_via(ctx, to, x)
    except Broken as error:
        return type(error).__name__, getattr(error.__cause__, "worker", "")
    raise AssertionError("it returned")


@pytest.mark.parametrize("seed", range(4))
def test_errors_with_messages_in_any_order(seed: int) -> None:
    with InProcessCluster(4, seed=seed) as workers, workers[0].as_current():
        for breaks in ("b", "c", "y"):
            with dist_autograd.context() as ctx:
                loss = remote_fork(leaf(2, 4)).sum()
                ACTS[breaks] = break_on_purpose
                fails_there(ctx, loss, {"b": 2, "c": 3, "y": 1}[breaks], retain_graph=True)
                ACTS.clear()
                dist_autograd.backward(ctx, [loss])
            await_no_leftovers(workers)


def test_the_timeout_holds_while_a_worker_computes(trio: InProcessCluster) -> None:
    with trio[0].as_current(), dist_autograd.context() as ctx:
        for path in ([("worker1", "a")], [("worker1", "b"), ("worker2", "a")]):
            with Latch("a") as latch:
                loss = chain(path, leaf(2, 4)).sum()
                times_out(ctx, loss, retain_graph=True)
                assert latch.entered.is_set()
            await_idle(trio)
            dist_autograd.backward(ctx, [loss], timeout=WITHIN)
    await_no_leftovers(trio)


def test_the_timeout_says_where_the_pass_goes_on(trio: InProcessCluster) -> None:
    with trio[0].as_current(), dist_autograd.context() as ctx:
        with Latch("a"):
            loss = chain([("worker1", "b"), ("worker2", "a")], leaf(2, 4)).sum()
            with pytest.raises(RpcTimeoutError, match=r"its timeout of 0\.3 s: rank .* has gradients to work on"):
                dist_autograd.backward(ctx, [loss], timeout=0.3)
        await_idle(trio)
    await_no_leftovers(trio)


def test_the_timeout_holds_for_a_gate_on_the_initiators_thread(trio: InProcessCluster) -> None:
    with trio[0].as_current(), dist_autograd.context() as ctx:
        with Latch("c") as latch:
            loss = local_fork(leaf(2, 4)).sum()
            times_out(ctx, loss, retain_graph=True)
            assert latch.entered.is_set()
            assert trio[0].autograd.counts()["gates"] == 0
        await_idle(trio)
        dist_autograd.backward(ctx, [loss], timeout=WITHIN)
    await_no_leftovers(trio)


def test_the_timeout_frees_gates_elsewhere(five: InProcessCluster) -> None:
    with five[0].as_current(), dist_autograd.context() as ctx:
        with Latch("c") as latch, Latch("b"):
            loss = remote_fork(leaf(2, 4)).sum()
            times_out(ctx, loss, retain_graph=True)
            assert latch.entered.is_set()
            await_gates(five[1], 0)
        await_idle(five)
        dist_autograd.backward(ctx, [loss], timeout=WITHIN)
    await_no_leftovers(five)


def test_a_timeout_that_is_not_reached_changes_nothing(trio: InProcessCluster) -> None:
    x = leaf(2, 4)
    with trio[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [local_fork(x).sum()], timeout=WITHIN)
        with_timeout = dist_autograd.get_gradients(ctx)[x]
    with trio[0].as_current(), dist_autograd.context() as ctx:
        dist_autograd.backward(ctx, [local_fork(x).sum()], timeout=0)
        assert torch.equal(dist_autograd.get_gradients(ctx)[x], with_timeout)


def test_many_passes_in_one_context_do_not_pile_up(five: InProcessCluster) -> None:
    """Any worker may start a pass; some passes fail, and some do not reach all workers."""
    with five[0].as_current(), dist_autograd.context() as ctx:
        losses = [remote_fork(leaf(2, 4)).sum(), chain_of_two(leaf(2, 4)).sum(), local_fork(leaf(2, 4)).sum()]
        for number in range(200):
            dist_autograd.backward(ctx, [losses[number % 3]], retain_graph=True)
            assert max(worker.autograd.counts()["passes"] for worker in five) <= 4
        for _ in range(10):
            rpc.rpc_sync("worker1", backward_via, args=(ctx, "worker2", leaf(2, 4)))
        ACTS["b"] = break_on_purpose
        for number in range(60):
            with pytest.raises(Broken):
                dist_autograd.backward(ctx, [losses[number % 3]], retain_graph=True)
        await_idle(five)
        assert max(worker.autograd.counts()["passes"] for worker in five) <= 4
        records = [worker.autograd.contexts.find(ctx) for worker in five[:4]]
        assert max(len(record.aborted) for record in records) <= 4
        assert all(record.told <= set(range(5)) for record in records)
    await_no_leftovers(five)


def test_passes_on_several_threads_fail_apart(five: InProcessCluster) -> None:
    """In one context, over separate graphs. Only passes that reach the act fail."""
    ACTS["b"] = break_on_purpose
    with five[0].as_current(), dist_autograd.context() as ctx:
        for _ in range(5):
            bad = [chain_of_two(leaf(2, 4)).sum() for _ in range(3)]
            good = [chain([("worker1", "a"), ("worker3", "c")], leaf(2, 4)).sum() for _ in range(3)]
            failing = [backward_later(five, 0, ctx, loss) for loss in bad]
            succeeding = [backward_later(five, 0, ctx, loss) for loss in good]
            for running in failing:
                with pytest.raises(Broken):
                    running.result(WITHIN)
            for running in succeeding:
                running.result(WITHIN)
        await_idle(five)
    await_no_leftovers(five)


@pytest.mark.parametrize("program", ["chain_of_two", "local_fork", "remote_fork"])
def test_an_interrupt_from_the_keyboard(five: InProcessCluster, program: str) -> None:
    """The main thread stops waiting at once, wherever in the pass it waits, and so do the workers that wait for it."""
    main = threading.get_ident()
    with Latch("b") as latch, Latch("c"):

        def interrupt() -> None:
            latch.await_entered()
            if program == "local_fork":
                await_gates(five[0], 1)
            signal.pthread_kill(main, signal.SIGINT)

        with five[0].as_current(), dist_autograd.context() as ctx:
            loss = globals()[program](leaf(2, 4)).sum()
            interrupting = later(interrupt)
            with pytest.raises(KeyboardInterrupt):
                dist_autograd.backward(ctx, [loss])
            interrupting.result(WITHIN)
            for worker in five:
                await_gates(worker, 0)
    await_no_leftovers(five)


def test_a_failed_pass_keeps_no_tensors_alive(five: InProcessCluster) -> None:
    x = leaf(2, 4)
    kept = weakref.ref(x)
    ACTS["b"] = break_on_purpose
    with five[0].as_current():
        for program in (chain_of_two, local_fork, remote_fork):
            with dist_autograd.context() as ctx:
                loss = program(x).sum()
                try:
                    dist_autograd.backward(ctx, [loss])
                except Broken:
                    del loss
    del x
    await_idle(five)
    await_no_leftovers(five)
    deadline = time.monotonic() + WITHIN
    while kept() is not None:
        gc.collect()
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_pass_that_has_failed_elsewhere_stores_no_gradients(five: InProcessCluster) -> None:
    """Worker 2 fails while worker 1 is in the middle of its run, after which nothing follows."""

    def forked(x: Tensor) -> Tensor:
        return chain([("worker1", "a")], x.detach()) + chain([("worker2", "b")], x)

    with Latch("a") as latch, five[0].as_current(), dist_autograd.context() as ctx:

        def fail_meanwhile() -> None:
            latch.await_entered()
            break_on_purpose()

        ACTS["b"] = fail_meanwhile
        loss = forked(leaf(2, 4)).sum()
        with pytest.raises(Broken):
            dist_autograd.backward(ctx, [loss])
        record = five[1].autograd.contexts.find(ctx)
        await_that(lambda: bool(record.aborted))
        latch.released.set()
        await_idle(five)
        assert not record.gradients
    await_no_leftovers(five)


def test_gradients_from_the_wrong_worker_fail_the_pass(five: InProcessCluster) -> None:
    """Worker 3 sends gradients for a tensor that was sent to worker 2."""
    with Latch("b") as latch, five[0].as_current(), dist_autograd.context() as ctx:
        running = backward_later(five, 0, ctx, chain_of_two(leaf(2, 4)).sum())
        latch.await_entered()
        record = five[1].autograd.contexts.find(ctx)
        (source,) = [source for source, send in record.sends.items() if send.to.id == 2]
        (local,) = record.passes.values()
        five[3].agent.post(five[1].info, Gradients(local.backward, (source,), (0,)), [torch.ones(2, 4)])
        with pytest.raises(ProtocolError, match="worker3"):
            running.result(WITHIN)
    await_idle(five)
    await_no_leftovers(five)


def test_hooks_after_accumulation_delay_only_passes_to_the_same_leaf(trio: InProcessCluster) -> None:
    """No thread waits longer than its own pass, since no lock is held while a user's hook runs."""
    shared, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    inside, released = threading.Event(), threading.Event()

    def hold(_: Tensor) -> None:
        inside.set()
        released.wait(20)

    handles = [
        shared.register_post_accumulate_grad_hook(hold),  # type: ignore[no-untyped-call]
        other.register_post_accumulate_grad_hook(lambda _: None),  # type: ignore[no-untyped-call]
    ]

    def run(worker: int, leaf: torch.Tensor, timeout: float) -> None:
        with trio[worker].as_current(), dist_autograd.context() as ctx:
            dist_autograd.backward(ctx, [(leaf * 2).sum()], timeout=timeout)

    first = threading.Thread(target=run, args=(0, shared, 30))
    first.start()
    try:
        assert inside.wait(10)
        run(1, other, 10)
        with pytest.raises(RpcTimeoutError, match="another pass is using the"):
            run(2, shared, 0.3)
    finally:
        released.set()
        first.join(20)
        for handle in handles:
            handle.remove()
    assert not first.is_alive()
    run(2, shared, 10)
    assert shared.grad is None
