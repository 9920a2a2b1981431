"""A federation of honest peers: allowed requests work, and others are refused with an explanation."""

from __future__ import annotations

import copy
import itertools
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import exposed
import pytest
import torch
from exposed import Account, Colour, Couple, Pair, Point, Secret, Weather
from liars import REFUSED, federation, liar

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import (
    MisuseError,
    OptionError,
    QuotaError,
    RefusedError,
    RemoteError,
    RemoteTraceback,
    UnsendableError,
)
from backhaul.options import Quotas, RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.wire import trees
from backhaul.wire.messages import Tally
from backhaul.worker import Worker


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with federation() as made:
        yield made


@pytest.fixture
def asker(workers: InProcessCluster) -> Iterator[Worker]:
    """The worker that calls worker0. It is the current worker."""
    with workers[1].as_current():
        yield workers[1]


# Calls.


def test_a_worker_s_exposed_functions_are_not_those_of_others_in_its_process(workers: InProcessCluster) -> None:
    workers[0].expose(exposed.hidden, to="worker1")
    assert workers[1].rpc_sync("worker0", exposed.hidden, (1, 2)) == (1, 2)
    with pytest.raises(RefusedError, match=REFUSED):
        workers[2].rpc_sync("worker0", exposed.hidden)
    with pytest.raises(RefusedError, match="'worker2' refused this"):
        workers[1].rpc_sync("worker2", exposed.hidden)


def test_an_exposed_function_can_be_called(asker: Worker) -> None:
    assert rpc.rpc_sync("worker0", exposed.double, (21,)) == 42
    assert torch.equal(rpc.rpc_async("worker0", exposed.double, (torch.ones(2),)).wait(), torch.full((2,), 2.0))
    assert rpc.remote("worker0", exposed.double, (3,)).to_here() == 6
    assert rpc.rpc_sync("worker0", exposed.double, kwargs={"x": 4}) == 8
    assert rpc.rpc_sync("worker0", exposed.echo_later, ("later",)) == "later"
    assert rpc.rpc_sync("worker0", exposed.call_back, ("worker1", 5)) == 10
    assert torch.equal(rpc.rpc_sync("worker0", torch.add, (torch.ones(2), 1)), torch.full((2,), 2.0))


@pytest.mark.parametrize("function", [exposed.hidden, torch.zeros, torch.load, print, int, exposed.Secret])
def test_unexposed_functions_are_refused(asker: Worker, function: Any) -> None:
    exposed.called.clear()
    with pytest.raises(RefusedError) as refusal:
        rpc.rpc_sync("worker0", function, (1,))
    assert str(refusal.value) == REFUSED
    assert not exposed.called


def test_a_refusal_of_remote_is_raised_when_the_value_is_used(asker: Worker) -> None:
    with pytest.raises(RefusedError, match="refused this"):
        rpc.remote("worker0", exposed.hidden).to_here()


def test_permissions_of_one_peer(workers: InProcessCluster, asker: Worker) -> None:
    assert rpc.rpc_sync("worker0", exposed.for_some, (1,)) == 2
    with pytest.raises(RefusedError):
        workers[2].rpc_sync("worker0", exposed.for_some, (1,))


def test_a_refusal_is_logged_where_it_happens(asker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RefusedError):
        rpc.rpc_sync("worker0", exposed.hidden, (1,))
    (record,) = [each for each in caplog.records if each.name == "backhaul.security"]
    assert record.levelno == logging.WARNING
    assert "worker1" in record.getMessage()
    assert "exposed:hidden" in record.getMessage()


# Values.

VALUES = [
    None,
    1 << 100,
    "text",
    [1, (2.5, b"3")],
    {"a": {1, 2}},
    Point(1, torch.ones(2)),
    Pair(1, Colour.RED),
    [Colour.RED],
    torch.float16,
    slice(1, 2),
]


@pytest.mark.parametrize("value", VALUES)
def test_values_of_exposed_classes_go_both_ways(asker: Worker, value: Any) -> None:
    there = rpc.rpc_sync("worker0", exposed.echo, (value,))
    assert type(there) is type(value)
    if not isinstance(value, Point):
        assert there == value


