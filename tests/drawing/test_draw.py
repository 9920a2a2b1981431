"""Drawings of real contexts: their workers' joined reports, before, during and after a backward pass."""

from __future__ import annotations

import json
import pickle
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawing_models import (
    PATIENCE,
    Encoder,
    Stops,
    boxes,
    deep,
    diamond,
    double,
    exposed_double,
    leaf,
    on,
    overlapping,
    pass_on,
    stop,
    texts,
)
from torch import nn

import backhaul.autograd as dist_autograd
from backhaul import drawing, rpc
from backhaul.agent.observing import Event, GateWaits, RunEnded
from backhaul.autograd import ContextId
from backhaul.drawing import Drawing, mentioned
from backhaul.errors import ContextError, OptionError
from backhaul.nn import RemoteModule
from backhaul.options import RpcOptions
from backhaul.seeing.guest import Guest, transport_for
from backhaul.testing import InProcessCluster
from backhaul.worker import Worker


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    Stops.error = None
    Stops.go_on.set()
    yield
    Stops.go_on.set()


@pytest.fixture
def three(trio: InProcessCluster) -> Iterator[InProcessCluster]:
    """Make the first worker the current one."""
    with trio[0].as_current():
        yield trio


def parts_of(found: Drawing) -> dict[int, dict[str, Any]]:
    return {part["rank"]: part for part in found.parts}


def require_joined(found: Drawing) -> int:
    """Check that every Send has its Recv at the peer, of the same size; returns their number."""
    parts = parts_of(found)
    sends = {
        (rank, send["to"], send["source"], str(send["shape"]), send["dtype"], send["bytes"])
        for rank, part in parts.items()
        for send in part["sends"]
    }
    recvs = {
        (recv["from"], rank, recv["source"], str(recv["shape"]), recv["dtype"], recv["bytes"])
        for rank, part in parts.items()
        for recv in part["recvs"]
    }
    assert sends == recvs
    picture = found.picture
    joined = [arrow for arrow in picture.arrows if arrow.message]
    assert all(picture.items[arrow.tail].kind == "send" for arrow in joined)
    assert all(picture.items[arrow.head].kind == "recv" for arrow in joined)
    return len(sends)


def titles(found: Drawing, lane: int) -> list[str]:
    return [item.title for item in found.picture.items if item.lane == lane]


def lines(found: Drawing) -> list[str]:
    return [line for item in found.picture.items for line in item.lines]


def waits_at(worker: Worker) -> tuple[list[tuple[int, int]], threading.Event]:
    """The gates at which runs of a worker wait, and whether one does."""
    seen: list[tuple[int, int]] = []
    there = threading.Event()

    def note(event: Event) -> None:
        if isinstance(event, GateWaits):
            seen.append((event.backward, event.source))
            there.set()

    worker.agent.observers.add(note)
    return seen, there


def run_ended(worker: Worker) -> threading.Event:
    """Set when a run of a worker ends. The starter of a failed pass does not wait for the runs of others."""
    over = threading.Event()
    worker.agent.observers.add(lambda event: over.set() if isinstance(event, RunEnded) else None)
    return over


# A chain.


def test_a_chain_over_workers_that_the_first_does_not_know(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3))).sum()
        assert context_id.workers == {1}
        found = context_id.draw(roots=loss)
        assert sorted(parts_of(found)) == [0, 1, 2]
        assert all(part["known"] for part in found.parts)
        assert require_joined(found) == 4
        assert titles(found, 0) == ["Sum", "leaf [4, 3]", "to worker1", "from worker1", "roots of backward"]
        assert titles(found, 1) == [
            "Tanh",
            "Exp",
            "to worker2",
            "to worker0",
            "from worker0",
            "from worker2",
        ]
        assert titles(found, 2) == ["Mul", "to worker1", "from worker1"]
        assert lines(found).count("[4, 3] float32, 48 B") == 4
        assert found.picture.lines == ["no backward pass yet"]
        assert not any(arrow.carried for arrow in found.picture.arrows)


