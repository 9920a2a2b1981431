"""One script in torch's style under each launcher; `init_rpc()` finds its place by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from backhaul import rpc

SCRIPT = str(Path(__file__).parent / "scripts" / "ring.py")


@pytest.mark.parametrize(
    "launcher",
    [
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--standalone"],
        [sys.executable, "-m", "backhaul", "run", "-n", "3"],
    ],
    ids=["torchrun", "backhaul"],
)
def test_launcher(launcher: list[str]) -> None:
    done = subprocess.run(
        [*launcher, SCRIPT], capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the ring is [3.0, 3.0]" in done.stdout
    for rank in range(3):
        assert f"worker{rank} is done" in done.stdout


def test_spawn_with_ranks_given_over_tcp_and_env() -> None:
    torch.multiprocessing.spawn(run_both, (free_port(), free_port()), nprocs=2)


def run_both(rank: int, *ports: int) -> None:
    """Meet over ``tcp://``, leave, and meet again over ``env://``, in one process."""
    meet(rank, rpc.RpcOptions(init_method=f"tcp://127.0.0.1:{ports[0]}"))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[1]))
    meet(rank, None)
    meet(rank, None)


def meet(rank: int, options: Any) -> None:
    rpc.init_rpc(f"spawned{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    assert rpc.rpc_sync(f"spawned{1 - rank}", rpc.get_worker_info).name == f"spawned{1 - rank}"
    rpc.shutdown()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
