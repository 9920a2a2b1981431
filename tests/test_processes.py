"""Workers in real processes: tests of what can happen only to processes."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul import rpc
from backhaul.worker import current
from crew import Crew, Hand


def who() -> str:
    return rpc.get_worker_info().name


def pid() -> int:
    return os.getpid()


def call(to: str, function: Any, *args: Any) -> Any:
    return rpc.rpc_sync(to, function, args=args)


def block(seconds: float = 60) -> None:
    threading.Event().wait(seconds)


def block_via(to: str) -> None:
    rpc.rpc_sync(to, block)


def seconds_until_lost(to: str, function: Any, *args: Any) -> tuple[float, str, str]:
    """Call a worker that the test kills; returns when, how and for which worker this one noticed."""
    try:
        rpc.rpc_sync(to, function, args=args)
    except rpc.WorkerLostError as error:
        return time.time(), type(error).__name__, error.worker
    raise AssertionError("the call returned")


def futures_until_lost(to: str, count: int) -> tuple[float, int]:
    futures = [rpc.rpc_async(to, block) for _ in range(count)]
    lost = 0
    for future in futures:
        try:
            future.wait()
        except rpc.WorkerLostError:
            lost += 1
    return time.time(), lost


def shut_down(graceful: bool = True, timeout: float = 0) -> str:
    """How a shutdown ended."""
    try:
        rpc.shutdown(graceful=graceful, timeout=timeout)
    except rpc.BackhaulError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def wait_until_running(name: str) -> None:
    """Return when a call of `block` runs on this worker."""
    deadline = time.monotonic() + 20
    while not any(line.calls_started > line.calls_finished for line in current().agent.serving.lines):
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


# -- death ------------------------------------------------------------------------------------------


def test_all_callers_of_a_killed_worker_learn_of_it_within_a_second() -> None:
    with Crew(4) as crew:
        direct = crew[0].start(seconds_until_lost, "worker1", block)
        many = crew[2].start(futures_until_lost, "worker1", 50)
        nested = crew[3].start(seconds_until_lost, "worker2", block_via, "worker1")
        crew[1].run(wait_until_running, "block")
        threading.Event().wait(0.3)  # so that the nested one is on its way, too
        killed = time.time()
        crew[1].kill()
        for outcome in (direct, nested):
            at, kind, worker = outcome.result(10)
            assert at - killed < 1
            assert (kind, worker) == ("WorkerLostError", "worker1")
        at, lost = many.result(10)
        assert at - killed < 1
        assert lost == 50
        # The living continue, and a call to the dead one fails at once.
        assert crew[0].run(call, "worker2", who) == "worker2"
        with pytest.raises(rpc.WorkerLostError, match="worker1"):
            crew[0].run(call, "worker1", who)
        # A graceful shutdown of the rest ends, and names the missing worker.
        endings = [crew[rank].start(shut_down, True, 20) for rank in (0, 2, 3)]
        for ending in endings:
            assert "WorkerLostError" in ending.result(25)
            assert "worker1" in ending.result(0)


def test_a_stopped_worker_is_unresponsive_and_may_come_back() -> None:
    with Crew(2, unresponsive_after=1.5) as crew:
        assert crew[0].run(call, "worker1", who) == "worker1"
        start = time.time()
        crew[1].signal(signal.SIGSTOP)
        at, kind, worker = crew[0].run(seconds_until_lost, "worker1", block)
        assert 1.0 < at - start < 6
        assert (kind, worker) == ("WorkerUnresponsiveError", "worker1")
        at, lost = crew[0].start(futures_until_lost_unattended, "worker1").result(20)
        assert lost
        crew[1].signal(signal.SIGCONT)
        assert crew[0].run(call_when_back, "worker1", who) == "worker1"


def call_when_back(to: str, function: Any) -> Any:
    """The value of a call, once the worker answers again."""
    back = threading.Event()
    with rpc.on_joined(lambda _: back.set()):
        try:
            return call(to, function)
        except rpc.WorkerSuspectedError:
            assert back.wait(10)
            return call(to, function)


def futures_until_lost_unattended(to: str) -> tuple[float, bool]:
    """As above, for a future that only has a callback. The peer is stopped, so greeting it fails too."""
    heard = threading.Event()
    try:
        rpc.rpc_async(to, block, timeout=8).add_done_callback(lambda _: heard.set())
    except (rpc.WorkerLostError, rpc.RpcTimeoutError):
        return time.time(), True
    return time.time(), heard.wait(15)


def test_a_message_that_a_stopped_worker_does_not_take_is_given_up() -> None:
    with Crew(2, unresponsive_after=1.5) as crew:
        assert crew[0].run(call, "worker1", who) == "worker1"
        crew[1].signal(signal.SIGSTOP)
        start = time.time()
        at, _, worker = crew[0].run(seconds_until_lost, "worker1", torch.sum, torch.zeros(20_000_000))
        assert 1.0 < at - start < 10
        assert worker == "worker1"
        crew[1].signal(signal.SIGCONT)
        assert crew[0].run(call, "worker1", who) == "worker1"


def test_a_busy_worker_is_not_unresponsive() -> None:
    with Crew(2, unresponsive_after=0.8) as crew:
        crew[0].run(call, "worker1", block, 2.5)


def test_silent_loss_of_the_network_is_noticed_within_10_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to take a network interface down in a namespace of its own")
    monkeypatch.setenv("BACKHAUL_SECRET", "5a" * 32)
    with NamespacedCrew(2) as crew:
        assert crew[0].run(call, "worker1", who) == "worker1"
        waiting = crew[0].start(seconds_until_lost, "worker1", block)
        crew[1].run(wait_until_running, "block")
        lost_at = time.time()
        crew[1].run(set_loopback, False)
        at, _, worker = waiting.result(20)
        assert at - lost_at < 10
        assert worker == "worker1"


class NamespacedCrew(Crew):
    """Workers that use TCP in a network namespace of their own."""

    def __init__(self, size: int) -> None:
        namespace = Hand(enter_namespace, None)
        try:
            namespace.await_start()
            os.environ["TEST_NAMESPACE_OF"] = str(namespace.process.pid)
            super().__init__(size, setup=join_namespace, transport="tcp")
        finally:
            del os.environ["TEST_NAMESPACE_OF"]
            namespace.close()


_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1


def enter_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    set_loopback(True)


def join_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{os.environ['TEST_NAMESPACE_OF']}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def set_loopback(up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP if up else 0))


# -- fork -------------------------------------------------------------------------------------------


def fork_and_try() -> tuple[str, str]:
    """The result of a call in a forked child, and whether the parent is unharmed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            rpc.rpc_sync("worker1", who)
            text = "no error"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text, rpc.rpc_sync("worker1", who)


