"""Torch's own profilers over remote calls."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import profiler, profiler_legacy
from torch.profiler import ProfilerAction

from backhaul import autograd, rpc
from backhaul.agent.observing import Event, Invoked, RunEnded
from backhaul.dropin.rpc.server_process_global_profiler import _server_process_global_profile
from backhaul.remote_profile import callee, profilers
from backhaul.remote_profile.rows import REMOTE, Report, Span, graft
from backhaul.testing import InProcessCluster

Profile = Callable[..., Any]

KINETO = torch.profiler.profile
LEGACY: Any = profiler_legacy.profile
PROFILES = [pytest.param(KINETO, id="kineto"), pytest.param(LEGACY, id="legacy")]
ALL_PROFILES = [*PROFILES, pytest.param(profiler.profile, id="autograd")]

# Some versions of torch warn at each profile, even with one cycle.
pytestmark = pytest.mark.filterwarnings("ignore:.*clears events at the end of each cycle")

released = threading.Event()


def work(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(x, 2).relu()


def pass_on(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, work, args=(x.neg(),))


@rpc.functions.async_execution
def pass_on_later(to: str, x: torch.Tensor) -> rpc.Future[torch.Tensor]:
    return rpc.rpc_async(to, work, args=(x.neg(),))


async def in_steps(x: torch.Tensor) -> torch.Tensor:
    y = x.neg()
    await asyncio.sleep(0)
    return y.exp()


@rpc.functions.async_execution
def no_future(x: torch.Tensor) -> torch.Tensor:
    return x


def fail(x: torch.Tensor) -> None:
    x.neg()
    raise KeyError("not here")


def wait_for_release(x: torch.Tensor) -> torch.Tensor:
    assert released.wait(60)
    return x.neg()


def profile_itself(x: torch.Tensor) -> list[str]:
    with LEGACY() as mine:
        x.neg()
    with KINETO() as also:
        x.exp()
    return [event.name for event in (*mine.function_events, *also.events())]


def in_a_block(x: torch.Tensor) -> torch.Tensor:
    with profiler.record_function("##forward##"):
        return x.exp()


class Model:
    def __init__(self) -> None:
        self.weight = torch.ones(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mul(self.weight, x)


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with InProcessCluster(3, sockets=True) as cluster, cluster[0].as_current():
        yield cluster


def events(profile: Any) -> list[Any]:
    """The events of a finished profile of any kind."""
    found = profile.events() if hasattr(profile, "events") else profile.function_events
    return list(found)


def named(profile: Any, name: str) -> Any:
    """The only event of this name."""
    found = [event for event in events(profile) if event.name == name]
    assert len(found) == 1, (name, [event.name for event in events(profile)])
    return found[0]


def below(profile: Any, call: str) -> list[str]:
    """The names of the events of a callee."""
    return [e.name.removeprefix(call + REMOTE) for e in events(profile) if e.name.startswith(call + REMOTE)]


# What a profile shows.


@pytest.mark.parametrize("profile", ALL_PROFILES)
def test_the_callee_s_operators_are_in_the_caller_s_profile(profile: Profile, workers: InProcessCluster) -> None:
    x = torch.tensor([-1.0, 1.0])
    with profile() as done:
        first = rpc.rpc_sync("worker1", work, args=(x,))
        later = rpc.rpc_async("worker2", work, args=(x,))
        second = later.wait()
        third = rpc.remote("worker1", work, args=(x,)).to_here()
    for value in (first, second, third):
        assert value.tolist() == [0.0, 2.0]
    for mode, rank in (("sync", 1), ("async", 2), ("remote", 1)):
        key = f"rpc_{mode}#work(worker0 -> worker{rank})"
        call = named(done, key)
        assert (call.node_id, call.is_remote, call.is_async) == (0, False, mode != "sync")
        assert {"aten::mul", "aten::relu"} <= set(below(done, key))
        remote = named(done, f"{key}{REMOTE}aten::mul")
        assert (remote.node_id, remote.is_remote) == (rank, True)
        assert call.time_range.start < remote.time_range.start < remote.time_range.end < call.time_range.end
    assert named(done, "to_here#(worker0)->(worker1)").count == 1
    assert not [event.name for event in events(done) if "[call" in event.name]
    starts = [event.time_range.start for event in events(done)]
    assert starts == sorted(starts)


@pytest.mark.parametrize("profile", PROFILES)
def test_averages_and_tables_include_remote_operators(profile: Profile, workers: InProcessCluster) -> None:
    with profile() as done:
        for _ in range(3):
            rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))
    key = "rpc_sync#aten::add(worker0 -> worker1)"
    counts = {(each.key, each.node_id): each.count for each in done.key_averages()}
    assert counts[key, 0] == counts[f"{key}{REMOTE}aten::add", 1] == 3
    assert "remote_op" in done.key_averages().table(max_name_column_width=200)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_caller_s_profiler_options_hold_at_the_callee(profile: Profile, workers: InProcessCluster) -> None:
    x = torch.ones(4, 4)
    key = f"rpc_sync#aten::mm(worker0 -> worker1){REMOTE}aten::mm"
    with profile(record_shapes=True, profile_memory=True, with_flops=True, with_stack=True) as much:
        rpc.rpc_sync("worker1", torch.mm, args=(x, x))
    with profile() as little:
        rpc.rpc_sync("worker1", torch.mm, args=(x, x))
    found = named(much, key)
    assert found.input_shapes == [[4, 4], [4, 4]]
    assert (found.cpu_memory_usage, found.flops) == (64, 128)
    assert any("callee.py" in line for line in found.stack)
    plain = named(little, key)
    assert (plain.input_shapes, plain.cpu_memory_usage, plain.flops, plain.stack) == ([], 0, 0, [])


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("function", [pass_on, pass_on_later])
def test_names_nest_as_calls_do(
    profile: Profile, function: Callable[..., torch.Tensor], workers: InProcessCluster
) -> None:
    with profile() as done:
        value = rpc.rpc_sync("worker1", function, args=("worker2", torch.tensor([-3.0])))
    assert value.tolist() == [6.0]
    mode = "sync" if function is pass_on else "async"
    outer = f"rpc_sync#{function.__name__}(worker0 -> worker1)"
    inner = f"{outer}{REMOTE}rpc_{mode}#work(worker1 -> worker2)"
    assert named(done, f"{outer}{REMOTE}aten::neg").node_id == 1
    assert named(done, inner).node_id == 1
    assert named(done, f"{inner}{REMOTE}aten::mul").node_id == 2


def test_blocks_of_the_callee_have_their_operators_below_them(workers: InProcessCluster) -> None:
    with LEGACY() as done:
        torch.ones(2).exp()
        rpc.rpc_sync("worker1", in_a_block, args=(torch.ones(2),))
    block = next(event for event in events(done) if event.name.endswith("##forward##"))
    assert [child.name.rpartition(REMOTE)[2] for child in block.cpu_children] == ["aten::exp"]


@pytest.mark.parametrize("profile", PROFILES)
def test_all_steps_of_a_coroutine(profile: Profile, workers: InProcessCluster) -> None:
    with profile() as done:
        value = rpc.rpc_async("worker1", in_steps, args=(torch.zeros(1),)).wait()
    assert value.tolist() == [1.0]
    assert {"aten::neg", "aten::exp"} <= set(below(done, "rpc_async#in_steps(worker0 -> worker1)"))


@pytest.mark.parametrize("profile", PROFILES)
def test_methods_of_a_reference(profile: Profile, workers: InProcessCluster) -> None:
    model = rpc.remote("worker1", Model)
    x = torch.tensor([1.0, 2.0])
    with profile() as done:
        assert model.rpc_sync().forward(x).tolist() == [1.0, 2.0]
        assert model.rpc_async().forward(x).wait().tolist() == [1.0, 2.0]
        assert model.remote().forward(x).to_here().tolist() == [1.0, 2.0]
    for mode in ("sync", "async", "remote"):
        assert "aten::mul" in below(done, f"rpc_{mode}#RRef.forward(worker0 -> worker1)")


def test_a_method_of_a_value_that_is_not_there_yet(workers: InProcessCluster) -> None:
    released.clear()
    held = rpc.remote("worker1", wait_for_release, args=(torch.ones(1),))
    with LEGACY() as done:
        future = held.rpc_async().add(1)
        released.set()
        assert future.wait().tolist() == [0.0]
    assert "aten::add" in below(done, "rpc_async#RRef.add(worker0 -> worker1)")


def test_a_call_to_oneself(workers: InProcessCluster) -> None:
    with LEGACY() as done:
        rpc.rpc_sync("worker0", work, args=(torch.ones(1),))
    assert "aten::mul" in below(done, "rpc_sync#work(worker0 -> worker0)")


def test_a_backward_pass_has_torch_s_names(workers: InProcessCluster) -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 3)).sum()
        with profiler.profile() as done:
            autograd.backward(context, [loss])
        assert autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]
    whole = named(done, "torch::distributed::autograd::backward").time_range
    for part in ("torch::distributed::autograd::SendRpcBackward", "RecvRpcBackward"):
        inside = named(done, part).time_range
        assert whole.start < inside.start < inside.end < whole.end


@pytest.mark.parametrize("profile", ALL_PROFILES)
def test_a_run_of_another_thread_is_part_of_the_pass(workers: InProcessCluster, profile: Profile) -> None:
    """The thread of `backward` is busy when the gradients come back, so a thread of the pool runs the Send."""
    here = threading.get_ident()
    ended = threading.Event()

    def observe(event: Event) -> None:
        if isinstance(event, RunEnded) and event.thread != here:
            ended.set()

    def busy(gradient: torch.Tensor) -> None:
        assert ended.wait(20)

    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        far = rpc.rpc_sync("worker1", torch.mul, args=(x, 3))
        near = y * 2
        near.register_hook(busy)
        forget = workers[0].agent.observers.add(observe)
        with profile() as done:
            autograd.backward(context, [(far + near).sum()])
        forget()
        assert autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]
    events = done.events() if profile is KINETO else done.function_events
    (whole,) = (event for event in events if event.name == "torch::distributed::autograd::backward")
    (run,) = (event for event in events if event.name == "torch::distributed::autograd::SendRpcBackward")
    assert run.thread != whole.thread
    assert run.count == 1
    assert whole.time_range.start < run.time_range.start < run.time_range.end < whole.time_range.end


def test_a_chrome_trace_of_kineto(workers: InProcessCluster, tmp_path: Path) -> None:
    with KINETO(record_shapes=True) as done:
        rpc.rpc_sync("worker1", pass_on, args=("worker2", torch.ones(2)))
        rpc.rpc_async("worker2", work, args=(torch.ones(2),)).wait()
    done.export_chrome_trace(str(tmp_path / "trace.json"))
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert not [event for event in found if "[call" in str(event.get("name"))]
    key = "rpc_sync#pass_on(worker0 -> worker1)"
    (call,) = (event for event in found if event["name"] == key)
    remote = [event for event in found if event["name"].startswith(key + REMOTE)]
    processes = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name" and e["pid"] != call["pid"]}
    assert {"worker1", "worker2"} <= {processes[event["pid"]] for event in remote}
    for event in remote:
        assert call["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= call["ts"] + call["dur"]
    (multiplied,) = (event for event in remote if event["name"].endswith("aten::mul"))
    assert multiplied["args"]["Input Dims"][0] == [2]
    later = [event for event in found if event["name"] == "rpc_async#work(worker0 -> worker2)"]
    assert sorted(event["ph"] for event in later) == ["X", "b", "e"]


def test_the_trace_of_the_legacy_profiler(workers: InProcessCluster, tmp_path: Path) -> None:
    with LEGACY() as done:
        rpc.rpc_sync("worker1", work, args=(torch.ones(2),))
    done.export_chrome_trace(str(tmp_path / "trace.json"))
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())]
    assert f"rpc_sync#work(worker0 -> worker1){REMOTE}aten::mul" in names


def test_a_schedule_gives_each_cycle_its_calls(workers: InProcessCluster) -> None:
    cycles: list[list[str]] = []
    steps = [ProfilerAction.RECORD_AND_SAVE, ProfilerAction.NONE, ProfilerAction.RECORD_AND_SAVE, ProfilerAction.NONE]
    with KINETO(
        schedule=lambda step: steps[step],
        on_trace_ready=lambda p: cycles.append([e.name for e in p.events() if e.name.startswith("rpc_sync")]),
    ) as done:
        for number in range(3):
            rpc.rpc_sync(f"worker{1 + number // 2}", torch.neg, args=(torch.ones(1),))
            done.step()
    keys = [f"rpc_sync#aten::neg(worker0 -> worker{rank})" for rank in (1, 2)]
    assert cycles == [[key, f"{key}{REMOTE}aten::neg"] for key in keys]


# A profile changes no results.


def outcome(call: Callable[[], Any]) -> tuple[type, str, Any]:
    """The result or exception of a call, in a form that can be compared."""
    try:
        value = call()
    except Exception as error:
        return type(error), str(error), type(error.__cause__)
    return type(value), repr(value), None


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    "call",
    [
        lambda: rpc.rpc_sync("worker1", fail, args=(torch.ones(1),)),
        lambda: rpc.rpc_async("worker1", fail, args=(torch.ones(1),)).wait(),
        lambda: rpc.remote("worker1", fail, args=(torch.ones(1),)).to_here(),
        lambda: rpc.rpc_sync("worker1", no_future, args=(torch.ones(1),)),
        lambda: rpc.rpc_sync("worker1", torch.mm, args=(torch.ones(1), torch.ones(2))),
        lambda: rpc.rpc_sync("worker1", work, args=(threading.Lock(),)),
        lambda: rpc.rpc_async("worker1", work, kwargs={"x": [threading.Lock()]}),
        lambda: rpc.remote("worker1", work, args=(threading.Lock(),)),
        lambda: rpc.rpc_sync("worker1", lambda: None),
        lambda: rpc.rpc_sync("nobody", work, args=(torch.ones(1),)),
        lambda: rpc.remote("nobody", work, args=(torch.ones(1),)),
        lambda: rpc.rpc_sync("worker1", threading.Lock),
        lambda: rpc.rpc_sync("worker1", work, kwargs={"x": torch.ones(2)}),
        lambda: rpc.remote("worker1", Model).rpc_sync().forward(torch.ones(2)),
        lambda: rpc.remote("worker1", Model).rpc_sync().backward(torch.ones(2)),
    ],
)
def test_values_and_errors_stay_as_they_are(
    profile: Profile, call: Callable[[], Any], workers: InProcessCluster
) -> None:
    plain = outcome(call)
    with profile() as done:
        profiled = outcome(call)
    assert profiled == plain
    if plain[0] is KeyError:
        assert [event for event in events(done) if "#fail(worker0 -> worker1)" in event.name]


def test_a_timeout_has_the_same_text_under_a_profiler(workers: InProcessCluster) -> None:
    released.clear()
    rpc.rpc_sync("worker1", work, args=(torch.ones(1),))  # so that the time below does not include the greeting
    with LEGACY() as done, pytest.raises(rpc.RpcTimeoutError, match="wait_for_release"):
        rpc.rpc_sync("worker1", wait_for_release, args=(torch.ones(1),), timeout=0.05)
    released.set()
    assert below(done, "rpc_sync#wait_for_release(worker0 -> worker1)") == []


def stop_its_profiler(x: torch.Tensor) -> torch.Tensor:
    torch.autograd._disable_profiler_legacy()
    return x.neg()


def test_a_function_that_meddles_with_the_profiler(workers: InProcessCluster, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), LEGACY() as done:
        assert rpc.rpc_sync("worker1", stop_its_profiler, args=(torch.ones(1),)).tolist() == [-1.0]
        assert rpc.rpc_sync("worker1", work, args=(torch.ones(1),)).tolist() == [2.0]
    assert "could not be profiled" in caplog.text
    assert "aten::mul" in below(done, "rpc_sync#work(worker0 -> worker1)")


@pytest.mark.parametrize("profile", PROFILES)
def test_gradients_stay_as_they_are(profile: Profile, workers: InProcessCluster) -> None:
    def gradients() -> list[float]:
        x = torch.tensor([-1.0, 2.0], requires_grad=True)
        with autograd.context() as context:
            y = rpc.rpc_sync("worker1", pass_on, args=("worker2", x))
            z = rpc.rpc_async("worker1", work, args=(y,)).wait()
            out = rpc.remote("worker2", work, args=(z + x,)).to_here()
            autograd.backward(context, [out.sum()])
            return autograd.get_gradients(context)[x].tolist()

    plain = gradients()
    with profile() as done:
        profiled = gradients()
    assert profiled == plain
    assert named(done, "torch::distributed::autograd::backward")


def test_a_function_may_profile_itself(workers: InProcessCluster) -> None:
    with LEGACY() as done:
        names = rpc.rpc_sync("worker1", profile_itself, args=(torch.ones(1),))
    assert {"aten::neg", "aten::exp"} <= set(names)
    assert named(done, "rpc_sync#profile_itself(worker0 -> worker1)")


def test_without_a_profiler_calls_go_their_usual_way(workers: InProcessCluster) -> None:
    seen: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, Invoked):
            seen.append(event.what)

    forget = workers[1].agent.observers.add(observe)
    try:
        rpc.rpc_sync("worker1", work, args=(torch.ones(1),))
        assert seen == ["work"]
        with LEGACY():
            rpc.rpc_sync("worker1", work, args=(torch.ones(1),))
        assert seen[1:] == ["run_profiled", "work"]
    finally:
        forget()


def test_profiles_without_calls_are_left_alone(workers: InProcessCluster) -> None:
    with LEGACY() as done:
        torch.ones(1)
    assert {event.node_id for event in events(done)} == {-1}
    assert not profilers.is_on()


# Ends, threads, and other profilers.


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_that_ends_before_the_call_does(profile: Profile, workers: InProcessCluster) -> None:
    released.clear()
    with profile() as done:
        future = rpc.rpc_async("worker1", wait_for_release, args=(torch.ones(1),))
        rref = rpc.remote("worker1", wait_for_release, args=(torch.ones(1),))
        torch.ones(1)
    assert not [event for event in events(done) if event.is_remote]
    released.set()
    assert future.wait().tolist() == rref.to_here().tolist() == [-1.0]
    key = "rpc_async#wait_for_release(worker0 -> worker1)"
    last = max(event.time_range.end for event in events(done) if not event.is_async)
    assert named(done, key).time_range.end >= last
    assert "aten::neg" not in below(done, key)


def test_each_thread_has_its_own_calls(workers: InProcessCluster) -> None:
    """As torch's test_profiler_rpc_key_names, which torch skips."""
    done: dict[int, Any] = {}
    barrier = threading.Barrier(4)

    def run(number: int) -> None:
        function, rank = (torch.neg, torch.exp, torch.sin, torch.cos)[number], 1 + number % 2
        with workers[0].as_current(), LEGACY() as mine:
            for _ in range(10):
                barrier.wait()
                rpc.rpc_async(f"worker{rank}", function, args=(torch.ones(1),)).wait()
        done[number] = mine

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number, name in enumerate(("neg", "exp", "sin", "cos")):
        key = f"rpc_async#aten::{name}(worker0 -> worker{1 + number % 2})"
        assert [event.name for event in events(done[number]) if event.name == key] == [key] * 10
        assert [event.name for event in events(done[number]) if event.is_remote] == [f"{key}{REMOTE}aten::{name}"] * 10


