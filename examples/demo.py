"""Three worker processes on this machine, and what can be done with them. Run by ``make demo``.

On a terminal it shows a table that changes as calls are made; elsewhere, plain lines. The exit code is 0
if every answer was what one process alone would have computed.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from torch import nn

import backhaul
from backhaul import rpc
from backhaul.cluster import Cluster, LocalWorker

NAMES = ["worker1", "worker2", "worker3"]

# What the workers run: ordinary functions of this script, and what they keep.
models: dict[str, nn.Module] = {}


def relay(path: list[str], x: torch.Tensor) -> list[str]:
    """Who was here, along ``path``: each worker asks the next one."""
    rest = rpc.rpc_sync(path[0], relay, args=(path[1:], x + 1)) if path else [f"x = {x.item():g}"]
    return [rpc.get_worker_info().name, *rest]


def square(x: int) -> int:
    return x * x


def divide(a: float, b: float) -> float:
    return a / b


def build(name: str, seed: int) -> int:
    """Make a model that stays on this worker; returns the number of its parameters."""
    torch.manual_seed(seed)
    models[name] = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    return sum(parameter.numel() for parameter in models[name].parameters())


def infer(name: str, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        answer: torch.Tensor = models[name](x)
        return answer


def nothing() -> None:
    pass


class Board:
    """What each worker did last. Live on a terminal, a line for each call elsewhere."""

    def __init__(self) -> None:
        self.console = Console()
        self.rows: dict[str, list[Any]] = {name: [None, 0, "starting …", None] for name in NAMES}
        self.failures = 0
        self.checks = 0
        self._live: Live | None = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        if not self.console.is_terminal:
            print(f"starting {', '.join(NAMES)} …", flush=True)
            yield
            return
        with Live(self.table(), console=self.console, refresh_per_second=20) as self._live:
            yield

    def table(self) -> Table:
        table = Table("worker", "pid", "calls", "last call", "µs", title="Backhaul: three processes, one program")
        for column in (1, 2, 4):
            table.columns[column].justify = "right"
        table.columns[3].min_width = 44
        for name, (pid, calls, last, micros) in self.rows.items():
            table.add_row(name, str(pid or ""), str(calls), last, "" if micros is None else f"{micros:.0f}")
        return table

    def up(self, workers: Cluster) -> None:
        for worker in workers:
            self.rows[worker.name] = [worker.pid, 0, "ready", None]
            self._update(f"{worker.name} is ready, pid {worker.pid}")

    def call(self, worker: str, what: str, seconds: float, calls: int = 1) -> None:
        row = self.rows[worker]
        row[1:] = [row[1] + calls, what, 1e6 * seconds]
        self._update(f"{worker}: {what}  ({1e6 * seconds:.0f} µs)")

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style))

    def check(self, what: str, passed: bool) -> None:
        self.checks += 1
        self.failures += not passed
        self.say(f"{'✓' if passed else '✗'} {what}", "green" if passed else "bold red")
        if self._live is not None:
            time.sleep(0.25)  # a human is watching

    def _update(self, line: str) -> None:
        if self._live is not None:
            self._live.update(self.table())
        else:
            print(line, flush=True)


def timed(board: Board, worker: LocalWorker, what: str, func: Callable[..., Any], *args: Any) -> Any:
    start = time.perf_counter()
    try:
        return worker.rpc_sync(func, args=args)
    finally:
        board.call(worker.name, what, time.perf_counter() - start)


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    board = Board()
    start = time.perf_counter()
    with board.shown(), backhaul.cluster(3) as workers:
        board.up(workers)
        one, two, _ = workers

        sums = [
            timed(board, worker, f"torch.add(1, {i})", torch.add, torch.tensor(1), i)
            for i, worker in enumerate(workers)
        ]
        board.check("a torch operator on each worker", [int(value) for value in sums] == [1, 2, 3])

        torch.manual_seed(0)
        a, b = torch.randn(300, 300), torch.randn(300, 300)
        products = [timed(board, worker, "matmul of 300 x 300", torch.matmul, a, b) for worker in workers]
        board.check("matmul equals the local one", all(torch.allclose(product, a @ b) for product in products))

        path = timed(board, one, "relay to worker2, which relays to worker3", relay, NAMES[1:], torch.zeros(()))
        board.check(f"a call within a call within a call: {' → '.join(path)}", path == [*NAMES, "x = 2"])

        begin = time.perf_counter()
        futures = [(worker, i, worker.rpc_async(square, args=(i,))) for i in range(30) for worker in workers]
        total = 0
        for worker, i, future in futures:
            total += future.wait()
            if i == 29:
                board.call(worker.name, "30 times square(…) at once", time.perf_counter() - begin, 30)
        board.check("90 calls at once, waited for together", total == 3 * sum(i * i for i in range(30)))

        try:
            timed(board, two, "divide(1, 0)", divide, 1.0, 0.0)
        except ZeroDivisionError as error:
            board.say(f"{type(error).__name__}: {error}{error.__cause__}".rstrip(), "dim")
            board.check("an exception there is raised here, with its traceback", "in divide" in str(error.__cause__))
        else:
            board.check("an exception there is raised here, with its traceback", False)

        count = timed(board, two, "build a model that stays there", build, "mlp", 7)
        x = torch.randn(5, 32)
        there = timed(board, two, f"infer with its {count} parameters", infer, "mlp", x)
        build("mlp", 7)
        board.check("a model on a worker answers as it would here", torch.allclose(there, infer("mlp", x), atol=1e-6))

        times = []
        for _ in range(200):
            begin = time.perf_counter()
            one.rpc_sync(nothing)
            times.append(time.perf_counter() - begin)
        board.call("worker1", "200 times nothing() (median)", statistics.median(times), 200)
    board.check("all workers have ended", not any(worker.alive for worker in workers))
    passed = board.checks - board.failures
    board.say(f"{passed} of {board.checks} checks passed in {time.perf_counter() - start:.1f} s")
    return 1 if board.failures else 0


if __name__ == "__main__":
    sys.exit(main())