@pytest.mark.parametrize("value", [Secret(1), Weather.RAIN, Couple(1, 2), [{"a": Secret(1)}], exposed.hidden, Secret])
def test_values_of_other_classes_are_refused_there(asker: Worker, value: Any) -> None:
    with pytest.raises(RefusedError) as refusal:
        rpc.rpc_sync("worker0", exposed.echo, (value,))
    assert str(refusal.value) == REFUSED


def test_replies_are_read_as_strictly(asker: Worker) -> None:
    with pytest.raises(MisuseError, match="'exposed:Secret' is not exposed to worker 'worker0' here"):
        rpc.rpc_sync("worker0", exposed.secret)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (threading.Lock(), "the safe codec does not carry this type"),
        (Account(1), "the safe codec does not carry this type"),
        (torch.ones(1).add, "bound to an object"),
        (Account(1).deposit, "bound to an object"),
    ],
)
def test_values_that_need_pickle_do_not_leave(asker: Worker, value: Any, text: str) -> None:
    with pytest.raises(UnsendableError, match=text):
        rpc.rpc_sync("worker0", exposed.echo, (value,))


def test_long_values_outside_tensors_are_refused(asker: Worker) -> None:
    with pytest.raises(UnsendableError, match="a federation takes 1048576: send large data as tensors"):
        rpc.rpc_sync("worker0", exposed.echo, ([0.5] * 2_000_000,))
    assert rpc.rpc_sync("worker0", exposed.double, (torch.zeros(2_000_000),)).shape == (2_000_000,)


def test_a_worker_calls_itself_by_the_same_rules(asker: Worker) -> None:
    assert rpc.rpc_sync("worker1", exposed.double, (4,)) == 8
    mine = rpc.RRef(Account(3))
    assert mine.rpc_sync().deposit(1) == 4
    assert rpc.remote("worker1", Account, (5,)).rpc_sync().deposit(1) == 6
    with pytest.raises(RefusedError):
        rpc.rpc_sync("worker1", exposed.hidden)


def test_a_result_that_cannot_travel(asker: Worker) -> None:
    with pytest.raises(UnsendableError, match=r"the value \(_thread.lock\) cannot be sent"):
        rpc.rpc_sync("worker0", exposed.unsendable)


# What functions raise.


def test_a_failure_has_its_type_and_text_and_no_traceback(asker: Worker, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"^too few$") as failure:
        rpc.rpc_sync("worker0", exposed.fail, ("too few",))
    cause = failure.value.__cause__
    assert isinstance(cause, RemoteTraceback)
    assert "exposed.py" not in str(cause)
    assert "the log" in str(cause)
    (logged,) = [each.getMessage() for each in caplog.records if each.name == "backhaul.security"]
    assert "raise ValueError(text)" in logged
    assert "worker1" in logged


def test_an_exposed_exception(asker: Worker) -> None:
    with pytest.raises(exposed.Declined, match=r"^no$"):
        rpc.rpc_sync("worker0", exposed.fail_in_our_way, ("no",))


def test_an_exception_that_is_not_exposed(asker: Worker) -> None:
    with pytest.raises(RemoteError, match=r"exposed\.Unknown on worker 'worker0': no") as failure:
        rpc.rpc_sync("worker0", exposed.fail_oddly, ("no",))
    assert failure.value.type_name == "exposed.Unknown"
    assert failure.value.remote_traceback == ""


def test_texts_are_bounded_and_do_nothing_to_a_terminal(asker: Worker) -> None:
    with pytest.raises(ValueError) as failure:
        rpc.rpc_sync("worker0", exposed.fail, ("\x1b[2J" + "x" * 100_000,))
    assert "\x1b" not in str(failure.value)
    assert str(failure.value).startswith("\\x1b[2Jxxx")
    assert len(str(failure.value)) < 5000


# References.


