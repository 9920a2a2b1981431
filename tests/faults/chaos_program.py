"""Chaos: a simulation of training on a group whose workers die, come back, and lose sight of each other.

A seed is a program. A program makes some training steps. Each worker but the first has a stage of the model. The first
worker holds the references. Any worker may drive a step, with references that it gets for it: calls through the stages,
a backward pass, an optimizer step. Meanwhile connections are cut, with or without loss of messages, pairs of workers
are parted and healed, messages are delayed, workers die and are replaced.

It runs in a simulated `World`: the seed decides which thread runs next, how time passes, which message arrives next,
and what goes wrong. So a program makes the same steps every time, and `digest` shows it.

What must hold:

- A step is right, or it fails with an error that names a worker. Nothing hangs.
- A step that failed before its optimizer step has changed nothing. One that failed later has stepped each stage or not.
- No call runs twice.
- A reference is valid as long as its owner lives.
- After the last healing everything works, and after the references are dropped, nothing is left on any worker.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from chaos_network import Group, Messages
from torch import Tensor
from turns import World, installed

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import PartialError
from backhaul.optim import DistributedOptimizer
from backhaul.options import RpcOptions
from backhaul.rpc import RRef

WIDTH = 3
RATE = 0.1
PATIENCE = 10.0
_LOST = (rpc.WorkerLostError, PartialError)


class ChaosError(AssertionError):
    """Something that must not happen has happened."""


# What runs on the workers.


class Stage:
    """A layer on a worker. ``ran`` counts calls by their identity."""

    def __init__(self, key: int, weight: Tensor) -> None:
        self.key = key
        self.weight = torch.nn.Parameter(weight)
        self.ran: Counter[str] = Counter()
        stages[key] = self

    def parameter(self) -> torch.nn.Parameter:
        return self.weight

    def forward(self, id: str, x: Tensor) -> Tensor:
        self.ran[id] += 1
        return torch.tanh(x @ self.weight) + x


stages: dict[int, Stage] = {}
"""All stages that were ever made, by key. The test reads their memory without messages."""

asked: set[str] = set()
"""Attempts that have reached the optimizer."""

active: set[str] = set()
"""Attempts that some worker is running. The caller of a lost driver gets the error before the driver stops."""

_stopped: threading.Condition
"""Notified when an attempt is over. Each program has its own."""

Part = tuple["RRef[Stage]", "RRef[torch.nn.Parameter]"]


def parameter_of(stage: RRef[Stage]) -> torch.nn.Parameter:
    return stage.local_value().weight


def data(step: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def drive(id: str, step: int, parts: list[Part]) -> str:
    """One attempt at a training step, driven by the worker on which this runs."""
    active.add(id)
    try:
        with dist_autograd.context() as context:
            x = data(step)
            for stage, _ in parts:
                x = stage.rpc_sync().forward(id, x)
            dist_autograd.backward(context, [(x**2).sum()])
            optimizer = DistributedOptimizer(torch.optim.SGD, [parameter for _, parameter in parts], lr=RATE)
            asked.add(id)
            optimizer.step(context)
    finally:
        with _stopped:
            active.discard(id)
            _stopped.notify_all()
    return id


# The program.


class Program:
    def __init__(self, seed: int, log: Callable[[str], None] = lambda text: None) -> None:
        self._seed = seed
        self._chance = Random(seed)
        self.planned: list[tuple[int, str, int, int]] = []
        """The faults of this program: in which step, what, and to which workers."""
        self._log = log
        self.tally: Counter[str] = Counter()
        global _stopped
        stages.clear()
        asked.clear()
        active.clear()
        _stopped = threading.Condition()
        options = RpcOptions(
            rpc_timeout=PATIENCE, unresponsive_after=None, probe_timeout=0.5, connect_timeout=2.0, busy_poll=0.0
        )
        self._size = self._chance.choice([3, 3, 4])
        self._group = Group(self._size, seed, options)
        self._keys = 0
        self._clock = 0
        self._planning = threading.Lock()
        self._plan: list[
            tuple[int, Callable[[], None]]
        ] = []  # the times on the clock, and what to do; guarded by _planning
        self._parts: dict[int, tuple[int, Part]] = {}  # by rank: the key of the stage, and references to it
        self._twins: dict[int, Tensor] = {}  # by rank: the weight in one process
        self._to_replace: set[int] = set()
        self._deaths: set[int] = set()  # keys of stages that died
        self._errors: list[BaseException] = []

    @property
    def messages(self) -> Messages:
        return self._group.messages

    def run(self) -> None:
        try:
            first = self._group.workers[0]
            with first.as_current():
                for rank in range(1, self._size):
                    self._make(rank)
                self._group.messages.before_delivery.append(self._delivery)
                for step in range(self._chance.choice([2, 3])):
                    self._plan_faults(step)
                    self._step(step)
                with self._planning:
                    self._plan.clear()
                self._end()
        finally:
            self._parts.clear()
            self._group.close()

    # Faults.

    def _plan_faults(self, step: int) -> None:
        """Plan the faults of a step, by the number of deliveries from now on. Earlier events have no influence."""
        chance = Random(f"{self._seed}/{step}")
        for _ in range(chance.choice([0, 1, 1, 2, 3])):
            act = chance.choice([self._cut, self._cut, self._part, self._delay, self._kill])
            a, b = chance.sample(range(self._size), 2)
            self.planned.append((step, act.__name__.strip("_"), a, b))
            due = self._clock + chance.randrange(1, 40), act(a, b, chance.random())
            with self._planning:
                self._plan.append(due)

    def _cut(self, a: int, b: int, draw: float) -> Callable[[], None]:
        def act() -> None:
            self._note("cuts", f"cut {a} - {b}")
            self._group.cut(a, b, lose=draw < 0.5)

        return act

    def _part(self, a: int, b: int, draw: float) -> Callable[[], None]:
        def act() -> None:
            self._note("parts", f"part {a} - {b}")
            self._group.part(a, b)
            with self._planning:
                self._plan.append((self._clock + int(draw * 12), heal))

        def heal() -> None:
            self._note("heals", f"heal {a} - {b}")
            self._group.heal(a, b)

        return act

    def _delay(self, a: int, b: int, draw: float) -> Callable[[], None]:
        def act() -> None:
            self._note("delays", f"delay {a} - {b}")
            self._group.delay(a, b, 1 + int(draw * 10))

        return act

    def _kill(self, a: int, b: int, _: float) -> Callable[[], None]:
        rank = a or b  # the first worker holds the references, so it never dies

        def act() -> None:
            if rank in self._group.workers and len(self._group.workers) > 2:
                self._note("deaths", f"kill {rank}")
                if rank in self._parts:
                    self._deaths.add(self._parts[rank][0])
                self._group.kill(rank)
                self._to_replace.add(rank)

        return act

    def _delivery(self) -> None:
        """Called before a message arrives."""
        self._clock += 1
        self._act()

    def _act(self) -> None:
        with self._planning:
            due = [act for at, act in self._plan if at <= self._clock]
            self._plan = [each for each in self._plan if each[0] > self._clock]
        for act in due:
            try:
                act()
            except BaseException as error:  # raised later, where the program waits for its step
                self._errors.append(error)

    def _note(self, what: str, text: str) -> None:
        self.tally[what] += 1
        self._log(f"{self._clock:5} {text}")

    # Steps.

    def _make(self, rank: int, weight: Tensor | None = None) -> None:
        """Make a stage on that worker, new or with the weight of the dead one."""
        if weight is None:
            generator = torch.Generator().manual_seed(rank)
            weight = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH
        self._twins[rank] = weight.clone()
        self._keys += 1
        key = self._keys
        stage = rpc.remote(f"worker{rank}", Stage, args=(key, weight))
        parameter = rpc.remote(f"worker{rank}", parameter_of, args=(stage,))
        parameter.to_here()
        self._parts[rank] = key, (stage, parameter)
        if rank not in self._group.workers:  # it died when its last reply was under way
            self._deaths.add(key)

    def _step(self, step: int) -> None:
        """Repeat a step until it is right."""
        deadline = time.monotonic() + 2 * PATIENCE
        for attempt in itertools.count():
            self._replace_dead()
            parts = {rank: self._parts[rank] for rank in sorted(self._parts) if rank in self._group.workers}
            after = self._expected(step, list(parts))
            driver = Random(f"{self._seed}/{step}/{attempt}").choice([0, 0, *parts])
            id = f"{step}/{attempt}"
            self._log(f"{self._clock:5} step {id} by {driver} over {list(parts)}")
            begun = time.monotonic()
            try:
                self._attempt(driver, id, step, [part for _, part in parts.values()])
            except _LOST as error:
                self._failed(id, error, parts, after)
            except rpc.RpcTimeoutError as error:
                raise ChaosError(f"step {id} took {time.monotonic() - begun:.1f} s: {error}") from error
            else:
                self._check(parts, after, f"step {id} was good")
                self._twins.update(after)
                self.tally["steps"] += 1
                return
            if self._errors:
                raise self._errors[0]
            if time.monotonic() > deadline:
                raise ChaosError(f"step {step} has failed for {2 * PATIENCE} s, {attempt + 1} times")
            self._pass_time()

    def _attempt(self, driver: int, id: str, step: int, parts: list[Part]) -> None:
        if driver == 0:
            drive(id, step, parts)
        else:
            rpc.rpc_sync(f"worker{driver}", drive, args=(id, step, parts))

    def _failed(self, id: str, error: BaseException, parts: dict[int, Any], after: dict[int, Tensor]) -> None:
        self._note("failures", f"step {id} failed: {type(error).__name__}: {error}")
        if "is gone" in str(error) and not self._deaths:
            raise ChaosError(f"step {id}: a reference was lost, and nobody had died: {error}") from error
        self._settle(id)
        for rank, (key, _) in parts.items():
            if rank not in self._group.workers or key in self._deaths:
                continue
            weight = stages[key].weight.detach()
            if not same(weight, self._twins[rank]):
                if id not in asked:
                    raise ChaosError(f"step {id} failed before its optimizer was asked, and stage {rank} has changed")
                if not same(weight, after[rank]):
                    raise ChaosError(f"step {id} left stage {rank} between two values")
                with torch.no_grad():
                    stages[key].weight.copy_(self._twins[rank])

    def _settle(self, id: str) -> None:
        """Wait until no part of a failed step runs or is on its way."""
        with _stopped:
            over = _stopped.wait_for(lambda: id not in active, PATIENCE)
        over = over and self._group.messages.await_idle(PATIENCE)
        if not over:
            raise ChaosError(
                f"step {id} has failed, and parts of it still run after {PATIENCE} s: {sorted(active)}, "
                f"{self._group.messages.describe()}"
            )

    def _check(self, parts: dict[int, Any], after: dict[int, Tensor], what: str) -> None:
        for rank, (key, _) in parts.items():
            if key not in self._deaths and not same(stages[key].weight.detach(), after[rank]):
                raise ChaosError(f"{what}, and the weight of stage {rank} is wrong")
        twice = {id: count for stage in stages.values() for id, count in stage.ran.items() if count > 1}
        if twice:
            raise ChaosError(f"calls ran more than once: {twice}")

    def _expected(self, step: int, ranks: list[int]) -> dict[int, Tensor]:
        """The weights after a step over these stages, in one process."""
        weights = [self._twins[rank].clone().requires_grad_() for rank in ranks]
        x = data(step)
        for weight in weights:
            x = torch.tanh(x @ weight) + x
        gradients = torch.autograd.grad((x**2).sum(), weights)
        return {
            rank: (weight - RATE * gradient).detach()
            for rank, weight, gradient in zip(ranks, weights, gradients, strict=True)
        }

    def _replace_dead(self) -> None:
        for rank in sorted(self._to_replace):
            if self._chance.random() < 0.6:
                self._to_replace.discard(rank)
                self._parts.pop(rank, None)
                self._note("rejoins", f"replace {rank}")
                self._group.join(rank)
                self._insist(rank, lambda rank=rank: self._make(rank, self._twins[rank]))  # type: ignore[misc]

    def _insist(self, rank: int, function: Callable[[], Any]) -> None:
        """Repeat a call that may fail because of faults, unless that worker dies."""
        deadline = time.monotonic() + PATIENCE
        while rank in self._group.workers:
            try:
                function()
                return
            except rpc.WorkerLostError as error:
                self._log(f"{self._clock:5} again: {error}")
                if time.monotonic() > deadline:
                    raise ChaosError(
                        f"a worker that was replaced cannot be used after {PATIENCE} s: {error}"
                    ) from error
            self._pass_time()

    def _pass_time(self) -> None:
        """Let time pass. If all are parted nothing may be delivered, and suspected workers are checked again soon."""
        self._clock += 5
        self._act()
        time.sleep(0.002)

    # The end.

    def _end(self) -> None:
        """Heal everything, check that all works, drop everything, and check that nothing is left."""
        self._group.heal()
        for rank in self._parts:
            self._check_healed(rank, time.monotonic() + PATIENCE)
        if self._errors:
            raise self._errors[0]
        self._parts.clear()
        for left in stages.values():
            left.weight = None  # type: ignore[assignment]
        self._await_nothing()

    def _check_healed(self, rank: int, deadline: float) -> None:
        key, (stage, _) = self._parts[rank]
        while key not in self._deaths:
            try:
                found = stage.rpc_sync().parameter()
            except rpc.WorkerLostError as error:
                if time.monotonic() > deadline or "is gone" in str(error):
                    raise ChaosError(f"after healing, stage {rank} cannot be used: {error}") from error
                first = self._group.workers[0]
                first.agent.fates.await_verdict(first.agent.membership.find(rank).info, deadline, "the end")
            else:
                if not same(found.detach(), self._twins[rank]):
                    raise ChaosError(f"after healing, stage {rank} has another weight")
                return

    def _await_nothing(self) -> None:
        deadline = time.monotonic() + PATIENCE
        for look in itertools.count():
            left = {rank: found for rank, worker in self._group.workers.items() if (found := _left_on(worker))}
            if not left:
                return
            if time.monotonic() > deadline:
                raise ChaosError(f"left over at the end: {left}")
            if look % 20 == 0:
                gc.collect()
            threading.Event().wait(0.002)


def _left_on(worker: Any) -> dict[str, int]:
    counts = {**worker.references.counts(), **worker.autograd.counts()}
    return {key: value for key, value in counts.items() if value}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def warm_up() -> None:
    """Use an optimizer once. Torch imports much then, and a simulated thread must not block another's import."""
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=RATE).step()


@contextmanager
def simulation() -> Iterator[None]:
    """A block in which programs can be run."""
    warm_up()
    with installed("backhaul", "chaos_program", "chaos_network"):
        yield


class Outcome:
    """The outcome of a program."""

    def __init__(self, seed: int, log: Callable[[str], None] = lambda text: None) -> None:
        """Run the program, inside `simulation`. Raises `ChaosError`, which names the seed."""
        texts: list[str] = []

        def note(text: str) -> None:
            texts.append(text)
            log(text)

        with World(seed) as world:
            program = Program(seed, note)
            try:
                program.run()
            except Exception as error:
                raise ChaosError(f"seed {seed}: {type(error).__name__}: {error}") from error
        self.tally = program.tally
        self.tally["programs"] = 1
        steps = world.trace, program.messages.log, texts
        self.digest = hashlib.sha256(repr(steps).encode()).hexdigest()[:16]
        """A digest of each turn of each thread with its time, of the order of messages, and of all notes."""


def run(seeds: Iterable[int]) -> Counter[str]:
    """Run the programs of these seeds, inside `simulation`. Returns what happened. A `ChaosError` names the seed."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        tally += Outcome(seed).tally
    return tally
