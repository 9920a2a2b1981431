"""Ends and beginnings: signals in a call, shutdown with a dead peer, names in use or used again, versions."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from typing import Any

import baseline
import load
import pytest
import training
from measuring import Measure
from network import Hosts, address_of, needs_hosts

import backhaul
from backhaul import rpc
from crew import Crew
from processes import assert_gone

pytestmark = pytest.mark.timeout(200)


def join(place: dict[str, Any]) -> str:
    try:
        rpc.init_rpc(**place)
    except rpc.BackhaulError as error:
        return f"{type(error).__name__}: {error}"
    return load.who()


# Signals.

SCRIPT = """
    import os, sys, threading
    from backhaul import rpc

    def work(seconds):
        print("working", os.getpid(), flush=True)
        threading.Event().wait(seconds)
        return "worked"

    rpc.init_rpc()
    if rpc.get_worker_info().id == 0:
        print("calling", os.getpid(), flush=True)
        try:
            print(rpc.rpc_sync("worker1", work, args=(60.0,)), flush=True)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            raise
    rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.fault("SIGTERM or SIGINT in a call, under `backhaul run`", "all processes are gone within 10 s")
def test_a_signal_in_a_call(measure: Measure, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(dedent(SCRIPT))
    command = [sys.executable, "-m", "backhaul", "run", "-n", "2", "script.py"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = [int(run.stdout.readline().split()[-1]) for _ in range(2)]
        begun = time.monotonic()
        run.send_signal(number)
        run.communicate(timeout=30)
        measure.seconds(f"{number.name}: gone after", time.monotonic() - begun, within=10.0)
        assert_gone(pids)


def interrupted_call(to: str) -> str:
    """A call that a signal ends. Afterwards this worker still works."""
    try:
        rpc.rpc_sync(to, load.block, args=("interrupted",), timeout=0)
    except KeyboardInterrupt:
        return "interrupted"
    return "came back"


def catch_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.slow
@pytest.mark.fault("SIGINT of a caller that waits", "KeyboardInterrupt at once; a graceful shutdown drains")
def test_ctrl_c_in_a_call(measure: Measure) -> None:
    with Crew(2) as crew:
        baseline.note_all(crew)
        crew[0].run(catch_interrupts)
        crew[1].run(open_gate_on_signal, "interrupted")
        running = crew[0].start(interrupted_call, "worker1")
        crew[1].run(load.await_entered, "interrupted")
        begun = time.monotonic()
        crew[0].signal(signal.SIGINT)
        assert running.result(10) == "interrupted"
        measure.seconds("interrupted after", time.monotonic() - begun, within=1.0)
        assert not crew[0].run(load.call, "worker1", load.who).error
        ending = [hand.start(load.shut_down, True, 20) for hand in crew]
        time.sleep(0.5)
        assert not any(each.done() for each in ending), "the call runs on, and is waited for"
        crew[1].signal(signal.SIGUSR2)
        assert [each.result(30) for each in ending] == ["done", "done"]


def open_gate_on_signal(name: str) -> None:
    signal.signal(signal.SIGUSR2, lambda *_: load.open_gate(name))


@pytest.mark.slow
@pytest.mark.fault("shutdown with a dead peer", "returns, and names it, within its timeout")
def test_shutdown_with_a_dead_peer(measure: Measure) -> None:
    with Crew(3) as crew:
        baseline.note_all(crew)
        crew[1].kill()
        begun = time.monotonic()
        ending = [crew[rank].start(load.shut_down, True, 10.0) for rank in (0, 2)]
        for each in ending:
            found = each.result(20)
            assert found.startswith("WorkerLostError"), found
            assert "worker1" in found
        measure.seconds("returned after", time.monotonic() - begun, within=10.0)


# Names.


@pytest.mark.fault(
    "a worker restarts under its old name, in a dynamic group", "stale references raise; calls work, in 1 s"
)
def test_a_restart_under_the_old_name(measure: Measure) -> None:
    with Crew(3, group=False) as crew:
        for rank in range(2):
            crew[rank].run(join, crew.place(rank, None))
        crew[0].run(load.hold, "worker1", 3)
        crew[1].kill()
        assert crew[2].run(join, crew.place(1, None)) == "worker1"
        begun = time.monotonic()
        crew[0].run(load.call_until_good, "worker1", 5.0)
        measure.seconds("calls work after", time.monotonic() - begun, within=1.0)
        begun = time.monotonic()
        found = crew[0].run(load.read_all)
        assert all("LostError" in str(each) and "worker1" in str(each) for each in found), found
        measure.seconds("stale references raise after", time.monotonic() - begun, within=1.0)
        crew[0].run(load.let_go)
        crew[0].run(load.hold, "worker1", 2)
        assert crew[0].run(load.read_all) == [0, 1]


@pytest.mark.slow
@pytest.mark.fault("a worker restarts under its old name, in a fixed group", "as in a dynamic one")
def test_a_restart_in_a_fixed_group(measure: Measure) -> None:
    with Crew(3, group=False) as crew:
        joining = [crew[rank].start(join, crew.place(rank, 2)) for rank in range(2)]
        assert [each.result(60) for each in joining] == ["worker0", "worker1"]
        crew[0].run(load.hold, "worker1", 3)
        crew[1].kill()
        begun = time.monotonic()
        assert crew[2].start(join, crew.place(1, 2)).result(20) == "worker1"
        crew[0].run(load.call_until_good, "worker1", 5.0)
        measure.seconds("calls work after", time.monotonic() - begun, within=2.0)
        found = crew[0].run(load.read_all)
        assert all("LostError" in str(each) for each in found), found


@pytest.mark.slow
@pytest.mark.fault("two workers claim one name", "the second is refused within 1 s, and the first goes on")
def test_two_workers_claim_one_name(measure: Measure) -> None:
    with Crew(3, group=False) as crew:
        for rank in range(2):
            crew[rank].run(join, crew.place(rank, None))
        begun = time.monotonic()
        found = crew[2].run(join, {**crew.place(7, None), "name": "worker1"})
        measure.seconds("refused after", time.monotonic() - begun, within=1.0)
        assert found.startswith("OptionError"), found
        assert "'worker1'" in found
        assert crew[0].run(load.call, "worker1", os.getpid).value == crew[1].process.pid


# Versions.


def pretend(package: str, torch_version: str) -> None:
    import torch

    backhaul.__version__ = package
    torch.__version__ = torch_version


def speak_version(number: int) -> None:
    """Make this process use another version of frames."""
    from backhaul.wire import decoder, frames

    frames.VERSION = decoder.VERSION = number


@pytest.mark.slow
@pytest.mark.fault("other versions of the package or of torch, same frames", "it works: the frame's version decides")
def test_other_versions_work(measure: Measure) -> None:
    with Crew(2, group=False) as crew:
        crew[1].run(pretend, "0.0.1", "2.6.0")
        joining = [hand.start(join, crew.place(rank, 2)) for rank, hand in enumerate(crew)]
        assert [each.result(60) for each in joining] == ["worker0", "worker1"]
        crew[0].run(training.make_trainer, ["worker1"])
        assert crew[0].run(training.train, 2, 30.0) == 0
        crew[0].run(training.check_parameters)
        measure.note("works")


@pytest.mark.slow
@pytest.mark.fault("another version of frames", "a refusal within 1 s that names both versions")
def test_another_version_of_frames_is_refused(measure: Measure) -> None:
    with Crew(2, group=False) as crew:
        crew[1].run(speak_version, 99)
        joining = [hand.start(join, crew.place(rank, 2)) for rank, hand in enumerate(crew)]
        assert [each.result(60) for each in joining] == ["worker0", "worker1"]
        begun = time.monotonic()
        found = crew[0].run(load.call_within, 10.0, "worker1", load.who)
        measure.seconds("refused after", time.monotonic() - begun, within=1.0)
        measure.note(found.error[:150])
        assert "99" in found.error, found
        assert "version 1" in found.error, found


# Rank 0.


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.slow
@pytest.mark.fault("rank 0, host of the TCP store, dies", "the group goes on; newcomers find it within 10 s")
def test_the_host_of_the_store_dies(measure: Measure) -> None:
    with Crew(4, group=False) as crew:
        options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{free_port()}")
        places = [{"name": f"worker{rank}", "rank": rank, "rpc_backend_options": options} for rank in range(len(crew))]
        for rank in range(3):
            assert crew[rank].run(join, places[rank]) == f"worker{rank}"
        crew[1].run(load.hold, "worker2", 3)
        crew[0].kill()
        assert crew[1].run(load.call, "worker2", load.who).value == "worker2"
        assert crew[2].run(load.call, "worker1", load.who).value == "worker1"
        assert crew[1].run(load.read_all) == [0, 1, 2]
        begun = time.monotonic()
        found = crew[3].start(join, places[3]).result(90)
        assert found == "worker3", found
        measure.seconds("a newcomer joined after", time.monotonic() - begun, within=10.0)
        assert crew[1].run(load.call, "worker3", load.who).value == "worker3"


def placed_at_two(hosts: Hosts, rank: int) -> dict[str, Any]:
    place = hosts.place(rank, None)
    place["rpc_backend_options"].init_method = f"tcp://{address_of(0)}:29500,{address_of(1)}:29500"
    return place


def lose_the_first(hosts: Hosts) -> None:
    """Workers 0 to 2 join; worker 0, which hosts the store, is killed; the others go on."""
    for rank in range(3):
        assert hosts[rank].run(join, placed_at_two(hosts, rank), timeout=60) == f"worker{rank}"
    hosts[2].run(load.call_until_good, "worker1", 20.0)
    hosts[0].kill()


def join_late(hosts: Hosts, within: float, measure: Measure) -> None:
    begun = time.monotonic()
    assert hosts[3].run(join, placed_at_two(hosts, 3), timeout=90) == "worker3"
    measure.seconds("a newcomer joined after", time.monotonic() - begun, within=within)
    for rank in (1, 2):
        assert hosts[rank].run(load.call, "worker3", load.who).value == "worker3"


@pytest.mark.slow
@needs_hosts
@pytest.mark.fault("rank 0, host of the TCP store, dies alone on its machine", "the store moves; newcomers find it")
def test_the_store_moves_to_another_machine(measure: Measure) -> None:
    with Hosts(4, join=False) as hosts:
        lose_the_first(hosts)
        hosts.replace(0)  # its machine refuses connections
        join_late(hosts, 10.0, measure)
        assert hosts[0].run(join, placed_at_two(hosts, 0), timeout=60) == "worker0"
        assert hosts[3].run(load.call, "worker0", load.who).value == "worker0"


@pytest.mark.slow
@needs_hosts
@pytest.mark.fault("the machine of the TCP store is gone", "the store moves; newcomers find it")
def test_the_machine_of_the_store_is_gone(measure: Measure) -> None:
    with Hosts(4, join=False) as hosts:
        lose_the_first(hosts)
        join_late(hosts, 30.0, measure)
