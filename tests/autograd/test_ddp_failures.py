"""Passes with modules under DDP that fail: an error, a trainer that does not come, a trainer that dies."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed as dist
from acts import ACTS, Latch, act, break_on_purpose
from torch import Tensor
from torch.nn.functional import mse_loss
from trainers import (
    MASTER,
    SERVER,
    TRAINERS,
    Program,
    apply,
    assert_found,
    await_clean,
    bare,
    call,
    expected,
    grads_here,
    hybrid,
    ids,
    inputs,
    join_group,
    part,
    rank,
    run_pass,
    set_up,
    start,
    target,
    together,
)

import backhaul.autograd as dist_autograd
from crew import Crew

ALL = range(4)
IMPATIENT = 2.0
PATIENT = 60.0

_latches: dict[str, Latch] = {}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Crew]:
    with Crew(4) as made:
        yield made


@pytest.fixture
def crew(lasting: Crew, tmp_path: Path) -> Crew:
    """Trainers in a new process group with a timeout of 2 s."""
    regroup(lasting, tmp_path, IMPATIENT)
    return lasting


def regroup(crew: Crew, path: Path, timeout: float) -> None:
    together(crew, ALL, set_up, {})
    together(crew, TRAINERS, leave_group)
    together(crew, TRAINERS, join_group, f"file://{path / f'store{next(_numbers)}'}", timeout)


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def fragile(step: int) -> Tensor:
    """A model whose backward functions may fail before the module under DDP, and after it."""
    rows = call(SERVER, fragile_rows, rank(), step)
    return act(f"loss of {rank()}", mse_loss(part("dense")(rows), target(rank(), step)))


def fragile_rows(who: int, step: int) -> Tensor:
    return act(f"rows of {who}", part("table")(ids(who, step)))


def fragile_u(step: int) -> Tensor:
    """The backward of the module under DDP runs after the server's."""
    first = part("front")(inputs(rank(), step))
    second = call(SERVER, fragile_middle, rank(), first)
    return mse_loss((first * second)[:, :3], target(rank(), step))


def fragile_middle(who: int, x: Tensor) -> Tensor:
    return act(f"rows of {who}", part("middle")(x))


def of_both(step: int) -> Tensor:
    losses = [start(each, fragile, step) for each in TRAINERS]
    return torch.stack([loss.wait() for loss in losses]).sum()


FILLED = ("dense", "front", "table")


def fill() -> None:
    """Fill ``.grad``."""
    for name in FILLED:
        for number, parameter in enumerate(bare(name).parameters()):
            parameter.grad = torch.full_like(parameter, 3.0 + number)


def check_filled() -> None:
    """Check that ``.grad`` is unchanged."""
    for name in FILLED:
        for number, parameter in enumerate(bare(name).parameters()):
            assert parameter.grad is not None
            assert parameter.grad.eq(3.0 + number).all(), name
    assert len(grads_here()) == sum(len(list(bare(name).parameters())) for name in FILLED)


def break_at(name: str) -> None:
    ACTS[name] = break_on_purpose


def hold(name: str) -> None:
    _latches[name] = Latch(name, PATIENT)


def await_held(name: str) -> None:
    _latches[name].await_entered()


def let_go(name: str) -> None:
    _latches[name].released.set()


def mend() -> None:
    ACTS.clear()


class Ending(NamedTuple):
    """How a pass ended."""

    kind: str
    text: str
    seconds: float


def failing_pass(program: Program, step: int) -> Ending:
    """A pass that fails. Its gradients are ignored."""
    begun = time.monotonic()
    with dist_autograd.context() as context_id:
        loss = program(step)
        try:
            dist_autograd.backward(context_id, [loss])
        except Exception as error:
            return Ending(type(error).__name__, str(error), time.monotonic() - begun)
        return Ending("", "", time.monotonic() - begun)


def nothing_is_left(crew: Crew) -> None:
    together(crew, ALL, mend)
    together(crew, ALL, await_clean)
    together(crew, ALL, check_filled)


def good_steps(crew: Crew) -> None:
    for step in range(2):
        assert_found(together(crew, TRAINERS, run_pass, hybrid, step), expected(hybrid, step))
    together(crew, ALL, await_clean)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=lambda o: "+".join(o) or "plain")
def test_a_pass_fails_after_its_ddp_module_was_averaged(crew: Crew, options: dict[str, bool]) -> None:
    """One trainer's pass fails on the server, after its module was averaged. The other trainer's pass succeeds."""
    together(crew, ALL, set_up, {"dense": options})
    together(crew, ALL, fill)
    crew[SERVER].run(break_at, "rows of 0")
    ends = together(crew, TRAINERS, failing_pass, fragile, 0)
    assert ends[0][:2] == ("Broken", "on purpose")
    assert ends[1].kind == ""
    nothing_is_left(crew)
    good_steps(crew)


