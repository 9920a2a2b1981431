"""Soak: five worker processes train and call for a long time while workers are killed and connections are reset.

    python tests/faults/soak.py [SECONDS]          # 1200 by default

Every 15 s a worker is killed and another process takes its name; in between, all TCP connections are reset. Two drivers
make calls and training steps. Each step is repeated until it is right, and every 100th is compared with a run in one
process. At the end the script prints what was done, how much memory grew after the first quarter, and what was left
over. The exit status is 1 if something is wrong. It needs root, for network namespaces and a TUN device.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import limits
import torch
from network import Hosts, join, missing
from torch import Tensor

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.optim import DistributedOptimizer
from backhaul.rpc import RRef
from backhaul.worker import current

SIZE = 5
KILL_EVERY = 15.0
RESET_EVERY = 4.0
COMPARE_EVERY = 100
WANTED = {"calls": 200_000, "passes": 5_000}
WANTED_SECONDS = 1200.0
MOST_GROWTH = 0.03
_WIDTH = 16
_RATE = 0.01
_BATCH = 50
_LOST = (rpc.WorkerLostError, rpc.RpcTimeoutError, PartialError)


# What runs in the workers.


class Stage:
    """A layer, with plain SGD. If its worker is lost, it is restored from the driver's copy."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) + x

    def value(self) -> Tensor:
        return self.weight.detach()

    def put(self, weight: Tensor) -> None:
        with torch.no_grad():
            self.weight.copy_(weight)


def parameter_of(stage: RRef[Stage]) -> torch.nn.Parameter:
    return stage.local_value().weight


def add_one(x: int) -> int:
    return x + 1


class Report(NamedTuple):
    calls: int
    failed_calls: int
    passes: int
    steps: int
    failed_steps: int
    compared: int
    rebuilt: int
    error: str