def call_method(rref: rpc.RRef[Any], name: str, *args: Any) -> Any:
    """Call a method of any name as a proxy does. A proxy has some of these names itself."""
    return rref._references.call_method(rref, name, args, {}, -1.0)


def test_methods_of_exposed_classes(asker: Worker) -> None:
    account = rpc.remote("worker0", Account, (1,))
    assert account.rpc_sync().deposit(2) == 3
    assert account.rpc_async().deposit(2).wait() == 5
    assert account.remote().deposit(5).to_here() == 10
    assert account.rpc_sync()(7) == 17
    assert account.rpc_sync().rate() == 0.5
    assert account.rpc_sync().title() == "Account"
    assert account.rpc_sync().later() == 10
    assert account.rpc_sync().me().rpc_sync().deposit(0) == 10


@pytest.mark.parametrize("name", ["_audit", "owner", "inherited", "hook", "nothing", "__class__", "__getattribute__"])
def test_unexposed_methods_are_refused(asker: Worker, name: str) -> None:
    account = rpc.remote("worker0", Account, (1,))
    exposed.called.clear()
    with pytest.raises(RefusedError) as refusal:
        call_method(account, name)
    assert str(refusal.value) == REFUSED
    assert not exposed.called


def test_methods_of_unexposed_classes_are_refused(asker: Worker) -> None:
    for rref in (rpc.rpc_sync("worker0", exposed.savings), rpc.rpc_sync("worker0", exposed.vault)):
        for name in ("deposit", "withdraw", "open", "__class__"):
            with pytest.raises(RefusedError):
                call_method(rref, name, 1)
    plain = rpc.remote("worker0", exposed.echo, ([1],))
    with pytest.raises(RefusedError):
        plain.rpc_sync().append(2)
    assert plain.to_here() == [1]


def test_the_type_of_a_value_is_not_told(asker: Worker) -> None:
    with pytest.raises(RefusedError):
        rpc.remote("worker0", Account)._get_type()


def test_a_given_reference_can_be_used(asker: Worker) -> None:
    given = rpc.rpc_sync("worker0", exposed.give, ([1, 2],))
    assert given.to_here() == [1, 2]
    assert rpc.rpc_sync("worker0", exposed.value_of, (given,)) == [1, 2]


def test_a_reference_to_our_value_can_be_given(asker: Worker) -> None:
    mine = rpc.RRef("mine")
    assert rpc.rpc_sync("worker0", exposed.value_of, (mine,)) == "mine"
    assert rpc.rpc_sync("worker0", exposed.echo, ([mine],))[0].local_value() == "mine"


def test_a_reference_does_not_go_to_a_third_worker(workers: InProcessCluster, asker: Worker) -> None:
    given = rpc.rpc_sync("worker0", exposed.give, (1,))
    with pytest.raises(UnsendableError, match="Let 'worker0' give it to 'worker2', or send the value"):
        rpc.rpc_sync("worker2", exposed.value_of, (given,))
    with pytest.raises(UnsendableError, match="cannot go to worker 'worker1'"):
        rpc.rpc_sync("worker2", exposed.call_back_with_a_reference, ("worker0",))
    assert given.to_here() == 1


def test_a_value_whose_reference_is_given_back_is_freed(workers: InProcessCluster, asker: Worker) -> None:
    owner = workers[0].references

    def settled(count: int) -> bool:
        for _ in range(500):
            if owner.counts()["values"] == count and not owner.counts()["pinned"]:
                return True
            threading.Event().wait(0.01)
        return False

    before = owner.counts()["values"]
    given = [rpc.rpc_sync("worker0", exposed.give, (number,)) for number in range(20)]
    made = [rpc.remote("worker0", Account, (number,)) for number in range(20)]
    assert [each.rpc_sync().deposit(0) for each in made] == list(range(20))
    assert settled(before + 40)
    del given, made
    assert settled(before)


# One backward pass over all workers.


def test_gradients(asker: Worker) -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with dist_autograd.context() as context:
        loss = (rpc.rpc_sync("worker0", exposed.weigh, (x,)) ** 2).sum()
        dist_autograd.backward(context, [loss])
        assert torch.equal(dist_autograd.get_gradients(context)[x], torch.full((3,), 2.0, dtype=torch.float64))