def test_kineto_here_and_the_legacy_profiler_in_a_thread(workers: InProcessCluster) -> None:
    inner: list[Any] = []

    def run() -> None:
        with workers[0].as_current(), LEGACY() as mine:
            rpc.rpc_sync("worker1", torch.exp, args=(torch.ones(1),))
        inner.append(mine)

    with KINETO() as outer:
        rpc.rpc_sync("worker2", torch.neg, args=(torch.ones(1),))
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
    assert below(outer, "rpc_sync#aten::neg(worker0 -> worker2)") == ["aten::neg"]
    assert not [event for event in events(outer) if "exp(" in event.name]
    assert below(inner[0], "rpc_sync#aten::exp(worker0 -> worker1)") == ["aten::exp"]


def test_a_block_around_a_future_ends_when_the_future_does(workers: InProcessCluster) -> None:
    released.clear()
    with LEGACY() as done:
        with profiler.record_function("around") as block:
            future = rpc.rpc_async("worker1", wait_for_release, args=(torch.ones(1),))
            whole = block._call_end_callbacks_on_future(future)
        torch.cos(torch.ones(1))
        released.set()
        assert whole.wait().tolist() == [-1.0]
    assert named(done, "around").time_range.end > named(done, "aten::cos").time_range.end


def test_in_a_federation_only_the_caller_s_own_event_is_recorded() -> None:
    with InProcessCluster(2, options=rpc.RpcOptions(trust="federation")) as members, members[0].as_current():
        with members[1].as_current():
            rpc.expose(work, to=["worker0"])
        with KINETO() as done:
            assert rpc.rpc_sync("worker1", work, args=(torch.ones(1),)).tolist() == [2.0]
            assert rpc.rpc_async("worker1", work, args=(torch.ones(1),)).wait().tolist() == [2.0]
            assert rpc.remote("worker1", work, args=(torch.ones(1),)).to_here().tolist() == [2.0]
        for mode in ("sync", "async", "remote"):
            key = f"rpc_{mode}#work(worker0 -> worker1)"
            assert named(done, key).cpu_time_total > 0
            assert below(done, key) == []


