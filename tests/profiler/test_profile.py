"""A profile of a cluster in this process: the contents of the trace, the averages and the summary."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, record_function, schedule
from trace_reading import Reading

import backhaul
import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import MisuseError, OptionError
from backhaul.profiler import profile
from backhaul.testing import InProcessCluster

NAMES = ["worker0", "worker1", "worker2"]


def work(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = torch.tanh(x @ x)
    return x


def nested(x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("worker2", work, args=(x,))


async def later(x: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0.002)
    return x + 1


def fail() -> None:
    raise ValueError("on purpose")


def profile_itself() -> None:
    with torch.profiler.profile():
        torch.rand(8, 8)


def step() -> None:
    """Calls of all kinds, and a pass with a gate: the run here waits for gradients from the middle."""
    x = torch.rand(64, 64, requires_grad=True)
    with dist_autograd.context() as context:
        first = rpc.rpc_sync("worker1", torch.tanh, args=(x * 2,))
        middle = rpc.rpc_sync("worker1", nested, args=(first * 2,))
        futures = [rpc.rpc_async("worker1", work, args=(x.detach(),)) for _ in range(3)]
        rpc.rpc_sync("worker1", later, args=(x.detach(),))
        for future in futures:
            future.wait()
        dist_autograd.backward(context, [(middle + first).sum()])
    with pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("worker2", fail)


CALLS = {"tanh": 1, "nested": 1, "work": 4, "later": 1, "fail": 1}


@pytest.fixture(scope="module")
def crowd() -> Iterator[InProcessCluster]:
    with InProcessCluster(3) as workers:
        with workers[0].as_current():
            step()
        yield workers


@pytest.fixture(scope="module")
def profiled(crowd: InProcessCluster) -> profile:
    with crowd[0].as_current():
        with profile(clock_rounds=5, record_shapes=True) as prof:
            with record_function("mine"):
                step()
            prof.step()
            step()
        return prof


@pytest.fixture(scope="module")
def reading(profiled: profile, tmp_path_factory: pytest.TempPathFactory) -> Reading:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    profiled.export_chrome_trace(path)
    return Reading(path)


# The trace.


def test_each_worker_is_a_process_with_a_name(reading: Reading) -> None:
    assert sorted(reading.processes) == NAMES
    assert len(set(reading.pids)) == 3
    assert set(reading.tids) >= set(reading.threads())
    tids = [tid for _, tid in reading.tids]
    assert len(tids) == len(set(tids))


def test_the_slices_of_a_thread_nest(reading: Reading) -> None:
    reading.assert_nested()


def test_every_call_has_its_span_with_function_peer_number_and_bytes(reading: Reading) -> None:
    calls = [call for call in reading.slices("backhaul.call") if call.args["is_call"]]
    found = [call.name.split(" ")[0] for call in calls]
    assert {name: found.count(name) for name in set(found)} == {name: 2 * count for name, count in CALLS.items()}
    assert len({(call.process, call.args["call"]) for call in calls}) == len(calls)
    for call in calls:
        assert call.name.endswith(f" → {call.args['peer']}")
        assert call.args["failed"] == call.name.startswith("fail")
    assert all(call.args["bytes"] > 64 * 64 * 4 for call in calls if call.name.startswith("nested"))


def test_every_call_has_an_arrow_to_its_execution_and_one_back(reading: Reading) -> None:
    arrows = reading.arrows()
    calls = [call for call in reading.slices("backhaul.call") if call.args["is_call"]]
    there = {(arrow.source.process, arrow.source.args["call"]): arrow for arrow in arrows if arrow.name == "call"}
    back = {(arrow.target.process, arrow.target.args["call"]): arrow for arrow in arrows if arrow.name == "reply"}
    assert len(calls) == sum(CALLS.values()) * 2
    for call in calls:
        arrow = there[call.process, call.args["call"]]
        assert arrow.source == call
        assert call.begin <= arrow.left <= call.end
        execution = arrow.target
        assert execution.kind == "backhaul.serve"
        assert (execution.process, execution.args["peer"]) == (call.args["peer"], call.process)
        assert execution.args["call"] == call.args["call"]
        assert execution.begin <= arrow.arrived <= execution.end
        reply = back[call.process, call.args["call"]]
        assert reply.target.kind == "backhaul.result"
        assert call.holds(reply.target)
        assert reply.target.thread == call.thread
        assert reply.source.kind == ("backhaul.late" if call.name.startswith("later") else "backhaul.reply")
        assert (reply.source.process, reply.source.args["call"]) == (call.args["peer"], call.args["call"])
        assert reply.source.kind == "backhaul.late" or execution.holds(reply.source)
        assert call.begin < arrow.arrived < reply.left
        assert reply.target.begin <= reply.arrived <= call.end


def test_the_execution_and_its_operators_lie_within_the_call(reading: Reading) -> None:
    """The execution of a call, the user's function in it, and the function's operators, on the same thread."""
    calls = {(call.process, call.args["call"]): call for call in reading.slices("backhaul.call")}
    functions = reading.slices("backhaul.function")
    checked = operators = 0
    for execution in reading.slices("backhaul.serve"):
        call = calls.get((execution.args.get("peer", ""), execution.args.get("call", 0)))
        if call is None or not call.args["is_call"]:
            continue
        inner = [each for each in functions if each.thread == execution.thread and execution.holds(each)]
        assert len(inner) == 1
        assert call.name.startswith(f"{inner[0].name} ")
        assert call.holds(inner[0])
        checked += 1
        if inner[0].name == "work":
            mine = [
                each
                for each in reading.slices("cpu_op", execution.process)
                if each.thread == execution.thread and inner[0].holds(each)
            ]
            assert [each.name for each in mine].count("aten::mm") == 3
            operators += len(mine)
    assert checked == sum(CALLS.values()) * 2
    # worker2's operators are nowhere else.
    assert operators > 0
    assert all(
        any(function.holds(each) for function in functions if function.process == "worker2")
        for each in reading.slices("cpu_op", "worker2", "aten::mm")
        if not any(engine.holds(each) for engine in reading.slices("backhaul.engine", "worker2"))
    )


def test_a_coroutine_has_a_span_until_it_is_done(reading: Reading) -> None:
    late = reading.slices("backhaul.late")
    assert {span.name for span in late} == {"later"}
    assert all(span.end - span.begin > 2000 for span in late)


def test_gradients_have_arrows_to_the_runs_they_start_and_the_gates_they_open(reading: Reading) -> None:
    arrows = [arrow for arrow in reading.arrows() if arrow.name == "gradients"]
    messages = reading.slices("backhaul.gradients")
    assert {arrow.source for arrow in arrows} == set(messages)
    for arrow in arrows:
        assert arrow.source.args["peer"] == arrow.target.process
        assert arrow.source.args["backward"] == arrow.target.args["backward"]
        assert arrow.left < arrow.arrived
    runs = [arrow for arrow in arrows if arrow.target.kind == "backhaul.run"]
    for arrow in runs:
        assert set(arrow.source.args["sources"]) & set(arrow.target.args["sources"])
    gates = reading.slices("backhaul.gate")
    assert gates
    opened = {arrow.target: arrow for arrow in arrows if arrow.target.kind == "backhaul.opens"}
    assert len(opened) == len(gates)
    for gate in gates:
        target = next(each for each in opened if each.thread == gate.thread and gate.holds(each))
        assert gate.args["source"] in opened[target].source.args["sources"]
        assert gate.begin < opened[target].arrived <= gate.end
    started = {arrow.target for arrow in runs}
    roots = [run for run in reading.slices("backhaul.run") if run not in started]
    assert {run.process for run in roots} == {"worker0"}
    assert len(roots) <= 2  # the runs that started the passes


def test_passes_runs_and_torch_s_engine_nest(reading: Reading) -> None:
    assert len(reading.slices("backhaul.pass", "worker0")) == 2
    for engine in reading.slices("backhaul.engine"):
        assert any(run.thread == engine.thread and run.holds(engine) for run in reading.slices("backhaul.run"))
    assert {run.process for run in reading.slices("backhaul.run")} == set(NAMES)


def test_kineto_s_arrows_do_not_mix(reading: Reading) -> None:
    """From an operator to its backward, always on the same worker; `arrows` has checked that ids differ."""
    arrows = reading.arrows("fwdbwd")
    assert {arrow.source.process for arrow in arrows} == set(NAMES)
    assert all(arrow.source.process == arrow.target.process for arrow in arrows)


def test_the_calls_that_control_the_profile_are_not_in_it(reading: Reading) -> None:
    names = {slice.name for slice in reading.slices()}
    controls = ("introduce", "read_clock", "arm", "record", "stop", "fetch", "disarm")
    assert not {name for name in names for each in controls if each in name.split(" ")}
    served = [span for span in reading.slices("backhaul.serve") if span.args.get("message") == "Call"]
    assert len(served) == sum(CALLS.values()) * 2


def test_the_clocks_are_in_the_metadata(reading: Reading) -> None:
    for name, about in reading.about["workers"].items():
        assert about["clock_offset_ns"] == 0
        if name != "worker0":
            assert about["round_trips"] == 5
            assert 0 < about["measured_error_ns"] < 1e9
            assert abs(about["measured_offset_ns"]) <= about["measured_error_ns"]
    assert reading.about["profiled_by"] == "worker0"


def test_steps_and_blocks_of_the_user_are_in_the_trace(reading: Reading) -> None:
    steps = reading.slices("backhaul.step", "worker0")
    assert [each.name for each in steps] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert len(reading.slices("user_annotation", "worker0", "mine")) == 1


def test_a_compressed_trace_is_the_same(profiled: profile, reading: Reading, tmp_path: Path) -> None:
    profiled.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    assert (tmp_path / "trace.json.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert Reading(tmp_path / "trace.json.gz").rows == reading.rows


def test_references_and_callbacks_and_calls_to_itself(crowd: InProcessCluster, tmp_path: Path) -> None:
    with crowd[0].as_current(), profile(clock_rounds=1) as prof:
        ref = rpc.remote("worker1", work, args=(torch.rand(8, 8),))
        assert ref.rpc_sync().size() == (8, 8)
        ref.to_here()
        rpc.rpc_sync("worker0", work, args=(torch.rand(8, 8),))
        futures = [rpc.rpc_async("worker2", int).then(lambda future: future.wait()) for _ in range(20)]
        for future in futures:
            future.wait()
    prof.export_chrome_trace(tmp_path / "trace.json")
    reading = Reading(tmp_path / "trace.json")
    reading.assert_nested()
    calls = {call.args["call"]: call for call in reading.slices("backhaul.call", "worker0") if call.args["is_call"]}
    assert len(calls) == 24
    for name in ("call", "reply"):
        ends = [arrow.source if name == "call" else arrow.target for arrow in reading.arrows() if arrow.name == name]
        assert {end.args["call"] for end in ends if end.process == "worker0"} >= set(calls)
    assert any(call.name == "method size → worker1" for call in calls.values())


# Averages.


def test_averages_have_the_operators_of_each_worker(profiled: profile) -> None:
    averages = {(row.key, row.worker): row for row in profiled.key_averages()}
    assert averages["aten::tanh", "worker2"].count == 2 * 3
    assert averages["aten::tanh", "worker1"].count == 2 * (3 * 3 + 1)
    assert ("aten::tanh", "worker0") not in averages
    assert averages["mine", "worker0"].count == 1
    row = averages["aten::tanh", "worker2"]
    mine = [each for each in profiled.events() if (each.name, each.worker) == (row.key, row.worker)]
    assert row.cpu_time_total == pytest.approx(sum(each.cpu_time_total for each in mine))
    assert row.cpu_time == pytest.approx(row.cpu_time_total / row.count)


def test_averages_by_shape(profiled: profile) -> None:
    shapes = {row.input_shapes for row in profiled.key_averages(group_by_input_shape=True) if row.key == "aten::mm"}
    assert shapes == {"[[64, 64], [64, 64]]"}


def test_the_table_has_a_worker_column(profiled: profile) -> None:
    lines = profiled.table(sort_by="count", row_limit=3).splitlines()
    assert lines[1].split()[:2] == ["Name", "Worker"]
    rows = lines[3:6]
    counts = [int(row.split()[-1]) for row in rows]
    assert counts == sorted(counts, reverse=True)
    assert lines[6].startswith("---")
    assert str(profiled.key_averages()) == profiled.table()
    with pytest.raises(OptionError, match="sort_by 'nothing' must be None or one of"):
        profiled.table(sort_by="nothing")


# Summary.


def test_the_shares_of_each_worker_add_up_to_the_wall_time(profiled: profile) -> None:
    summary = profiled.summary()
    assert [each.worker for each in summary.workers] == NAMES
    for each in summary.workers:
        assert sum(each.seconds.values()) == pytest.approx(each.wall, rel=0.05)
        assert all(seconds >= 0 for seconds in each.seconds.values())
        assert each.wall == summary.seconds
    assert summary["worker0"].seconds["gates"] > 0
    assert summary["worker0"].seconds["replies"] > 0
    assert summary["worker2"].seconds["idle"] > 0
    assert all(each.seconds["compute"] > 0 for each in summary.workers)


def test_the_chain_of_a_step_covers_it_without_gaps(profiled: profile) -> None:
    summary = profiled.summary()
    assert [chain.step for chain in summary.chains] == ["ProfilerStep#0", "ProfilerStep#1"]
    for chain in summary.chains:
        assert sum(segment.seconds for segment in chain.segments) == pytest.approx(chain.seconds, rel=1e-6)
        assert all(segment.seconds > 0 for segment in chain.segments)
    assert {segment.worker for segment in summary.chain.segments} >= set(NAMES)
    parts = {segment.what for segment in summary.chain.segments}
    assert {"torch's engine", "between workers"} <= parts
    assert parts & CALLS.keys()  # which of the concurrent functions are on it depends on timing


def test_the_summary_prints_as_a_table(profiled: profile) -> None:
    text = str(profiled.summary())
    assert "waits: gates" in text
    assert "Longest chain of ProfilerStep#" in text
    assert all(name in text for name in NAMES)


# Using it.


def test_a_profile_of_some_workers(crowd: InProcessCluster) -> None:
    with crowd[0].as_current(), profile(workers=[crowd[2].info, "worker0"], clock_rounds=1) as prof:
        step()
    assert [each.worker for each in prof.summary().workers] == ["worker0", "worker2"]


@pytest.mark.long
def test_options_go_to_torch(crowd: InProcessCluster) -> None:
    options: Any = {"with_stack": True, "profile_memory": True, "experimental_config": {"verbose": True}}
    with (
        crowd[0].as_current(),
        profile(activities=[ProfilerActivity.CPU], clock_rounds=1, **options) as prof,
    ):
        step()
    trace = prof.chrome_trace()
    assert any(row.get("cat") == "python_function" for row in trace["traceEvents"])
    sizes = [row for row in trace["traceEvents"] if row["ph"] == "C"]
    assert sizes
    assert all(row["args"]["resident bytes"] > 1e6 for row in sizes)
    assert any(each.stack for each in prof.events())
    json.dumps(trace)


def test_a_schedule_steps_all_workers(crowd: InProcessCluster) -> None:
    ready: list[tuple[list[str], int]] = []

    def on_ready(prof: profile) -> None:
        steps = [row["name"] for row in prof.chrome_trace()["traceEvents"] if row.get("cat") == "backhaul.step"]
        counts = {row.worker: row.count for row in prof.key_averages() if row.key == "aten::mm"}
        ready.append((steps, counts["worker2"]))

    plan = schedule(skip_first=1, wait=1, warmup=1, active=2, repeat=2)
    with crowd[0].as_current(), profile(schedule=plan, on_trace_ready=on_ready, clock_rounds=1) as prof:
        for _ in range(10):
            rpc.rpc_sync("worker2", work, args=(torch.rand(8, 8),))
            prof.step()
    assert ready == [
        (["ProfilerStep#3", "ProfilerStep#4"], 6),
        (["ProfilerStep#7", "ProfilerStep#8"], 6),
    ]
    assert len(prof.summary().chains) == 2


def test_an_exception_in_the_block_is_raised_and_the_profile_is_there(crowd: InProcessCluster) -> None:
    prof = profile(clock_rounds=1)

    def block() -> None:
        with prof:
            rpc.rpc_sync("worker1", work, args=(torch.rand(8, 8),))
            raise ZeroDivisionError

    with crowd[0].as_current(), pytest.raises(ZeroDivisionError):
        block()
    assert any(row.worker == "worker1" for row in prof.key_averages())


def test_misuse(crowd: InProcessCluster, tmp_path: Path) -> None:
    with crowd[0].as_current():
        prof = profile(clock_rounds=1)
        with pytest.raises(MisuseError, match="the block has not ended"):
            prof.summary()
        with pytest.raises(MisuseError, match="runs only inside its with block"):
            prof.step()
        with prof:
            with pytest.raises(MisuseError, match="the block has not ended"):
                prof.export_chrome_trace(tmp_path / "trace.json")
            with pytest.raises(MisuseError, match="a profile is for one block"):
                prof.__enter__()
            with pytest.raises(MisuseError, match="worker 'worker0' is already being profiled by worker 'worker0'"):
                profile(clock_rounds=1).__enter__()
            with (
                crowd[1].as_current(),
                pytest.raises(MisuseError, match=r"worker 'worker\d' is already being profiled by worker 'worker0'"),
            ):
                profile(clock_rounds=1).__enter__()
        prof.export_chrome_trace(tmp_path / "trace.json")
        with pytest.raises(MisuseError, match="a profile is for one block"):
            prof.__enter__()
        never = profile(schedule=schedule(wait=5, warmup=1, active=1), clock_rounds=1)
        with never:
            pass
        with pytest.raises(MisuseError, match="its schedule never recorded a step"):
            never.events()
        with torch.profiler.profile(), pytest.raises(MisuseError, match="a torch profiler already runs on this thread"):
            profile().__enter__()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": "worker1"}, r"as in \['worker1'\]"),
        ({"nonsense": 1}, "nonsense is not an option"),
        ({"record_shapes": 1}, "must be True or False"),
        ({"max_events": 0}, "max_events=0 must be a positive number"),
        ({"clock_rounds": True}, "clock_rounds=True"),
        ({"experimental_config": object()}, "must be a dict of its fields"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        profile(**arguments)


def test_an_unknown_worker(crowd: InProcessCluster) -> None:
    with crowd[0].as_current():
        with pytest.raises(MisuseError, match="worker9"):
            profile(workers=["worker9"]).__enter__()
        with pytest.raises(OptionError, match="neither a name nor a rank nor a handle"):
            profile(workers=[3.5]).__enter__()
    assert not crowd[0].agent.observers


def test_dropped_events_cause_a_warning(crowd: InProcessCluster) -> None:
    with (
        crowd[0].as_current(),
        pytest.warns(RuntimeWarning, match=r"max_events=20 was reached, and \d+ of worker 'worker0'"),
        profile(max_events=20, clock_rounds=1) as prof,
    ):
        step()
    about = prof.chrome_trace()["backhaul"]["workers"]
    assert about["worker0"]["events_dropped"] > 0
    for each in prof.summary().workers:
        assert sum(each.seconds.values()) == pytest.approx(each.wall, rel=0.05)


def test_another_profiler_in_the_block_causes_a_warning(crowd: InProcessCluster) -> None:
    with (
        crowd[0].as_current(),
        pytest.warns(RuntimeWarning, match="no operators of worker 'worker0': another torch.profiler was started"),
        profile(clock_rounds=1) as prof,
    ):
        rpc.rpc_sync("worker1", profile_itself)
    assert prof.events() == []
    assert prof.summary().workers


def test_nothing_is_left_behind(crowd: InProcessCluster) -> None:
    with crowd[0].as_current(), profile(clock_rounds=1):
        assert all(worker.agent.observers for worker in crowd)
    assert not any(worker.agent.observers for worker in crowd)
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("-profile")]


def test_inside_of_a_context_the_profile_does_not_join_it(crowd: InProcessCluster) -> None:
    with crowd[0].as_current(), dist_autograd.context() as context:
        with profile(clock_rounds=1):
            pass
        found = next(each for each in crowd[0].autograd.contexts if each.id == int(context))
        assert not found.told


def test_the_package_exports_profile() -> None:
    assert backhaul.profiler.profile is profile


def test_when_the_profiling_worker_is_lost_the_others_end_their_part() -> None:
    with InProcessCluster(3) as workers:
        with workers[0].as_current():
            prof = profile(clock_rounds=1)
            prof.__enter__()
        assert workers[2].agent.observers
        workers[0].shutdown(graceful=False)
        deadline = time.monotonic() + 10
        while any(worker.agent.observers for worker in workers[1:]) and time.monotonic() < deadline:
            time.sleep(0.001)  # there is no event for this
        assert not any(worker.agent.observers for worker in workers[1:])
        with workers[1].as_current(), pytest.raises(MisuseError, match="torch has only one profiler for each process"):
            profile(workers=["worker2"]).__enter__()
        with pytest.warns(RuntimeWarning, match="worker 'worker0' has been shut down"):
            prof.__exit__(None, None, None)
        with workers[1].as_current(), profile(workers=["worker2"], clock_rounds=1) as other:
            rpc.rpc_sync("worker2", work, args=(torch.rand(8, 8),))
        assert {row.worker for row in other.key_averages()} == {"worker1", "worker2"}


def test_in_a_federation_there_is_no_profile() -> None:
    with InProcessCluster(2, options=rpc.RpcOptions(trust="federation")) as workers, workers[0].as_current():
        with pytest.raises(MisuseError, match="the members of a federation do not share internal data"):
            profile().__enter__()
        assert not workers[0].agent.observers
