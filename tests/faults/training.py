"""Training steps over several workers, compared with the same steps in one process. Runs in the workers' processes.

Each worker has a stage of the model, and the initiator has a twin of every stage. A step calls the stages one after the
other, runs a backward pass through all of them, and steps their optimizer. A step that failed before its optimizer step
has changed nothing. One that failed in the optimizer may have changed some stages, which are restored.
"""

from __future__ import annotations

import copy
import threading
import time
from typing import Any, NamedTuple

import torch
from load import Outcome, entered, gate, outcome_of
from torch import Tensor, nn

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer
from backhaul.worker import current

WIDTH = 6
_LR, _MOMENTUM = 0.05, 0.9
_ERRORS = (rpc.WorkerLostError, rpc.RpcTimeoutError, PartialError)


class Latched(torch.autograd.Function):
    """The identity. Its backward waits for the gate of its name, if a test has made one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.name in latches:
            entered(ctx.name).set()
            gate(ctx.name).wait(60)
        return gradient, None


latches: set[str] = set()
"""Names of backward functions that wait."""


def latch(name: str) -> None:
    latches.add(name)


class Stage(nn.Module):
    """A layer. ``name`` is the name of its latch."""

    def __init__(self, seed: int, name: str = "") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.name = name
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Latched.apply(torch.tanh(x @ self.weight) + x, self.name)  # type: ignore[no-untyped-call]
        return found


def data(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


class SlowSGD(torch.optim.SGD):
    """Waits for a gate of its worker's name before it steps, if a test has made one."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        name = f"step on {rpc.get_worker_info().name}"
        if name in latches:
            entered(name).set()
            gate(name).wait(60)
        super().step()


class Trainer:
    def __init__(self, workers: list[str], seed: int) -> None:
        self.workers = workers
        self.stages = [RemoteModule(to, Stage, args=(seed + number, to)) for number, to in enumerate(workers)]
        self.optimizer = DistributedOptimizer(
            SlowSGD, [each for stage in self.stages for each in stage.remote_parameters()], lr=_LR, momentum=_MOMENTUM
        )
        self.twins = [Stage(seed + number) for number in range(len(workers))]
        self.reference = torch.optim.SGD(
            [each for twin in self.twins for each in twin.parameters()], lr=_LR, momentum=_MOMENTUM
        )
        self.steps = 0
        self.failures = 0

    def forward_backward(self, context: int) -> None:
        x = data(self.steps)
        for stage in self.stages:
            x = stage(x)
        dist_autograd.backward(context, [(x**2).sum()])

    def follow(self) -> None:
        """The same step in this process."""
        x = data(self.steps)
        for twin in self.twins:
            x = twin(x)
        self.reference.zero_grad()
        (x**2).sum().backward()
        self.reference.step()
        self.steps += 1

    def step(self, deadline: float) -> None:
        """Make one step, repeated until it succeeds."""
        while True:
            saved = self._until_good(self.save, deadline)
            began = False
            try:
                with dist_autograd.context() as context:
                    self.forward_backward(context)
                    began = True
                    self.optimizer.step(context)
            except _ERRORS as error:
                self._failed(error, deadline)
                if began:
                    self._until_good(lambda saved=saved: self.restore(saved), deadline)  # type: ignore[misc]
                else:
                    self._until_good(self.compare, deadline)  # nothing has changed
            else:
                break
        self.follow()

    def save(self) -> Any:
        return [copy.deepcopy(stage.state_dict()) for stage in self.stages], self.optimizer.state_dict()

    def restore(self, saved: Any) -> None:
        states, optimizer = saved
        for stage, state in zip(self.stages, states, strict=True):
            stage.load_state_dict(state)
        self.optimizer.load_state_dict(optimizer)

    def _until_good(self, function: Any, deadline: float) -> Any:
        while True:
            try:
                return function()
            except _ERRORS as error:
                self._failed(error, deadline)

    def _failed(self, error: BaseException, deadline: float) -> None:
        """Called in an except block. Raises the error again unless it is temporary."""
        self.failures += 1
        if time.monotonic() > deadline or "is gone" in str(error):
            raise

    def compare(self) -> None:
        """Raise unless all parameters equal those of the local run."""
        for stage, twin in zip(self.stages, self.twins, strict=True):
            torch.testing.assert_close(stage.state_dict()["weight"], twin.weight.detach(), rtol=1e-9, atol=1e-12)