def test_a_profile_that_was_started_before_there_was_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with LEGACY(record_shapes=True) as done:
        # Profiles from before `install`.
        monkeypatch.setattr(profilers, "_here", profilers._Thread())
        monkeypatch.setattr(profilers, "_latest", None)
        with InProcessCluster(2) as workers, workers[0].as_current():
            rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(3),))
    # `reading` also belongs to the other thread state, so that state reads the profile.
    assert named(done, f"rpc_sync#aten::neg(worker0 -> worker1){REMOTE}aten::neg").input_shapes == [[3]]
    gc.collect()


def test_reports_that_nobody_collects_do_not_pile_up(
    workers: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callee, "MOST_KEPT", 2)
    with workers[1].as_current():
        for number in range(4):
            callee.run_for_reference((False,) * 6, f"token {number}", torch.neg, (torch.ones(1),), {}).wait()
    reports = workers[1].reports
    assert [reports.take(f"token {number}") is not None for number in range(4)] == [False, False, True, True]


def test_a_failure_to_profile_does_not_fail_the_call(
    workers: InProcessCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Report:
        raise ValueError("torch has changed")

    monkeypatch.setattr(profilers.Listener, "report", broken)
    with caplog.at_level(logging.ERROR), LEGACY() as done:
        assert rpc.rpc_sync("worker1", work, args=(torch.ones(1),)).tolist() == [2.0]
    assert "torch has changed" in caplog.text
    assert below(done, "rpc_sync#work(worker0 -> worker1)") == []


# Alignment.


def span(began: int, elapsed: float, report: Report | None) -> Span:
    made = Span(7, "sync", "f", rpc.WorkerInfo("a", 0), rpc.WorkerInfo("b", 1))
    made.began, made.elapsed, made.report = began, elapsed, report
    return made


@pytest.mark.parametrize(
    ("began", "length", "offset"),
    [
        (1_000_000, 50.0, 0.0),  # nanoseconds, microseconds, microseconds
        (1_020_000, 50.0, 20.0),
        (1_050_000, 50.0, 50.0),
        (1_051_000, 50.0, 25.0),  # it would end after the call: another clock
        (999_000, 50.0, 25.0),  # it would begin before the call
        (77, 150.0, 0.0),
    ],
)
def test_the_execution_is_placed_inside_its_call(began: int, length: float, offset: float) -> None:
    assert span(1_000_000, 100.0, Report(began, length, {}, [])).offset() == offset


def test_a_user_s_label_is_left_alone(workers: InProcessCluster) -> None:
    with LEGACY() as done, profiler.record_function("mine [call 7]"):
        torch.ones(1)
    assert named(done, "mine [call 7]").node_id == -1
    events = list(done.function_events)
    graft(events, {})
    assert events == list(done.function_events)


# All requests of a worker.


def test_a_profile_of_all_that_a_worker_serves(workers: InProcessCluster) -> None:
    x, y = torch.tensor(1), torch.tensor(2)
    outer = rpc.remote("worker1", _server_process_global_profile)
    outer.rpc_sync().__enter__()
    rpc.rpc_sync("worker1", torch.add, args=(x, y))
    inner = rpc.remote("worker1", _server_process_global_profile)
    inner.rpc_sync().__enter__()
    with LEGACY() as mine:  # both at once, on one thread of the callee
        rpc.rpc_sync("worker1", torch.sub, args=(x, y))
    inner.rpc_sync().__exit__(None, None, None)
    outer.rpc_sync().__exit__(None, None, None)
    rpc.rpc_sync("worker1", torch.mul, args=(x, y))

    def names(rref: Any) -> list[list[str]]:
        found: list[list[str]] = rpc.rpc_sync("worker1", requests_of, args=(rref,))
        return [[name for name in each if name in ("aten::add", "aten::sub", "aten::mul")] for each in found]

    assert names(inner) == [["aten::sub"]]
    assert [each for each in names(outer) if each] == [["aten::add"], ["aten::sub"]]
    assert below(mine, "rpc_sync#aten::sub(worker0 -> worker1)") == ["aten::sub"]
    averages = outer.rpc_sync().key_averages()
    assert {"aten::add", "aten::sub"} <= {each.key for each in averages}
    assert not workers[1].agent.observers


def requests_of(rref: Any) -> list[list[str]]:
    return [[event.name for event in each] for each in rref.local_value().process_global_function_events]


def test_requests_that_still_run_at_the_end_leave_nothing_behind(workers: InProcessCluster) -> None:
    released.clear()
    profile: Any = _server_process_global_profile()
    with workers[1].as_current():
        profile.__enter__()
    future = rpc.rpc_async("worker1", wait_for_release, args=(torch.ones(1),))
    rpc.rpc_sync("worker1", torch.neg, args=(torch.ones(1),))
    profile.__exit__(None, None, None)
    assert [[event.name for event in each] for each in profile.process_global_function_events] == [["aten::neg"]]
    with pytest.raises(RuntimeError, match="not reentrant"):
        profile.__enter__()
    released.set()
    future.wait()
    assert not rpc.rpc_sync("worker1", profilers.is_on)


def test_a_global_profile_that_is_off(workers: InProcessCluster) -> None:
    profile: Any = _server_process_global_profile(enabled=False)
    assert profile.__enter__() is None
    assert profile.__exit__(None, None, None) is None