def test_the_arrows_go_the_way_of_the_forward_pass(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3))).sum()
        picture = context_id.draw(roots=loss).picture
    after = {arrow.tail: arrow.head for arrow in picture.arrows}
    at = next(place for place, item in enumerate(picture.items) if item.kind == "leaves")
    way = []
    while at in after:
        at = after[at]
        way.append((picture.items[at].lane, picture.items[at].title))
    assert way == [
        (0, "to worker1"),
        (1, "from worker0"),
        (1, "Tanh"),
        (1, "to worker2"),
        (2, "from worker1"),
        (2, "Mul"),
        (2, "to worker1"),
        (1, "from worker2"),
        (1, "Exp"),
        (1, "to worker0"),
        (0, "from worker1"),
        (0, "Sum"),
        (0, "roots of backward"),
    ]


def test_after_a_backward_every_run_has_its_time(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3))).sum()
        began = time.perf_counter_ns()
        context_id.backward(loss)
        took = time.perf_counter_ns() - began
        found = context_id.draw()
        runs = {rank: part["runs"] for rank, part in parts_of(found).items()}
        assert {rank: len(each) for rank, each in runs.items()} == {0: 2, 1: 2, 2: 1}
        assert all(0 < run["nanoseconds"] <= took for each in runs.values() for run in each)
        assert not any(run["failed"] for each in runs.values() for run in each)
        consumed = {source for each in runs.values() for run in each for source in run["sources"]}
        assert consumed == {0} | {send["source"] for part in found.parts for send in part["sends"]}
        ((passed,),) = (part["passes"] for part in found.parts if part["passes"])
        assert 0 < passed["nanoseconds"] <= took
        assert all(arrow.carried for arrow in found.picture.arrows if arrow.message)
        assert len([line for line in lines(found) if line.startswith("run: ")]) == 5
        assert found.picture.lines[0].startswith("backward: ")


def test_arrows_that_a_pass_did_not_reach_carried_nothing(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        used = rpc.rpc_sync("worker1", double, args=(leaf(2),))
        rpc.rpc_sync("worker2", double, args=(leaf(2),))
        context_id.backward(used.sum())
        picture = context_id.draw().picture
        carried = {
            (picture.items[arrow.tail].lane, picture.items[arrow.head].lane): arrow.carried
            for arrow in picture.arrows
            if arrow.message
        }
        assert carried == {(0, 1): True, (1, 0): True, (0, 2): False, (2, 0): False}


def test_a_spent_graph_without_its_loss(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        context_id.backward(rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3))).sum())
        found = context_id.draw()
        assert require_joined(found) == 4
        assert all(send["spent"] for part in found.parts for send in part["sends"])
        assert lines(found).count("[4, 3] float32, 48 B") == 4
        assert "roots of backward" in titles(found, 0)  # the run of the roots is known, though not the graph behind it
        assert "Sum" not in titles(found, 0)
        ElementTree.fromstring(drawing.svg(found.parts))