def fork_a_sleeper() -> int:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def test_a_forked_child_gets_a_clear_error_and_harms_no_worker() -> None:
    with Crew(2) as crew:
        crew[0].run(call, "worker1", who)
        text, answer = crew[0].run(fork_and_try)
        assert text.startswith("ForkedError")
        assert "init_rpc" in text
        assert answer == "worker1"
        # A child that outlives its killed parent must not keep the connections open.
        sleeper = crew[0].run(fork_a_sleeper)
        try:
            waiting = crew[1].start(seconds_until_lost, "worker0", block)
            crew[0].run(wait_until_running, "block")
            killed = time.time()
            crew[0].kill()
            at, _, worker = waiting.result(10)
            assert at - killed < 1
            assert worker == "worker0"
        finally:
            os.kill(sleeper, signal.SIGKILL)


# -- joining and leaving ------------------------------------------------------------------------------


@pytest.fixture
def idle_crew() -> Iterator[Crew]:
    """Processes that have not called init_rpc."""
    with Crew(3, group=False) as crew:
        yield crew


def join(place: dict[str, Any]) -> str:
    try:
        rpc.init_rpc(**place)
    except rpc.BackhaulError as error:
        return f"{type(error).__name__}: {error}"
    return who()


def names() -> list[str]:
    return [info.name for info in current().get_worker_infos()]


