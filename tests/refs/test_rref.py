"""References between workers of one process: what they mean, how they travel, when values go."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from backhaul import rpc
from backhaul.rpc import RpcOptions, RRef
from backhaul.testing import Faults, InProcessCluster
from backhaul.wire.messages import Call, Create, Fetch

WITHIN = 10.0


class Account:
    made = 0

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    def where(self) -> str:
        return rpc.get_worker_info().name

    def fail(self) -> None:
        raise ValueError("overdrawn")

    async def add_later(self, amount: int) -> int:
        await asyncio.sleep(0)
        return self.add(amount)

    @rpc.functions.async_execution
    def ask(self, to: str) -> torch.futures.Future[str]:
        return rpc.rpc_async(to, who)


def who() -> str:
    return rpc.get_worker_info().name


def fetch(rref: RRef[Any], *_: Any) -> Any:
    return rref.to_here()


def facts(rref: RRef[Any]) -> tuple[bool, str, bool]:
    return rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner()


def local(rref: RRef[Any]) -> Any:
    return rref.local_value()


def same(rref: RRef[Any]) -> RRef[Any]:
    return rref


def make_here(value: Any) -> RRef[Any]:
    return RRef(value)


def fail() -> None:
    raise ValueError("could not be made")


def round_trip(rref: RRef[Any], path: list[str]) -> Any:
    return rpc.rpc_sync(path[0], round_trip, args=(rref, path[1:])) if path else rref.to_here()


_kept: dict[str, Any] = {}


def keep(name: str, value: Any) -> None:
    _kept[name] = value


def let_go(name: str) -> None:
    del _kept[name]


def keep_made_here(name: str) -> RRef[Any]:
    _kept[name] = RRef(torch.ones(3))
    return _kept[name]


_gates: dict[str, threading.Event] = {}


def wait_then(name: str, value: Any) -> Any:
    assert _gates[name].wait(20)
    return value


@pytest.fixture
def gate() -> str:
    name = f"gate-{len(_gates)}"
    _gates[name] = threading.Event()
    return name


@pytest.fixture(params=["memory", "sockets"])
def workers(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    """Three workers; the first is current. At the end no worker has any value or reference left."""
    with InProcessCluster(3, sockets=request.param == "sockets") as made, made[0].as_current():
        yield made
        _kept.clear()
        assert_all_free(made)


def assert_all_free(workers: InProcessCluster) -> None:
    gc.collect()
    wait_until(lambda: not any(any(worker.references.counts().values()) for worker in workers if not worker.closed))


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WITHIN
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        threading.Event().wait(0.002)


def values_on(worker: Any) -> int:
    return worker.references.counts()["values"]


# What a reference is.


def test_remote_value_and_its_owner(workers: InProcessCluster) -> None:
    rref = rpc.remote("worker1", torch.add, args=(torch.ones(2), 1))
    assert rref.to_here().tolist() == [2.0, 2.0]
    assert rref.owner() == rpc.WorkerInfo(1, "worker1")
    assert rref.owner_name() == "worker1"
    assert not rref.is_owner()
    wait_until(rref.confirmed_by_owner)
    assert "UserRRef" in repr(rref)
    assert "worker1" in repr(rref)
    with pytest.raises(rpc.MisuseError, match="only the owner has the value"):
        rref.local_value()
    assert values_on(workers[1]) == 1


def test_local_reference(workers: InProcessCluster) -> None:
    value = torch.ones(2)
    rref = RRef(value)
    assert rref.to_here() is value
    assert rref.local_value() is value
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert "OwnerRRef" in repr(rref)
    assert rpc.rpc_sync("worker1", fetch, args=(rref,)).tolist() == [1.0, 1.0]


def test_remote_to_oneself(workers: InProcessCluster) -> None:
    rref = rpc.remote("worker0", Account, args=(5,))
    assert rref.is_owner()
    assert rref.to_here() is rref.local_value()
    assert rref.rpc_sync().add(1) == 6
    failed = rpc.remote("worker0", fail)
    with pytest.raises(ValueError, match="could not be made"):
        failed.to_here()


def test_a_reference_is_the_value_itself_on_the_owner(workers: InProcessCluster) -> None:
    rref = rpc.remote("worker1", Account, args=(5,))
    assert rpc.rpc_sync("worker1", facts, args=(rref,)) == (True, "worker1", True)
    assert rpc.rpc_sync("worker1", local, args=(rref,)).balance == 5
    assert rpc.rpc_sync("worker2", facts, args=(rref,))[:2] == (False, "worker1")


def test_references_travel_in_containers_results_and_rings(workers: InProcessCluster) -> None:
    rref = rpc.remote("worker1", Account, args=(7,))
    both = rpc.rpc_sync("worker2", same, args=({"a": [rref, rref], "b": Holder(rref)},))
    assert both["a"][0].to_here().balance == 7
    assert both["b"].rref.rpc_sync().add(1) == 8
    assert rpc.rpc_sync("worker2", round_trip, args=(rref, ["worker1", "worker0", "worker2"])).balance == 8
    made = rpc.rpc_sync("worker2", make_here, args=(torch.ones(1),))
    assert made.owner_name() == "worker2"
    assert made.to_here().item() == 1
    nested = rpc.remote("worker2", same, args=(rref,))
    assert nested.to_here().to_here().balance == 8


class Holder:
    """Travels as a pickle."""

    def __init__(self, rref: RRef[Any]) -> None:
        self.rref = rref


def test_proxies(workers: InProcessCluster) -> None:
    rref = rpc.remote("worker1", Account, args=(1,))
    assert rref.rpc_sync().add(2) == 3
    assert rref.rpc_async().add(amount=3).wait() == 6
    assert rref.remote().add(4).to_here() == 10
    assert rref.rpc_sync().where() == "worker1"
    assert rref.rpc_sync().add_later(5) == 15
    assert rref.rpc_sync().ask("worker2") == "worker2"
    assert rref._get_type() is Account
    assert rref._get_type(blocking=False).wait() is Account
    with pytest.raises(ValueError, match="overdrawn"):
        rref.rpc_sync().fail()
    with pytest.raises(AttributeError, match="missing"):
        rref.rpc_sync().missing()
    _gates["never"] = threading.Event()
    slow = rpc.remote("worker1", wait_then, args=("never", 1))
    with pytest.raises(rpc.RpcTimeoutError):
        slow.rpc_sync(timeout=0.1).bit_length()
    _gates["never"].set()


def test_a_proxy_can_be_called(workers: InProcessCluster) -> None:
    layer = rpc.remote("worker1", torch.nn.Identity)
    assert layer.rpc_sync()(torch.ones(2)).tolist() == [1.0, 1.0]
    assert layer.rpc_async()(3).wait() == 3


def test_a_reference_is_not_pickled_by_other_means(workers: InProcessCluster) -> None:
    with pytest.raises(rpc.UnsendableError, match="only be sent"):
        pickle.dumps(RRef(1))


# Creation.


def test_remote_returns_at_once_and_uses_wait_without_a_thread(workers: InProcessCluster, gate: str) -> None:
    rref = rpc.remote("worker1", wait_then, args=(gate, Account(1)))
    wait_until(rref.confirmed_by_owner)
    threads = workers[1].agent.pool.size
    futures = [rref.rpc_async().add(1) for _ in range(40)]
    fetched = rpc.rpc_async("worker2", fetch, args=(rref,))
    assert rpc.rpc_sync("worker1", who) == "worker1"
    assert workers[1].agent.pool.size <= threads + 5
    assert not any(future.done() for future in futures)
    _gates[gate].set()
    assert sorted(future.wait() for future in futures) == list(range(2, 42))
    assert fetched.wait().balance >= 1


def test_a_failed_creation_is_raised_by_every_use(workers: InProcessCluster) -> None:
    rref = rpc.remote("worker1", fail)
    for use in (
        rref.to_here,
        lambda: rref.rpc_sync().add(1),
        lambda: rref.rpc_async().add(1).wait(),
        lambda: rref.remote().add(1).to_here(),
        lambda: rref._get_type(),
        lambda: rpc.rpc_sync("worker1", local, args=(rref,)),
        lambda: rpc.rpc_sync("worker2", fetch, args=(rref,)),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match="could not be made"):
                use()


def test_a_creation_that_cannot_be_sent(workers: InProcessCluster) -> None:
    with pytest.raises(rpc.UnknownWorkerError):
        rpc.remote("nobody", Account)
    with pytest.raises(rpc.UnsendableError):
        rpc.remote("worker1", Account, args=(threading.Lock(),))
    with pytest.raises(rpc.UnsendableError):
        rpc.remote("worker1", lambda: 1)


def test_a_message_that_is_too_large_to_send_pins_no_value() -> None:
    options = RpcOptions(max_message_bytes=1 << 16)
    with InProcessCluster(2, options=options) as group, group[0].as_current():
        rref = RRef(Account(5))
        with pytest.raises(rpc.UnsendableError, match="over the limit"):
            rpc.rpc_sync("worker1", fetch, args=(rref, torch.zeros(1 << 16)))
        assert group[0].references.counts()["pinned"] == 0
        del rref
        wait_until(lambda: group[0].references.counts()["values"] == 0)


def test_a_creation_that_is_too_large_to_send_leaves_no_reference() -> None:
    options = RpcOptions(max_message_bytes=1 << 16)
    with InProcessCluster(2, options=options) as group, group[0].as_current():
        with pytest.raises(rpc.UnsendableError, match="over the limit"):
            rpc.remote("worker1", Account, args=(torch.zeros(1 << 16),))
        wait_until(lambda: group[0].references.counts()["used"] == 0)
        assert rpc.remote("worker1", Account, args=(5,)).rpc_sync().add(1) == 6


def test_timeouts(workers: InProcessCluster, gate: str) -> None:
    rref = rpc.remote("worker1", wait_then, args=(gate, 1))
    with pytest.raises(rpc.RpcTimeoutError):
        rref.to_here(timeout=0.1)
    own = rpc.remote("worker0", wait_then, args=(gate, 2))
    with pytest.raises(rpc.RpcTimeoutError):
        own.to_here(timeout=0.1)
    _gates[gate].set()
    assert (rref.to_here(), own.to_here()) == (1, 2)


# When values go.


def test_a_reference_that_is_dropped_on_an_idle_worker_wakes_its_watch(workers: InProcessCluster) -> None:
    """Without being woken, the watch thread might look only seconds later."""
    rref = rpc.remote("worker1", Account, args=(1,))
    rref.to_here()
    wait_until(lambda: workers[0].agent.watch.asleep)
    began = time.monotonic()
    del rref
    wait_until(lambda: workers[1].references.counts()["values"] == 0)
    assert time.monotonic() - began < 3


def test_a_value_lives_as_long_as_its_last_reference_anywhere(workers: InProcessCluster) -> None:
    rref = rpc.remote("worker1", Account, args=(3,))
    rpc.rpc_sync("worker2", keep, args=("kept", rref))
    del rref
    gc.collect()
    # Drop and share have crossed; the other worker still has it.
    assert rpc.rpc_sync("worker2", balance_of, args=("kept",)) == 3
    assert values_on(workers[1]) == 1
    rpc.rpc_sync("worker2", let_go, args=("kept",))
    wait_until(lambda: values_on(workers[1]) == 0)


def balance_of(name: str) -> int:
    return _kept[name].to_here().balance


def test_the_owner_may_keep_a_value_that_others_dropped(workers: InProcessCluster) -> None:
    rref = rpc.rpc_sync("worker1", keep_made_here, args=("own",))
    assert rref.to_here().sum() == 3
    del rref
    wait_until(lambda: workers[0].references.counts()["used"] == 0)
    assert values_on(workers[1]) == 1
    rpc.rpc_sync("worker1", let_go, args=("own",))
    wait_until(lambda: values_on(workers[1]) == 0)


def test_the_value_itself_is_freed(workers: InProcessCluster) -> None:
    before = Account.made
    rref = rpc.remote("worker1", Counted)
    rref.to_here()
    assert Counted.alive >= 1
    del rref
    wait_until(lambda: Counted.alive == 0)
    assert Account.made == before


class Counted:
    alive = 0

    def __init__(self) -> None:
        Counted.alive += 1

    def __del__(self) -> None:
        Counted.alive -= 1

    def __reduce__(self) -> Any:
        return int, ()


@pytest.mark.long
def test_a_thousand_references_share_and_drop(workers: InProcessCluster) -> None:
    rrefs = [rpc.remote(f"worker{i % 3}", Account, args=(i,)) for i in range(1000)]
    rpc.rpc_sync("worker1", keep, args=("one", rrefs))
    rpc.rpc_sync("worker2", keep, args=("two", rrefs[::2]))
    del rrefs
    rpc.rpc_sync("worker1", let_go, args=("one",))
    wait_until(lambda: sum(map(values_on, workers)) == 500)
    rpc.rpc_sync("worker2", let_go, args=("two",))
    wait_until(lambda: sum(map(values_on, workers)) == 0)


@pytest.mark.parametrize("seed", range(10))
def test_references_work_in_any_order_of_messages(seed: int) -> None:
    with InProcessCluster(3, seed=seed) as workers, workers[0].as_current():
        rrefs = [rpc.remote(f"worker{i % 3}", Account, args=(i,)) for i in range(12)]
        futures = []
        for i, rref in enumerate(rrefs):
            futures.append(rpc.rpc_async(f"worker{(i + 1) % 3}", round_trip, args=(rref, ["worker2", "worker1"])))
            futures.append(rpc.rpc_async(f"worker{(i + 2) % 3}", fetch, args=(rref,)))
        del rrefs, rref
        assert [future.wait().balance for future in futures] == [i for i in range(12) for _ in range(2)]
        futures.clear()
        assert_all_free(workers)


# Losses.


@pytest.mark.parametrize("kind", [Call, Create, Fetch])
def test_a_cut_connection_between_living_workers_loses_no_value(kind: type) -> None:
    faults = Faults()
    with InProcessCluster(2, faults=faults) as workers, workers[0].as_current():
        safe = rpc.remote("worker1", Account, args=(1,))
        rpc.rpc_sync("worker1", keep, args=("back", RRef("mine")))
        assert safe.to_here().balance == 1
        faults.next("cut", kind)
        broken = rpc.remote("worker1", Account, args=(2,))
        for rref in (safe, broken):
            for use in (fetch, fetch_there):
                try:
                    use(rref)
                except rpc.WorkerLostError:
                    continue
        assert safe.to_here().balance == 1
        assert rpc.rpc_sync("worker1", fetch_kept, args=("back",)) == "mine"
        rpc.rpc_sync("worker1", let_go, args=("back",))
        del safe, broken, rref
        assert_all_free(workers)


def call_method(rref: RRef[Any]) -> Any:
    return rref.rpc_async().bit_length().wait()


def fetch_there(rref: RRef[Any]) -> Any:
    return rpc.rpc_sync("worker1", fetch, args=(rref,))


def fetch_kept(name: str) -> Any:
    return _kept[name].to_here()


def test_a_lost_worker_s_references_are_freed_and_its_values_raise() -> None:
    with InProcessCluster(3) as workers, workers[0].as_current():
        held = [rpc.remote("worker1", Account, args=(i,)) for i in range(10)]
        rpc.rpc_sync("worker2", keep, args=("held", held))
        owned = rpc.rpc_sync("worker2", make_here, args=(1,))
        del held
        wait_until(lambda: workers[0].references.counts()["used"] == 1)
        assert values_on(workers[1]) == 10
        workers[2].shutdown(graceful=False)
        wait_until(lambda: values_on(workers[1]) == 0)
        for use in (fetch, fetch_there, call_method):
            with pytest.raises(rpc.WorkerLostError, match="worker2"):
                use(owned)
        _kept.clear()
        del owned
        assert_all_free(workers)


def test_a_reference_from_a_worker_that_is_lost_at_once_stays_good() -> None:
    """The sharer dies before the receiver is listed: the sweep keeps the value."""
    for _ in range(10):
        with InProcessCluster(3) as workers:
            rref = workers[2].remote("worker1", Account, args=(9,))
            rref.to_here()
            workers[2].rpc_async("worker0", keep, args=("inherited", rref)).wait()
            workers[2].shutdown(graceful=False)
            del rref
            assert _kept["inherited"].to_here().balance == 9
            _kept.clear()
            wait_until(lambda workers=workers: values_on(workers[1]) == 0)


# Shutdown.


def shut_down_all(workers: InProcessCluster) -> list[BaseException]:
    errors: list[BaseException] = []

    def shut_down(worker: Any) -> None:
        try:
            worker.shutdown()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=shut_down, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return errors


def test_graceful_shutdown_leaves_no_value_and_no_leak() -> None:
    with InProcessCluster(3, options=RpcOptions(forbid_leaks=True)) as workers:
        rrefs = [workers[i % 3].remote((i + 1) % 3, Account, args=(i,)) for i in range(9)]
        rrefs.append(workers[0].remote(0, Account))
        workers[0].rpc_sync("worker1", keep, args=("still", rrefs[0]))
        assert shut_down_all(workers) == []
        assert [worker.references.counts()["values"] for worker in workers] == [0, 0, 0]
        with workers[0].as_current():
            start = time.monotonic()
            for rref in rrefs:
                with pytest.raises(rpc.NotInitializedError, match="shut down"):
                    rref.to_here()
            assert time.monotonic() - start < 5
        _kept.clear()


def test_a_leak_is_an_error_if_asked_for() -> None:
    with InProcessCluster(2, options=RpcOptions(forbid_leaks=True)) as workers:
        rref = workers[0].remote("worker1", Account)
        assert rref.to_here().balance == 0
        workers[0].release = lambda: None
        errors = shut_down_all(workers)
        assert [type(error) for error in errors] == [rpc.LeakError]
        assert "Leaking RRef" in str(errors[0])
        assert "worker0" in str(errors[0])