def test_sizes_of_several_tensors_of_one_message(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        first, second = leaf(2, 3), torch.ones(5, dtype=torch.float64, requires_grad=True)
        rpc.rpc_sync("worker1", torch.cat, args=([first.double().reshape(-1), second, first.reshape(-1).double()],))
        rpc.rpc_sync("worker1", max, args=(torch.ones((), requires_grad=True), second[0]))
        found = context_id.draw()
        assert require_joined(found) == 3 + 1 + 2 + 1
        sizes = [(send["shape"], send["dtype"], send["bytes"]) for send in parts_of(found)[0]["sends"]]
        assert sizes == [
            ([6], "float64", 48),
            ([5], "float64", 40),
            ([6], "float64", 48),
            ([], "float32", 4),
            ([], "float64", 8),
        ]
        assert "3 tensors, 136 B" in lines(found)


def test_a_worker_that_calls_itself_and_a_root_that_just_came(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        mine = rpc.rpc_sync("worker0", double, args=(leaf(2),))
        loss = rpc.rpc_sync("worker1", torch.sum, args=(mine,))
        context_id.backward(loss)
        found = context_id.draw()
        assert require_joined(found) == 4
        picture = found.picture
        named = {(picture.items[arrow.tail].title, picture.items[arrow.head].title) for arrow in picture.arrows}
        assert {("to worker0", "from worker0"), ("from worker0", "to worker1")} <= named
        assert ("from worker1", "roots of backward") in named


# Modules.


def test_remote_modules_have_their_names(three: InProcessCluster) -> None:
    encoder = RemoteModule("worker1/cpu", Encoder)
    with dist_autograd.context() as context_id:
        made = encoder(leaf(4, 16))
        found = context_id.draw()
        assert titles(found, 1) == ["fc1: Linear", "Relu", "fc2: Linear", "to worker0", "from worker0"]
        assert "weight [32, 16], bias [32]" in lines(found)
        assert "weight [8, 32]" in lines(found)
        part = parts_of(found)[1]
        assert part["leaves"] == {"count": 3, "elements": 32 * 16 + 32 + 8 * 32}
        context_id.backward(made.sum())
        assert titles(context_id.draw(), 1) == ["fc1: Linear", "Relu", "fc2: Linear", "to worker0", "from worker0"]


def test_modules_of_the_driver_have_their_names_too(three: InProcessCluster) -> None:
    head = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1, bias=False))
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", double, args=(head(torch.tensor([1, 2])),))
        assert titles(context_id.draw(), 0) == [
            "0: Embedding",
            "1: Linear",
            "Tanh",
            "3: Linear",
            "to worker1",
            "from worker1",
        ]


# Gates.


def test_a_gate_is_marked_where_a_run_waits(three: InProcessCluster) -> None:
    seen, there = waits_at(three[1])
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", diamond, args=("worker2", leaf(4, 3))).sum()
        before = context_id.draw(roots=loss)
        (gate,) = [item for item in before.picture.items if item.state]
        assert (gate.lane, gate.title, gate.state) == (1, "to worker2", "gate")
        assert gate.lines[1:] == ["gate: runs with 1 other, may wait"]

        Stops.go_on.clear()
        threading.Thread(target=lambda: (there.wait(PATIENCE), Stops.go_on.set())).start()
        context_id.backward(loss)
        after = context_id.draw()
        parts = parts_of(after)
        assert seen == [(wait["backward"], wait["source"]) for wait in parts[1]["waits"]]
        assert not parts[0]["waits"]
        assert not parts[2]["waits"]
        (wait,) = parts[1]["waits"]
        (run,) = parts[1]["runs"]
        assert run["gates"] == [wait["source"]]
        assert 0 < wait["nanoseconds"] < run["nanoseconds"]
        (gate,) = [item for item in after.picture.items if item.state]
        assert (gate.lane, gate.title, gate.state) == (1, "to worker2", "waited")
        assert gate.lines[2].startswith("gate: waited ")


def test_a_pass_that_goes_on(three: InProcessCluster) -> None:
    """Drawn while a run waits at its gate."""
    _, there = waits_at(three[1])
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", diamond, args=("worker2", leaf(4, 3))).sum()
        Stops.go_on.clear()

        def run() -> None:
            with three[0].as_current():
                context_id.backward(loss)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            assert there.wait(PATIENCE)
            found = context_id.draw()
            assert found.picture.lines == ["a backward pass is running"]
            assert [item.title for item in found.picture.items if item.state == "waiting"] == ["to worker2"]
            assert "gate: waits now" in lines(found)
        finally:
            Stops.go_on.set()
            thread.join(PATIENCE)
        assert not [item for item in context_id.draw().picture.items if item.state == "waiting"]


def test_a_pass_that_fails(three: InProcessCluster) -> None:
    Stops.error = ValueError("the gradient explodes")
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", on, args=("worker2", stop, leaf(4, 3))).sum()
        over = run_ended(three[2])
        with pytest.raises(ValueError, match="explodes"):
            context_id.backward(loss)
        assert over.wait(PATIENCE)
        found = context_id.draw()
        assert found.picture.failed
        assert "ValueError: the gradient explodes" in found.picture.lines[0]
        (item,) = [item for item in found.picture.items if item.state == "failed"]
        assert (item.lane, item.title) == (2, "to worker1")
        assert item.lines[1].startswith("run failed after ")
        assert [lane.failed for lane in found.picture.lanes] == [False, False, True]


