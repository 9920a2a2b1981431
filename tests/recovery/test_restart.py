"""Workers of launchers are restarted, and errors say how they ended. Real processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import backhaul
from backhaul import rpc
from backhaul.errors import MisuseError, UnknownWorkerError, WorkerLostError

SLOW = 60.0


def hold(event: str) -> None:
    threading.Event().wait()


def ask(to: str) -> int:
    return rpc.rpc_sync(to, os.getpid)


def loss_of(to: str) -> str:
    """The error of a call to a worker that is about to end."""
    try:
        rpc.rpc_sync(to, hold, args=("",), timeout=SLOW)
    except WorkerLostError as error:
        return str(error)
    return "no error"


def test_a_worker_of_a_cluster_is_killed_and_restarted() -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    joined: queue.SimpleQueue[str] = queue.SimpleQueue()
    with backhaul.cluster(2) as workers:
        rpc.on_lost(lambda info, cause: lost.put(str(cause)))
        rpc.on_joined(lambda info: joined.put(info.name))
        first, second = workers
        old = second.pid
        stale = rpc.remote("worker2", torch.ones, args=(2,))
        stale.to_here()

        # The cause is known wherever something waits, and also where nothing does.
        there = first.rpc_async(loss_of, args=("worker2",))
        here = second.rpc_async(hold, args=("",))
        future = second.rpc_async(hold, args=("",))
        assert ask("worker2") == old  # the worker still has all of these
        os.kill(old, signal.SIGKILL)
        killed = "worker 'worker2' is lost: it was killed by SIGKILL (signal 9)"
        with pytest.raises(WorkerLostError) as refusal:
            here.wait()
        assert str(refusal.value) == killed
        assert there.wait() == killed
        assert lost.get(timeout=SLOW) == killed
        with pytest.raises(WorkerLostError) as refusal:
            future.wait()
        assert str(refusal.value) == killed
        with pytest.raises(WorkerLostError, match="it was killed by SIGKILL"):
            second.rpc_sync(os.getpid)
        assert not second.alive

        # Another process takes its place.
        waiting = second.rpc_async(os.getpid, retry=1)
        assert workers.restart("worker2") is second
        assert second.alive
        assert second.pid != old
        assert waiting.wait() == second.pid == ask("worker2") == first.rpc_sync(ask, args=("worker2",))
        assert second.rpc_sync(ask, args=("worker1",)) == first.pid
        assert joined.get(timeout=SLOW) == "worker2"
        with pytest.raises(WorkerLostError, match=rf"process {old}\), which had it, is over, .*process {second.pid}\)"):
            stale.to_here()

        # A worker that ends by itself: the error has its exit code.
        ends = second.rpc_async(os._exit, args=(3,))
        with pytest.raises(WorkerLostError, match="worker 'worker2' is lost: it exited with code 3"):
            ends.wait()
        with pytest.raises(
            UnknownWorkerError, match="no worker 'worker3' to restart; this cluster has 'worker1', 'wor"
        ):
            workers.restart("worker3")
    with pytest.raises(MisuseError, match="this cluster is closed"):
        workers.restart("worker2")


@pytest.mark.slow
def test_a_living_worker_is_restarted_and_knows_what_was_typed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        dedent(
            """\
            import backhaul

            if __name__ == "__main__":
                with backhaul.cluster(1) as workers:
                    exec(compile("def late():\\n    return factor * 2", "<stdin>", "exec"))
                    factor = 21
                    (worker,) = workers
                    before = worker.pid
                    assert worker.rpc_sync(late) == 42
                    workers.restart("worker1")
                    assert worker.pid != before
                    assert worker.rpc_sync(late) == 42
                print("done")
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=2 * SLOW)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


TRAINING = """\
import os
import sys
import time

from backhaul import rpc

rpc.init_rpc()
me, restarts = rpc.get_worker_info().name, int(os.environ.get("BACKHAUL_RESTARTS", 0))
print(me, "joined", restarts, flush=True)


def end(how):
    os._exit(how)


def answer():
    return int(os.environ.get("BACKHAUL_RESTARTS", 0))


if me == "worker0":
    try:
        rpc.rpc_sync("worker1", end, args=(5,))
    except rpc.WorkerLostError as error:
        print("LOST", error, flush=True)
    print("ANSWER", rpc.rpc_sync("worker1", answer, retry=1), flush=True)
    if not restarts:
        os._exit(6)
rpc.shutdown()
print(me, "ended", flush=True)
"""


def run(tmp_path: Path, *options: str, source: str = TRAINING) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(source)
    command = [sys.executable, "-m", "backhaul", "run", "-n", "3", *options, "--no-color", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * SLOW)


@pytest.mark.slow
def test_run_restarts_workers_that_fail_including_worker0(tmp_path: Path) -> None:
    """worker1 ends twice; worker0, for which all others wait in shutdown, ends once."""
    done = run(tmp_path, "--max-restarts", "3")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("[worker0] LOST worker 'worker1' is lost: it exited with code 5") == 2
    assert [line for line in lines if "ANSWER" in line] == ["[worker0] ANSWER 1", "[worker0] ANSWER 2"]
    assert lines.count("[worker2] worker2 joined 0") == 1
    assert sum("ended" in line for line in lines) == 3
    told = [line for line in done.stderr.splitlines() if line.startswith("backhaul:")]
    assert told == [
        "backhaul: worker1 exited with code 5; it is restarted, and 2 restarts are left",
        "backhaul: worker0 exited with code 6; it is restarted, and 1 restarts are left",
        "backhaul: worker1 exited with code 5; it is restarted, and 0 restarts are left",
    ]


def test_run_gives_up_when_no_restarts_are_left(tmp_path: Path) -> None:
    source = """
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.exit(6 + int(os.environ.get("BACKHAUL_RESTARTS", 0)))
        time.sleep(60)
        """
    done = run(tmp_path, "--max-restarts", "2", source=dedent(source))
    assert done.returncode == 8
    assert done.stderr.splitlines() == [
        "backhaul: worker0 exited with code 6; it is restarted, and 1 restarts are left",
        "backhaul: worker0 exited with code 7; it is restarted, and 0 restarts are left",
        "backhaul: worker0 exited with code 8; the other workers were stopped",
    ]


def test_run_restarts_no_worker_that_it_stops_itself(tmp_path: Path) -> None:
    source = """
        import os, signal
        os.kill(os.getppid(), signal.SIGTERM)
        signal.pause()
        """
    done = run(tmp_path, "--max-restarts", "9", source=dedent(source))
    assert done.returncode == 143
    assert "restarted" not in done.stderr


def test_a_negative_number_of_restarts_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--max-restarts", "-1")
    assert done.returncode == 2
    assert "--max-restarts must be at least 0, not -1" in done.stderr
