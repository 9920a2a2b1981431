"""``backhaul bench --cuda``: echoes and chains of tensors on one GPU between two processes, beside torch RPC.

Each system has its own client and server, and both have a CUDA context on the GPU. The systems take turns, one piece of
work after the other, in every round. The processes of the system that waits for its turn are stopped (SIGSTOP), because
torch's workers poll all the time, also while they have nothing to do. A client's measurement ends with a
synchronisation of the device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

_MIB = 1 << 20
_END_SECONDS = 20.0


class Work(NamedTuple):
    """A piece of work: its name for people, what the client does, its argument, and the repetitions in a round."""

    name: str
    kind: str
    size: int
    times: int
    floor: float | None = None
    """How many times faster than torch RPC it must be."""


WORKS = (
    Work("no-op", "no_op", 0, 60),
    Work("echo of 1 KiB on the CPU", "echo_cpu", 1 << 10, 40),
    Work("echo of 64 MiB on the CPU", "echo_cpu", 64 * _MIB, 5),
    Work("echo of 1 KiB", "echo", 1 << 10, 30),
    Work("echo of 1 MiB", "echo", _MIB, 30, 1.3),
    Work("echo of 16 MiB", "echo", 16 * _MIB, 20, 2.0),
    Work("echo of 64 MiB", "echo", 64 * _MIB, 15, 2.5),
    Work("echo of 256 MiB", "echo", 256 * _MIB, 8, 10.0),
    *(Work(f"chain of {hops}, Linear(64)", "chain_64", hops, 80 // hops + 4, 1.5) for hops in (1, 4, 16)),
    *(Work(f"chain of {hops}, Linear(4096)", "chain_4096", hops, 80 // hops + 4, 1.5) for hops in (1, 4, 16)),
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="backhaul bench --cuda", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this machine has no GPU that torch can use", file=sys.stderr)
        return 1
    clients = {system: _Client(system) for system in ("torch", "backhaul")}
    found: dict[tuple[str, str], list[float]] = {}
    try:
        for client in clients.values():
            client.await_ready()
            client.stop()
        for _ in range(given.rounds):
            for work in WORKS:
                for system, client in clients.items():
                    found.setdefault((work.name, system), []).append(client.measure(work))
    finally:
        for client in clients.values():
            client.end()
    return _show(found)


def _show(found: dict[tuple[str, str], list[float]]) -> int:
    title = f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}: milliseconds"
    table = Table("work", "torch RPC", "Backhaul", "ratio", "asked", title=title)
    missed = 0
    for work in WORKS:
        theirs, ours = found[work.name, "torch"], found[work.name, "backhaul"]
        ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
        short = work.floor is not None and ratio < work.floor
        missed += short
        table.add_row(
            work.name,
            f"{statistics.median(theirs) * 1e3:.3f}",
            f"{statistics.median(ours) * 1e3:.3f}",
            f"{ratio:.2f}x",
            "" if work.floor is None else f"{work.floor:g}x" + (" missed" if short else ""),
        )
    Console(width=120).print(table)
    print(f"{missed} of {sum(work.floor is not None for work in WORKS)} ratios are below what was asked")
    return 0


class _Client:
    """The two processes of one system."""

    def __init__(self, system: str) -> None:
        self._system = system
        path = os.path.join(tempfile.mkdtemp(), "meeting-point")
        command = [sys.executable, "-m", "backhaul.bench.cuda", system, path]
        self._server = subprocess.Popen([*command, "1"])
        self._process = subprocess.Popen([*command, "0"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def await_ready(self) -> None:
        self._answer()

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def measure(self, work: Work) -> float:
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([work.kind, work.size, work.times]) + "\n")
        self._process.stdin.flush()
        seconds = float(self._answer())
        self.stop()
        return seconds

    def _signal(self, number: int) -> None:
        for process in (self._server, self._process):
            process.send_signal(number)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client of {self._system} has died")
        return json.loads(line)

    def end(self) -> None:
        """Let both processes shut down, and kill those that do not."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(OSError):  # the client has died
            self._process.stdin.close()
        for process in (self._process, self._server):
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


# -- run by the processes -----------------------------------------------------------------------

small: list[torch.nn.Linear] = []
large: list[torch.nn.Linear] = []


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def nothing() -> None:
    pass


def layer_64(number: int, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = small[number](x)
    return y


def layer_4096(number: int, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = large[number % len(large)](x)
    return y


def work(system: str, path: str, rank: int) -> None:
    """A process of one system."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    small.extend(torch.nn.Linear(64, 64).cuda() for _ in range(16))
    large.extend(torch.nn.Linear(4096, 4096).cuda() for _ in range(2))
    rpc, autograd = _join(system, path, rank)
    if rank:
        rpc.shutdown()
        return
    do = _works(rpc, autograd)
    for each in WORKS:
        do[each.kind](each.size)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        kind, size, times = json.loads(line)
        for _ in range(times // 5 + 1):  # its processes have been stopped until now
            do[kind](size)
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            do[kind](size)
            taken.append(time.perf_counter() - start)
        print(json.dumps(statistics.median(taken)), flush=True)
    rpc.shutdown()


def _join(system: str, path: str, rank: int) -> tuple[Any, Any]:
    package = "torch.distributed" if system == "torch" else "backhaul"
    rpc: Any = importlib.import_module(f"{package}.rpc")
    autograd: Any = importlib.import_module(f"{package}.autograd")
    make = rpc.TensorPipeRpcBackendOptions if system == "torch" else rpc.RpcOptions
    options = make(init_method=f"file://{path}", device_maps={f"w{1 - rank}": {0: 0}})
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    return rpc, autograd


def _works(rpc: Any, autograd: Any) -> dict[str, Callable[[int], None]]:
    tensors: dict[tuple[int, str], torch.Tensor] = {}

    def echo(size: int, device: str = "cuda") -> None:
        if (size, device) not in tensors:
            tensors[size, device] = torch.randn(size // 4, device=device)
        rpc.rpc_sync("w1", same, args=(tensors[size, device],))
        torch.cuda.synchronize()

    def chain(hops: int, layer: Callable[..., torch.Tensor], x: torch.Tensor) -> None:
        with autograd.context() as context:
            y = x
            for number in range(hops):
                y = rpc.rpc_sync("w1", layer, args=(number, y))
            autograd.backward(context, [y.sum()])
            torch.cuda.synchronize()

    narrow = torch.randn(16, 64, device="cuda", requires_grad=True)
    wide = torch.randn(64, 4096, device="cuda", requires_grad=True)
    return {
        "no_op": lambda _: rpc.rpc_sync("w1", nothing),
        "echo": echo,
        "echo_cpu": lambda size: echo(size, "cpu"),
        "chain_64": lambda hops: chain(hops, layer_64, narrow),
        "chain_4096": lambda hops: chain(hops, layer_4096, wide),
    }


if __name__ == "__main__":
    # Imported under its own name, so that the other process finds its functions.
    from backhaul.bench import cuda

    cuda.work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