def test_context_ids_cannot_be_guessed(asker: Worker) -> None:
    ids = []
    for _ in range(20):
        with dist_autograd.context() as context:
            ids.append(int(context))
    assert {id >> 48 for id in ids} == {1}
    gaps = {second - first for first, second in itertools.pairwise(ids)}
    assert len(gaps) == 19
    assert min(map(abs, gaps)) > 1 << 20


# Quotas.


def test_a_cluster_has_quotas_if_it_is_given_some() -> None:
    exposed.gates["cluster"] = threading.Event()
    with InProcessCluster(2, options=RpcOptions(quotas=Quotas(calls=2, references=3, contexts=1))) as (one, two):
        with one.as_current():
            waiting = [rpc.rpc_async("worker1", exposed.wait, ("cluster",)) for _ in range(2)]
            with pytest.raises(QuotaError, match="2 calls of this peer are under way"):
                rpc.rpc_sync("worker1", exposed.hidden)
            exposed.gates["cluster"].set()
            assert [each.wait() for each in waiting] == ["cluster"] * 2
            assert rpc.rpc_sync("worker1", exposed.hidden, (1,)) == (1,)
            kept = [rpc.remote("worker1", exposed.hidden, (1,)) for _ in range(3)]
            assert [each.to_here() for each in kept] == [(1,)] * 3
            with pytest.raises(QuotaError, match="has references to 3 values"):
                rpc.remote("worker1", exposed.hidden).to_here()
        assert two.references.counts()["values"] == 3


# Options.


def test_a_federation_needs_certificates() -> None:
    with pytest.raises(OptionError, match="needs a certificate for each peer"):
        Worker("a", 0, 1, store=None, options=RpcOptions(trust="federation"))  # type: ignore[arg-type]


def test_a_federation_needs_known_members() -> None:
    with pytest.raises(OptionError, match="needs a group of known members"):
        Worker("a", 0, None, store=None, options=RpcOptions(trust="federation"))  # type: ignore[arg-type]


PROGRAM = """
import sys, torch
import exposed
from liars import federation
from backhaul import rpc
with federation(2) as (one, two):
    with one.as_current():
        assert rpc.rpc_sync("worker1", exposed.double, (21,)) == 42
        account = rpc.remote("worker1", exposed.Account, (1,))
        assert account.rpc_sync().deposit(2) == 3
        for function, args in ((exposed.hidden, ()), (exposed.fail, ("x",)), (exposed.echo, (sys.stdout,)),
                               (exposed.unsendable, ()), (exposed.secret, ())):
            try: rpc.rpc_sync("worker1", function, args)
            except (RuntimeError, ValueError): pass
            else: raise SystemExit("it was not refused")
assert "backhaul.wire.pickles" not in sys.modules
"""


def test_nothing_that_pickles_is_loaded(tmp_path: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=exposed.__file__.rpartition("/")[0],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_errors_can_be_copied() -> None:
    for error in (RefusedError("x"), QuotaError("y")):
        assert str(copy.copy(error)) == str(error)


def test_a_peer_does_not_learn_how_often_others_call() -> None:
    with federation() as workers, liar(workers) as peer:
        found = []
        for calls in (1, 2, 3):
            for _ in range(calls):
                workers[1].rpc_sync("worker0", exposed.double, (1,))
            found.append(peer.ask(Tally).tree)
        idle, sent, finished = zip(*(tree[1:] for tree in found), strict=True)
        assert set(idle) <= {True, False}
        assert list(sent) == [{}] * 3
        assert [tree[:2] for tree in finished] == [[trees.DICT, 0]] * 3  # those of its own
        stamps = [tree[2] for tree in finished]
        assert len(set(stamps)) == 3
        assert min(stamps) > 1000
        assert peer.ask(Tally).tree[3][2] == stamps[-1]
        assert workers[0].agent._counts()[2] == {1: 6}