_trainers: list[Trainer] = []


def make_trainer(workers: list[str], seed: int = 0) -> None:
    _trainers.append(Trainer(workers, seed))


def trainer() -> Trainer:
    return _trainers[-1]


def forget_trainers() -> None:
    _trainers.clear()


def train(steps: int, seconds: float) -> int:
    """Make steps. Returns how many attempts failed."""
    deadline = time.monotonic() + seconds
    before = trainer().failures
    for _ in range(steps):
        trainer().step(deadline)
    return trainer().failures - before


class Progress(NamedTuple):
    steps: int
    failures: int
    error: str


class _Background:
    def __init__(self, seconds: float) -> None:
        self._over = threading.Event()
        self._deadline = time.monotonic() + seconds
        self.error = ""
        self._thread = threading.Thread(target=self._run, name="training")
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                trainer().step(self._deadline)
        except BaseException as error:
            self.error = f"{type(error).__name__}: {error}"

    def stop(self, seconds: float) -> Progress:
        self._over.set()
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"training stands still after {seconds} s"
        return Progress(trainer().steps, trainer().failures, self.error)


_background: list[_Background] = []


def start_training(seconds: float) -> None:
    """Train until `stop_training`. Steps must succeed by then."""
    _background.append(_Background(seconds))


def steps_made() -> int:
    return trainer().steps


def stop_training(seconds: float = 60.0) -> Progress:
    return _background.pop().stop(seconds)


def check_parameters() -> None:
    trainer().compare()


def one_pass() -> Outcome:
    """A backward pass through all stages, without a step."""

    def run() -> None:
        with dist_autograd.context() as context:
            trainer().forward_backward(context)

    return outcome_of(run)


def one_step() -> tuple[Outcome, list[str], list[str]]:
    """A step that is not repeated. Returns how it ended, which workers have stepped, and which have not."""
    done: list[str] = []
    errors: list[str] = []

    def run() -> None:
        with dist_autograd.context() as context:
            trainer().forward_backward(context)
            try:
                trainer().optimizer.step(context)
            except PartialError as error:
                done.extend(error.done)
                errors.extend(error.errors)
                raise

    return outcome_of(run), done, errors


def open_contexts(count: int) -> None:
    """Open contexts with graphs through all stages, and leave them open."""

    def run() -> None:
        context = dist_autograd.context()
        id = context.__enter__()
        x = data(0)
        for stage in trainer().stages:
            x = stage(x)
        _open.append((context, id, x))

    for _ in range(count):
        thread = threading.Thread(target=run)  # a thread is in one context at a time
        thread.start()
        thread.join()


_open: list[Any] = []


def backward_of_open() -> None:
    """A pass over the graph of each open context."""
    for _, id, x in _open:
        dist_autograd.backward(id, [(x**2).sum()])


def close_open() -> None:
    for _, id, _ in _open:
        current().autograd.leave(id)
    _open.clear()


def count_contexts() -> int:
    return current().autograd.counts()["contexts"]


def await_contexts(count: int, seconds: float) -> float:
    """Return when this worker knows ``count`` contexts."""
    start = time.monotonic()
    while (found := current().autograd.counts()["contexts"]) != count:
        assert time.monotonic() - start < seconds, f"after {seconds} s: {found} contexts, not {count}"
        threading.Event().wait(0.01)
    return time.monotonic() - start
