"""Observers get events in order and with a time. Without an observer no event is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent import observing
from backhaul.agent.observing import (
    Asked,
    Began,
    Came,
    Ended,
    Event,
    GateOpens,
    GateWaits,
    HandedOut,
    Invoked,
    LinkLost,
    LinkUp,
    Losing,
    Observers,
    PassBegan,
    PassEnded,
    Queued,
    Read,
    Resumes,
    Returned,
    RunBegan,
    RunEnded,
    Sent,
    Settled,
    Starts,
    Stops,
    Waits,
)
from backhaul.testing import InProcessCluster
from backhaul.worker import Worker

PATIENCE = 10.0

KINDS: list[type[Event]] = [
    kind for kind in vars(observing).values() if isinstance(kind, type) and issubclass(kind, Event)
]


class Told:
    """Records the events of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self.stop: Callable[[], None] = worker.agent.observers.add(self._add)

    def _add(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def until(self, kind: type[Event], after: type[Event] = Event) -> Event:
        """Wait for the first event of a kind, and return it."""

        def found() -> Event | None:
            return next((event for event in self.since(after) if isinstance(event, kind)), None)

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE), f"no {kind.__name__}"
            event = found()
        assert event is not None
        return event

    def since(self, first: type[Event], *of: type[Event]) -> list[Event]:
        """The events from the first one of a kind on. Earlier events may belong to a call of the fixture."""
        start = next((at for at, event in enumerate(self.events) if isinstance(event, first)), len(self.events))
        return [event for event in self.events[start:] if not of or isinstance(event, of)]

    def kinds(self, *of: type[Event]) -> list[type[Event]]:
        return [type(event) for event in self.events if not of or isinstance(event, of)]


@pytest.fixture
def connected(pair: InProcessCluster) -> InProcessCluster:
    pair[0].rpc_sync("worker1", int)
    return pair


@pytest.fixture
def told(connected: InProcessCluster) -> Iterator[tuple[Told, Told]]:
    observed = Told(connected[0]), Told(connected[1])
    yield observed
    for each in observed:
        each.stop()


# Subscribing.


def test_observers_come_and_go() -> None:
    observers = Observers()
    assert not observers
    heard: list[tuple[str, Event]] = []
    stops = [observers.add(lambda event, name=name: heard.append((name, event))) for name in "ab"]
    assert observers
    first, second = Invoked(what="f"), Returned(failed=False)
    observers.emit(first)
    stops[0]()
    assert observers
    observers.emit(second)
    stops[1]()
    assert not observers
    observers.emit(Invoked(what="f"))
    stops[1]()
    assert heard == [("a", first), ("b", first), ("b", second)]


def test_an_event_knows_its_time_and_its_thread() -> None:
    before, after = Invoked(what="f"), Invoked(what="f")
    assert before.at <= after.at
    assert before.thread == threading.get_ident()