def add_on(to: str, x: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync(to, torch.add, args=(x, 1))


def test_a_dynamic_group_is_joined_and_left_at_any_time_rank_0_included(idle_crew: Crew) -> None:
    crew = idle_crew
    for rank in range(3):
        assert crew[rank].run(join, crew.place(rank, None)) == f"worker{rank}"
        assert crew[rank].run(names) == [f"worker{i}" for i in range(rank + 1)]
    # The first workers find those that came later.
    assert crew[0].run(add_on, "worker2", torch.ones(1)).item() == 2
    assert crew[2].run(add_on, "worker0", torch.ones(1)).item() == 2
    assert crew[0].run(shut_down) == "done"
    assert crew[1].run(add_on, "worker2", torch.ones(1)).item() == 2
    with pytest.raises(rpc.BackhaulError, match="worker0"):
        crew[2].run(call, "worker0", who)
    assert crew[1].run(names) == ["worker1", "worker2"]
    # A taken name is refused and harms no worker; a place that was left can be taken again.
    assert "OptionError" in crew[0].run(join, {**crew.place(5, None), "name": "worker2"})
    assert crew[0].run(join, crew.place(0, None)) == "worker0"
    assert crew[2].run(call, "worker0", who) == "worker0"
    # Without a rank, a worker gets the next free one.
    assert crew[1].run(shut_down) == "done"
    newcomer = {**crew.place(0, None), "name": "late", "rank": -1}
    assert crew[1].run(join, newcomer) == "late"
    assert crew[2].run(call, "late", who) == "late"
    for rank in (1, 2, 0):
        assert crew[rank].run(shut_down) == "done"


def test_a_dynamic_group_outlives_the_process_that_hosts_its_store(idle_crew: Crew) -> None:
    crew = idle_crew
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        options = rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{sock.getsockname()[1]}")
    for rank in range(3):
        place = {"name": f"worker{rank}", "rank": rank, "rpc_backend_options": options}
        assert crew[rank].run(join, place) == f"worker{rank}"
    crew[0].kill()
    # These two have never called each other.
    assert crew[1].run(call, "worker2", who) == "worker2"
    assert crew[2].run(call, "worker1", who) == "worker1"
    with pytest.raises(rpc.BackhaulError, match="nobody"):
        crew[1].run(call, "nobody", who)
    assert crew[1].run(shut_down) == "done"
    assert crew[2].run(shut_down) == "done"


def test_a_killed_member_of_a_dynamic_group_can_be_replaced(idle_crew: Crew) -> None:
    crew = idle_crew
    crew[0].run(join, crew.place(0, None))
    crew[1].run(join, crew.place(1, None))
    assert crew[0].run(call, "worker1", who) == "worker1"
    assert crew[1].run(call, "worker0", who) == "worker0"
    crew[1].kill()
    with pytest.raises(rpc.WorkerLostError, match="worker1"):
        crew[0].run(call, "worker1", who)
    assert "OptionError" in crew[2].run(join, crew.place(0, None))
    # Its name and rank are free, and workers that knew the old one find the new one.
    assert crew[2].run(join, crew.place(1, None)) == "worker1"
    assert crew[0].run(call, "worker1", pid) == crew[2].process.pid


def test_init_and_shutdown_again_in_the_same_processes(idle_crew: Crew) -> None:
    crew = idle_crew
    for _ in range(3):
        joined = [hand.start(join, crew.place(rank, 3)) for rank, hand in enumerate(crew)]
        assert [future.result(60) for future in joined] == ["worker0", "worker1", "worker2"]
        assert crew[0].run(call, "worker2", who) == "worker2"
        assert "already initialized" in crew[0].run(join, crew.place(0, 3))
        ended = [hand.start(shut_down) for hand in crew]
        assert [future.result(20) for future in ended] == ["done"] * 3
        assert "NotInitialized" in crew[1].run(shut_down)


def test_two_workers_of_one_name_are_refused(idle_crew: Crew) -> None:
    crew = idle_crew
    twins = [crew[rank].start(join, {**crew.place(rank, 2), "name": "twin"}) for rank in range(2)]
    for future in twins:
        assert "the name 'twin' is not unique" in future.result(60)


def test_an_ungraceful_shutdown_is_immediate_and_the_peer_notices() -> None:
    with Crew(2) as crew:
        waiting = crew[1].start(seconds_until_lost, "worker0", block)
        crew[0].run(wait_until_running, "block")
        start = time.monotonic()
        assert crew[0].run(shut_down, False) == "done"
        assert time.monotonic() - start < 3
        assert waiting.result(5)[2] == "worker0"


def test_graceful_shutdown_times_out_when_a_peer_never_asks() -> None:
    with Crew(2) as crew:
        start = time.monotonic()
        assert "RpcTimeoutError" in crew[0].run(shut_down, True, 1.0)
        assert time.monotonic() - start < 8


# -- transports -------------------------------------------------------------------------------------


def test_workers_meet_over_tcp_with_the_launcher_s_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SECRET", "ab" * 32)
    with Crew(2, transport="tcp") as crew:
        assert crew[0].run(add_on, "worker1", torch.ones(3_000_000)).sum().item() == 6_000_000
        assert crew[1].run(call, "worker0", pid) == crew[0].process.pid
        killed = time.time()
        waiting = crew[0].start(seconds_until_lost, "worker1", block)
        crew[1].run(wait_until_running, "block")
        killed = time.time()
        crew[1].kill()
        assert waiting.result(10)[0] - killed < 1