def test_a_gate_that_waited_in_vain(three: InProcessCluster) -> None:
    _, there = waits_at(three[1])
    Stops.error = ValueError("no gradient")
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", diamond, args=("worker2", leaf(4, 3))).sum()
        Stops.go_on.clear()
        threading.Thread(target=lambda: (there.wait(PATIENCE), Stops.go_on.set())).start()
        over = [run_ended(worker) for worker in three[1:]]
        with pytest.raises(ValueError, match="no gradient"):
            context_id.backward(loss)
        assert all(each.wait(PATIENCE) for each in over)
        picture = context_id.draw().picture
        arrows = {
            (picture.items[arrow.tail].lane, picture.items[arrow.head].lane): arrow.carried
            for arrow in picture.arrows
            if arrow.message
        }
        assert arrows == {(0, 1): False, (1, 2): False, (2, 1): True, (1, 0): True}
        failed = [(item.lane, item.title) for item in picture.items if item.state == "failed"]
        assert sorted(failed) == [(1, "to worker0"), (1, "to worker2"), (2, "to worker1")]


def test_the_latest_pass_is_drawn(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", on, args=("worker2", stop, leaf(4, 3))).sum()
        Stops.error = ValueError("not yet")
        over = run_ended(three[2])
        with pytest.raises(ValueError, match="not yet"):
            context_id.backward(loss, retain_graph=True)
        assert over.wait(PATIENCE)
        Stops.error = None
        context_id.backward(loss)
        found = context_id.draw()
        assert found.picture.lines[0].startswith("last of 2 backward passes: ")
        assert not [item for item in found.picture.items if item.state]


# Workers that do not answer.


def test_a_dead_worker_is_drawn_as_such(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3)))
        three[2].shutdown(graceful=False)
        found = context_id.draw()
        lanes = found.picture.lanes
        assert [(lane.name, lane.answered) for lane in lanes] == [
            ("worker0", True),
            ("worker1", True),
            ("worker2", False),
        ]
        assert lanes[2].lines[0] == "no answer"
        assert "worker2" in lanes[2].lines[1]
        assert len([arrow for arrow in found.picture.arrows if arrow.message]) == 4
        ElementTree.fromstring(drawing.svg(found.parts))


def test_a_worker_that_hangs_does_not_keep_the_others_from_being_drawn(three: InProcessCluster) -> None:
    free = threading.Event()
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3)))
        three[2].agent.inspect = lambda topic, arguments: free.wait(PATIENCE)
        try:
            found = context_id.draw(timeout=0.3)
        finally:
            free.set()
        assert [lane.answered for lane in found.picture.lanes] == [True, True, False]
        assert found.picture.lanes[2].lines[0] == "no answer"


def test_in_a_federation_only_the_own_part_is_drawn() -> None:
    """Peers of a federation show nothing of themselves, and an unexpected question would end the connection."""
    with (
        InProcessCluster(2, options=RpcOptions(trust="federation")) as workers,
        workers[0].as_current(),
        dist_autograd.context() as context_id,
    ):
        made = rpc.rpc_sync("worker1", exposed_double, args=(leaf(2),))
        picture = context_id.draw().picture
        assert [lane.lines for lane in picture.lanes] == [
            ["1 node, 1 leaf of 2 elements"],
            ["no answer", "in a federation"],
        ]
        context_id.backward(made.sum())  # the connection still works
        picture = context_id.draw().picture
        sent = [arrow for arrow in picture.arrows if arrow.message and picture.items[arrow.tail].lane == 0]
        assert [arrow.carried for arrow in sent] == [True]


# As users see it.


def test_files(three: InProcessCluster, tmp_path: Path) -> None:
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", double, args=(leaf(2),))
        found = context_id.draw(tmp_path / "graph.svg", layout="own")
        assert (tmp_path / "graph.svg").read_text() == found.svg == drawing.svg(found.parts)
        context_id.draw(str(tmp_path / "graph.dot"))
        assert (tmp_path / "graph.dot").read_text().startswith("digraph context {")
        with pytest.raises(OptionError, match="must end with"):
            context_id.draw(tmp_path / "graph.bmp")
        with pytest.raises(OptionError, match="roots must be"):
            context_id.draw(roots=[3])  # type: ignore[list-item]


