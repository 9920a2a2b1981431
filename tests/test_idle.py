"""Idle workers use no CPU."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from backhaul import rpc

WORKERS = 3
SECONDS = 10.0
LIMIT = 0.1
_PATIENCE = 60.0


def add(a: torch.Tensor, b: int) -> torch.Tensor:
    return a + b


def relay(to: str) -> int:
    """A nested call, so that a second thread has served this worker."""
    return rpc.rpc_sync(to, os.getpid)


def live(rank: int, directory: str, line: Connection) -> None:
    """A worker that calls every other worker, reports it, and is idle until told to end."""
    torch.set_num_threads(1)
    options = rpc.RpcOptions(init_method=f"file://{directory}/meeting-point")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORKERS, rpc_backend_options=options)
    others = [f"worker{other}" for other in range(WORKERS) if other != rank]
    for other in others:
        assert rpc.rpc_sync(other, add, args=(torch.ones(4), 1)).sum() == 8
        assert rpc.rpc_async(other, add, args=(torch.ones(4), 2)).wait().sum() == 12
        assert rpc.rpc_sync(other, relay, args=(f"worker{rank}",)) == os.getpid()
    line.send("idle")
    line.recv()
    rpc.shutdown()


def cpu_seconds(pid: int) -> float:
    """The CPU time that the process has used so far, in user and kernel mode."""
    # The name, in brackets, may contain anything; utime and stime are fields 14 and 15.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_three_idle_workers_use_no_cpu(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    try:
        for rank in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=live, args=(rank, str(tmp_path), there), daemon=True)
            process.start()
            there.close()
            lines.append(here)
            processes.append(process)
        for line in lines:
            if not line.poll(_PATIENCE):
                pytest.fail("a worker did not get through its calls")
            assert line.recv() == "idle"

        pids = [process.pid for process in processes if process.pid is not None]
        before = [cpu_seconds(pid) for pid in pids]
        threading.Event().wait(SECONDS)  # the test is about this stretch of time
        used = [after - start for after, start in zip(map(cpu_seconds, pids), before, strict=True)]
        for line in lines:
            line.send("end")
        for process in processes:
            process.join(_PATIENCE)

        assert len(pids) == WORKERS
        assert sum(used) < LIMIT, f"CPU-seconds in {SECONDS:g} s, by worker: {used}"
        assert [process.exitcode for process in processes] == [0] * WORKERS
    finally:
        for process in processes:
            process.kill()
            process.join()
        for line in lines:
            line.close()