@pytest.mark.parametrize(("broken", "program", "name"), [(0, fragile, "loss of 0"), (SERVER, fragile_u, "rows of 0")])
def test_an_error_before_the_module(crew: Crew, tmp_path: Path, broken: int, program: Program, name: str) -> None:
    """The trainer that fails gets the error at once; the other one gets an error when its process group times out."""
    together(crew, ALL, set_up, {"front" if program is fragile_u else "dense": {}})
    together(crew, ALL, fill)
    crew[broken].run(break_at, name)
    running = {each: crew[each].start(failing_pass, program, 0) for each in TRAINERS}
    assert running[0].result(30)[:2] == ("Broken", "on purpose")
    crew[0].run(await_clean)
    end = running[1].result(30)
    assert end.kind == "RuntimeError"
    assert IMPATIENT / 2 < end.seconds < 10 * IMPATIENT
    nothing_is_left(crew)
    regroup(crew, tmp_path, IMPATIENT)
    together(crew, ALL, set_up, {"dense": {}})
    good_steps(crew)


def test_an_error_in_a_context_that_spans_both_trainers(crew: Crew, tmp_path: Path) -> None:
    """The worker that started the pass gets the error at once, while a trainer still waits in its process group."""
    together(crew, ALL, set_up, {"dense": {}})
    together(crew, ALL, fill)
    crew[0].run(break_at, "loss of 0")
    end = crew[MASTER].run(failing_pass, of_both, 0)
    assert end[:2] == ("Broken", "on purpose")
    nothing_is_left(crew)
    regroup(crew, tmp_path, IMPATIENT)
    together(crew, ALL, set_up, {"dense": {}})
    good_steps(crew)


def test_a_trainer_that_does_not_come(crew: Crew, tmp_path: Path) -> None:
    """The other trainer's pass fails when its process group times out."""
    together(crew, ALL, set_up, {"dense": {}})
    together(crew, ALL, fill)
    end = crew[1].run(failing_pass, fragile, 0)
    assert end.kind == "RuntimeError"
    assert IMPATIENT / 2 < end.seconds < 10 * IMPATIENT
    nothing_is_left(crew)
    regroup(crew, tmp_path, IMPATIENT)
    together(crew, ALL, set_up, {"dense": {}})
    good_steps(crew)


def kill_while_the_other_waits(crew: Crew, program: Program, initiator: int) -> Ending:
    """Trainer 1 dies before it averages. Trainer 0 has sent its gradients, and waits for trainer 1."""
    together(crew, range(len(crew)), set_up, {"dense": {}})
    together(crew, range(len(crew)), fill)
    crew[1].run(hold, "loss of 1")
    crew[SERVER].run(hold, "rows of 0")
    if initiator == 0:
        crew[1].start(failing_pass, program, 0)
    running = crew[initiator].start(failing_pass, program, 0)
    crew[SERVER].run(await_held, "rows of 0")
    crew[SERVER].run(let_go, "rows of 0")
    crew[1].kill()
    end: Ending = running.result(PATIENT / 2)
    return end


@pytest.mark.slow
def test_a_trainer_that_dies(tmp_path: Path) -> None:
    """The other trainer gets an error long before its process group would time out."""
    with Crew(3) as crew:
        together(crew, TRAINERS, join_group, f"file://{tmp_path / 'store'}", PATIENT)
        end = kill_while_the_other_waits(crew, fragile, 0)
        assert end.kind == "RuntimeError"
        for each in (0, SERVER):
            crew[each].run(await_clean)
            crew[each].run(check_filled)
        assert crew[0].run(failing_pass, without_ddp, 0).kind == ""


def without_ddp(step: int) -> Tensor:
    return mse_loss(bare("dense")(call(SERVER, apply, "table", ids(rank(), step))), target(rank(), step))


def test_a_trainer_dies_in_a_context_that_spans_both_trainers(tmp_path: Path) -> None:
    """The error at the worker that started the pass names the lost worker."""
    with Crew(4) as crew:
        together(crew, TRAINERS, join_group, f"file://{tmp_path / 'store'}", PATIENT)
        end = kill_while_the_other_waits(crew, of_both, MASTER)
        assert end.kind == "WorkerLostError"
        assert "worker1" in end.text
        for each in (0, SERVER, MASTER):
            crew[each].run(await_clean)
            crew[each].run(check_filled)