class Driver:
    """Makes calls and steps until it is told to stop. Weights live on the workers, with copies here."""

    def __init__(self, others: list[str], seed: int) -> None:
        self._others = others
        generator = torch.Generator().manual_seed(seed)
        self._weights = {
            name: torch.randn(_WIDTH, _WIDTH, generator=generator, dtype=torch.float64) / _WIDTH for name in others
        }
        self._stages: dict[str, RRef[Stage]] = {}
        self._optimizer: DistributedOptimizer | None = None
        self._counts = dict.fromkeys(Report._fields[:-1], 0)
        self._error = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="driver")
        self._thread.start()

    def stop(self) -> Report:
        self._over.set()
        self._thread.join(120)
        if self._thread.is_alive():
            self._error = self._error or "the driver stands still"
        self._stages.clear()
        self._optimizer = None
        gc.collect()
        return Report(**self._counts, error=self._error)

    def _run(self) -> None:
        try:
            for step in itertools.count():
                if self._over.is_set():
                    return
                self._call()
                self._step(step)
        except BaseException as error:
            self._error = f"{type(error).__name__}: {error}"

    def _call(self) -> None:
        """A batch of small calls, half of them one after the other."""
        for number in range(_BATCH // 2):
            self._count_call(lambda number=number: rpc.rpc_sync(self._target(number), add_one, args=(number,)), number)  # type: ignore[misc]
        futures: list[tuple[int, Any]] = []
        for number in range(_BATCH // 2):
            try:
                futures.append((number, rpc.rpc_async(self._target(number), add_one, args=(number,))))
            except _LOST:
                self._counts["calls"] += 1
                self._counts["failed_calls"] += 1
        for number, future in futures:
            self._count_call(future.wait, number)

    def _target(self, number: int) -> str:
        return self._others[number % len(self._others)]

    def _count_call(self, function: Any, number: int) -> None:
        self._counts["calls"] += 1
        try:
            found = function()
        except _LOST:
            self._counts["failed_calls"] += 1
        else:
            assert found == number + 1, f"a wrong value: {found}, not {number + 1}"

    def _step(self, step: int) -> None:
        """Make one step, repeated until it succeeds; then the same step in this process."""
        x = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        while not self._over.is_set():
            try:
                self._prepare()
                self._attempt(x)
            except _LOST:
                self._counts["failed_steps"] += 1
                self._optimizer = None  # stages that have stepped are restored
                time.sleep(0.02)
            else:
                break
        else:
            return
        self._follow(x)
        self._counts["steps"] += 1
        if self._counts["steps"] % COMPARE_EVERY == 0:
            self._compare()

    def _prepare(self) -> None:
        """After a failure, make a stage with the right weight on every worker."""
        if self._optimizer is not None:
            return
        for name in self._others:
            try:
                self._stages[name].rpc_sync().put(self._weights[name])
            except (KeyError, rpc.WorkerLostError):
                self._stages.pop(name, None)
                self._stages[name] = rpc.remote(name, Stage, args=(self._weights[name],))
                self._stages[name].rpc_sync().put(self._weights[name])
                self._counts["rebuilt"] += 1
        parameters = [rpc.remote(name, parameter_of, args=(stage,)) for name, stage in self._stages.items()]
        self._optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=_RATE)

    def _attempt(self, x: Tensor) -> None:
        assert self._optimizer is not None
        with dist_autograd.context() as context:
            for stage in self._stages.values():
                x = stage.rpc_sync().forward(x)
            dist_autograd.backward(context, [(x**2).mean()])
            self._counts["passes"] += 1
            self._optimizer.step(context)

    def _follow(self, x: Tensor) -> None:
        weights = {name: self._weights[name].clone().requires_grad_() for name in self._stages}
        for weight in weights.values():
            x = torch.tanh(x @ weight) + x
        gradients = torch.autograd.grad((x**2).mean(), list(weights.values()))
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            self._weights[name] = (weight - _RATE * gradient).detach()

    def _compare(self) -> None:
        for name, stage in list(self._stages.items()):
            try:
                found = stage.rpc_sync().value()
            except _LOST:
                continue
            torch.testing.assert_close(found, self._weights[name], rtol=1e-9, atol=1e-12)
            self._counts["compared"] += 1


_drivers: list[Driver] = []


def start_driver(others: list[str], seed: int) -> None:
    _drivers.append(Driver(others, seed))


def stop_driver() -> Report:
    return _drivers.pop().stop()


def left_over() -> dict[str, int]:
    """References, contexts and passes of this worker."""
    gc.collect()
    worker = current()
    counts = {**worker.references.counts(), **worker.autograd.counts()}
    return {key: value for key, value in counts.items() if value}


def await_nothing(seconds: float) -> dict[str, int]:
    deadline = time.monotonic() + seconds
    while (found := left_over()) and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    return found


# The soak itself.


class Soak:
    """Workers 0 and 1 drive and are never killed. The others are killed in turn."""

    def __init__(self, seconds: float, kill_every: float = KILL_EVERY) -> None:
        self._seconds = seconds
        self._kill_every = kill_every
        self._chance = random.Random(0)
        self._problems: list[str] = []
        self.kills = self.resets = 0
        self._memory: list[tuple[float, float]] = []  # when, and the mean bytes of the drivers

    def run(self) -> list[str]:
        with Hosts(SIZE, dynamic=True) as hosts:
            names = [f"worker{rank}" for rank in range(SIZE)]
            for rank in (0, 1):
                hosts[rank].run(start_driver, names[2:], rank, timeout=90)
            self._disturb(hosts)
            reports = [hosts[rank].run(stop_driver, timeout=180) for rank in (0, 1)]
            for name, report in zip(names, reports, strict=False):
                print(f"{name}: {report}")
                if report.error:
                    self._problems.append(f"{name}: {report.error}")
            self._judge(reports)
            for rank, hand in enumerate(hosts):
                left = hand.run(await_nothing, 20.0)
                if left:
                    self._problems.append(f"left over on {names[rank]}: {left}")
        return self._problems

    def _disturb(self, hosts: Hosts) -> None:
        start = time.monotonic()
        victims = itertools.cycle(range(2, SIZE))
        next_kill, next_reset, next_look = start + self._kill_every, start + RESET_EVERY, start
        end = start + self._seconds
        while (now := time.monotonic()) < end:
            if now >= next_look:
                next_look = now + max(2.0, self._seconds / 100)
                self._memory.append((now - start, sum(hosts[rank].run(limits.resident) for rank in (0, 1)) / 2))
            if now >= next_kill:
                next_kill += self._kill_every
                self._replace(hosts, next(victims))
            if now >= next_reset:
                next_reset += RESET_EVERY * (0.5 + self._chance.random())
                hosts.switch.reset()
                self.resets += 1
            time.sleep(max(0.0, min(next_kill, next_reset, next_look, end) - time.monotonic()))

    def _replace(self, hosts: Hosts, rank: int) -> None:
        hosts[rank].kill()
        self.kills += 1
        hand = hosts.replace(rank)
        joining: Future[Any] = hand.start(join, hosts.place(rank, None))
        joining.result(60)

    def _judge(self, reports: list[Report]) -> None:
        share = min(1.0, self._seconds / WANTED_SECONDS)
        for key, wanted in WANTED.items():
            found = sum(getattr(report, key) for report in reports)
            print(f"{key}: {found}; wanted in {self._seconds:.0f} s: {share * wanted:.0f}")
            if found < share * wanted:
                self._problems.append(f"only {found} {key} in {self._seconds:.0f} s")
        growth = self.growth()
        print(f"{self.kills} kills, {self.resets} resets; memory grew by {100 * growth:.1f} % after the first quarter")
        if growth > MOST_GROWTH:
            self._problems.append(f"memory grew by {100 * growth:.1f} % after the first quarter")

    def growth(self) -> float:
        """The growth of the drivers' memory: the last tenth against the tenth after the first quarter."""
        end = self._memory[-1][0]
        before = [size for at, size in self._memory if 0.25 * end <= at <= 0.35 * end]
        after = [size for at, size in self._memory if at >= 0.9 * end]
        if not before:
            self._problems.append(f"too few looks at memory to judge it: {len(self._memory)}")
            return 0.0
        return sum(after) / len(after) / (sum(before) / len(before)) - 1


def main(arguments: list[str]) -> int:
    if missing():
        print(f"the soak cannot run here: {missing()}")
        return 2
    problems = Soak(float(arguments[0]) if arguments else WANTED_SECONDS).run()
    for problem in problems:
        print(f"WRONG: {problem}")
    print("all is well" if not problems else f"{len(problems)} problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