def test_no_event_is_made_without_an_observer(pair: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    modules = [module for name, module in list(__import__("sys").modules.items()) if name.startswith("backhaul.")]
    for kind in KINDS:
        for module in modules:
            if vars(module).get(kind.__name__) is kind and module is not observing:
                monkeypatch.setattr(module, kind.__name__, lambda kind=kind, **_: made.append(kind.__name__))
    assert not any(worker.agent.observers for worker in pair)
    use_everything(pair)
    assert made == []


def test_an_observer_gets_events_from_the_same_program(pair: InProcessCluster) -> None:
    """This shows that the test above can fail."""
    observed = Told(pair[0]), Told(pair[1])
    use_everything(pair)
    kinds = set(observed[0].kinds()) | set(observed[1].kinds())
    assert kinds >= {*CALL, Waits, Resumes, Queued, Starts, Stops, LinkUp, PassBegan, RunBegan, RunEnded, PassEnded}
    for each in observed:
        each.stop()


def use_everything(pair: InProcessCluster) -> None:
    """Calls, futures, references and a pass."""
    x = torch.rand(3, requires_grad=True)
    with pair[0].as_current():
        rpc.rpc_sync("worker1", int)
        rpc.rpc_async("worker1", int).wait()
        rpc.rpc_async("worker1", int).then(lambda future: future.value()).wait()
        ref = rpc.remote("worker1", int)
        assert ref.to_here() == 0
        del ref
        with dist_autograd.context() as ctx:
            y = rpc.rpc_sync("worker1", torch.tanh, args=(x * 2,))
            dist_autograd.backward(ctx, [y.sum()])


# Calls.

CALL = (Asked, Sent, Read, Came, Began, Invoked, Returned, Ended, HandedOut, Settled)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_call_emits_its_events_in_order(connected: InProcessCluster, told: tuple[Told, Told], way: str) -> None:
    caller, callee = told
    if way == "sync":
        connected[0].rpc_sync("worker1", int)
    else:
        connected[0].rpc_async("worker1", int).wait()
    callee.until(Returned)
    callee.until(Sent, after=Returned)
    theirs = callee.since(Read, *CALL)
    mine = caller.since(Asked, *CALL)
    # Only futures are handed out, and another thread may do it at any time, so this event is left out.
    mine = [event for event in mine if not isinstance(event, HandedOut)]
    assert [type(event) for event in mine] == [Asked, Sent, Read, Came, Settled]
    assert [type(event) for event in theirs] == [Read, Began, Invoked, Returned, Ended, Sent]
    for events in (mine, theirs):
        assert [event.at for event in events] == sorted(event.at for event in events)
    # One clock for both: what the callee does up to its reply lies between the request and the result.
    settled = next(event for event in mine if isinstance(event, Settled))
    assert mine[0].at < theirs[0].at < theirs[-2].at < settled.at
    asked: Any = mine[0]
    assert (asked.peer, asked.what) == ("worker1", "int")


def test_a_call_that_raises_has_returned_too(connected: InProcessCluster, told: tuple[Told, Told]) -> None:
    with pytest.raises(ValueError, match="x"):
        connected[0].rpc_sync("worker1", int, args=("x",))
    told[1].until(Sent)
    assert told[1].kinds(Invoked, Returned) == [Invoked, Returned]


def test_a_call_tells_that_its_thread_waits(connected: InProcessCluster, told: tuple[Told, Told]) -> None:
    connected[0].rpc_sync("worker1", int)
    waits = [event for event in told[0].events if isinstance(event, Waits | Resumes)]
    assert [type(event) for event in waits] == [Waits, Resumes]
    assert {event.thread for event in waits} == {threading.get_ident()}
    first: Any = waits[0]
    assert first.slot.done


def test_an_observer_that_is_gone_hears_nothing_more(connected: InProcessCluster, told: tuple[Told, Told]) -> None:
    connected[0].rpc_sync("worker1", int)
    told[1].until(Sent)
    for each in told:
        each.stop()
    before = [list(each.events) for each in told]
    assert not any(worker.agent.observers for worker in connected)
    connected[0].rpc_sync("worker1", int)
    assert [each.events for each in told] == before


# Passes.


def test_a_pass_emits_its_events_in_order(connected: InProcessCluster, told: tuple[Told, Told]) -> None:
    x = torch.rand(3, requires_grad=True)
    with connected[0].as_current(), dist_autograd.context() as ctx:
        y = rpc.rpc_sync("worker1", torch.tanh, args=(x * 2,))
        dist_autograd.backward(ctx, [y.sum()])
    starter = [event for event in told[0].events if isinstance(event, PassBegan | RunBegan | RunEnded | PassEnded)]
    kinds = [type(event) for event in starter]
    assert kinds == [PassBegan, RunBegan, RunEnded, RunBegan, RunEnded, PassEnded]
    assert [event.at for event in starter] == sorted(event.at for event in starter)
    began, ended = starter[0], starter[-1]
    assert isinstance(began, PassBegan)
    assert isinstance(ended, PassEnded)
    assert (began.context, began.backward, ended.failed) == (ended.context, ended.backward, False)
    assert told[1].kinds(RunBegan, RunEnded) == [RunBegan, RunEnded]
    helper: Any = told[1].until(RunBegan)
    assert helper.backward == began.backward
    assert began.at < helper.at < ended.at


def test_a_pass_that_fails(connected: InProcessCluster, told: tuple[Told, Told]) -> None:
    x = torch.rand(3, requires_grad=True)

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("no")

    with connected[0].as_current(), dist_autograd.context() as ctx:
        y = rpc.rpc_sync("worker1", torch.tanh, args=(x * 2,))
        y.register_hook(refuse)
        with pytest.raises(ValueError, match="no"):
            dist_autograd.backward(ctx, [y.sum()])
    ended: Any = told[0].until(PassEnded)
    assert ended.failed


def test_gates_of_a_u_shaped_model(connected: InProcessCluster, told: tuple[Told, Told]) -> None:
    """The first and the last part are here, with a skip connection past the middle: the run waits for the middle's
    gradients."""
    x = torch.rand(3, requires_grad=True)
    with connected[0].as_current(), dist_autograd.context() as ctx:
        first = rpc.rpc_sync("worker1", torch.tanh, args=(x * 2,))
        middle = rpc.rpc_sync("worker1", torch.tanh, args=(first * 2,))
        dist_autograd.backward(ctx, [(middle + first).sum()])
    gates = [event for event in told[0].events if isinstance(event, GateWaits | GateOpens)]
    assert [type(event) for event in gates] == [GateWaits, GateOpens]
    waits: Any = gates[0]
    opens: Any = gates[1]
    assert (waits.backward, waits.source) == (opens.backward, opens.source)
    assert waits.at < opens.at
    assert told[0].kinds(RunBegan) != []


# Links.


def test_a_link_comes_and_goes(pair: InProcessCluster) -> None:
    observed = Told(pair[0]), Told(pair[1])
    pair[0].rpc_sync("worker1", int)
    up: Any = observed[0].until(LinkUp)
    served: Any = observed[1].until(LinkUp)
    assert (up.peer, up.served, served.peer, served.served) == ("worker1", False, "worker0", True)
    pair[1].shutdown(graceful=False)
    lost: Any = observed[0].until(LinkLost)
    assert (lost.peer, lost.served) == ("worker1", False)
    assert "worker1" in lost.reason
    assert observed[0].kinds(Losing, LinkLost) == [Losing, LinkLost]
    over: Any = observed[1].until(LinkLost)
    assert (over.peer, over.served) == ("worker0", True)
    for each in observed:
        each.stop()