def test_a_context_id_stays_the_number_that_it_is(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        assert repr(context_id) == str(int(context_id))
        copied = pickle.loads(pickle.dumps(context_id))
        assert (type(copied), copied) == (ContextId, context_id)
        back = rpc.rpc_sync("worker1", max, args=(context_id, 0))
        assert (type(back), back) == (ContextId, context_id)


def test_a_notebook_shows_the_drawing_of_a_context_id(three: InProcessCluster) -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    formatter = formatters.DisplayFormatter()
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", double, args=(leaf(2),))
        shown, _ = formatter.format(context_id)
        assert shown["image/svg+xml"].startswith("<svg")
        assert shown["text/plain"] == str(int(context_id))
        drawn = context_id.draw()
        shown, _ = formatter.format(drawn)
        assert shown["image/svg+xml"] == drawn.svg
        assert "2 workers" in shown["text/plain"]
    assert list(formatter.format(context_id)[0]) == ["text/plain"]
    assert formatter.format(drawn)[0]["image/svg+xml"] == drawn.svg
    with pytest.raises(ContextError, match="Could not find autograd context"):
        context_id.draw()


def test_without_a_worker_a_notebook_shows_the_number() -> None:
    assert ContextId(7)._repr_svg_() is None


def test_a_context_can_be_drawn_by_any_worker_of_it(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3)))
        with three[2].as_current():
            found = context_id.draw()
        assert [lane.answered for lane in found.picture.lanes] == [True, True, True]
        assert require_joined(found) == 4


def test_from_within_a_remote_function(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", double, args=(leaf(2),))
        found = rpc.rpc_sync("worker1", draw_here, args=(context_id,))
        assert found == ["worker0", "worker1"]


def draw_here(context_id: ContextId) -> list[str]:
    return [lane.name for lane in context_id.draw().picture.lanes if lane.answered]


def test_a_guest_gathers_the_parts_as_plain_data() -> None:
    """As in the dashboard: it starts with any worker and asks those that are mentioned."""
    with (
        InProcessCluster(3, sockets=True) as workers,
        workers[0].as_current(),
        dist_autograd.context() as context_id,
    ):
        rpc.rpc_sync("worker1", pass_on, args=("worker2", leaf(4, 3)))
        parts: dict[int, Any] = {}
        todo = [2]
        while todo:
            rank = todo.pop()
            if rank not in parts:
                answer = ask_as_guest(workers, rank, int(context_id))
                parts[rank] = json.loads(json.dumps(answer))
                todo += mentioned(parts[rank])
        assert sorted(parts) == [0, 1, 2]
        assert drawing.svg(list(parts.values())) == context_id.draw(layout="own").svg
        unknown = {"context": 1, "rank": 0, "worker": "worker0", "known": False}
        assert ask_as_guest(workers, 0, 1) == unknown


def ask_as_guest(workers: InProcessCluster, rank: int, context: int) -> Any:
    guest = Guest(workers[0].agent.membership.find(rank).addresses, transport_for())
    try:
        return guest.ask("context", id=context)
    finally:
        guest.close()


@pytest.mark.long
def test_a_large_graph_is_drawn_in_seconds(three: InProcessCluster) -> None:
    with dist_autograd.context() as context_id:
        rpc.rpc_sync("worker1", deep, args=(leaf(2),))
        calls = [rpc.rpc_async(f"worker{1 + place % 2}", double, args=(leaf(2),)) for place in range(300)]
        loss = sum(call.wait().sum() for call in calls)
        began = time.monotonic()
        found = context_id.draw(roots=loss, layout="own")
        image = found.svg
        assert time.monotonic() - began < 5
        assert parts_of(found)[1]["nodes"] > 10_000
        assert len(boxes(image)) < 40
        assert not overlapping(boxes(image))
        assert any("+ 299 more" in each for each in texts(image))
