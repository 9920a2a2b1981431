"""Graphs with modules under DDP in any place, on any worker: gradients of one process, averaged over the trainers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import trainers
from acts import Latch, act
from models import Accumulate
from torch import Tensor
from torch.nn.functional import mse_loss
from trainers import (
    MASTER,
    SERVER,
    TRAINERS,
    Found,
    Gradients,
    Options,
    apply,
    assert_found,
    assert_same,
    bare,
    call,
    check,
    expected,
    hybrid,
    ids,
    inputs,
    join_group,
    keep,
    part,
    rank,
    run_pass,
    set_up,
    start,
    target,
    together,
)

from backhaul import rpc
from crew import Crew

UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}
ALL = range(4)

each_option = pytest.mark.parametrize(
    "options",
    [{}, UNUSED, pytest.param(STATIC, marks=pytest.mark.slow), pytest.param(VIEW, marks=pytest.mark.slow)],
    ids=lambda o: "+".join(o) or "plain",
)
each_way = pytest.mark.parametrize("accumulate", ["context", "grad"])


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two trainers, a server, and a master."""
    with Crew(4) as made:
        together(made, TRAINERS, join_group, f"file://{tmp_path_factory.mktemp('group') / 'store'}")
        yield made


def before_and_after(step: int) -> Tensor:
    """One module under DDP, then the server, then another one under DDP."""
    hidden = call(SERVER, apply, "middle", part("front")(inputs(rank(), step)))
    return mse_loss(part("dense")(hidden), target(rank(), step))


@each_way
@each_option
def test_ddp_modules_before_and_after_a_call(crew: Crew, options: Options, accumulate: Accumulate) -> None:
    check(crew, before_and_after, {"front": options, "dense": options}, steps=3, accumulate=accumulate)


def with_a_call_inside(step: int) -> Tensor:
    return mse_loss(part("outer")(inputs(rank(), step)), target(rank(), step))


@each_way
@pytest.mark.parametrize("options", [{}, STATIC, VIEW], ids=lambda o: "+".join(o) or "plain")
def test_a_call_inside_the_module(crew: Crew, options: Options, accumulate: Accumulate) -> None:
    """Without ``find_unused_parameters``, because DDP's search for them ends at the call."""
    check(crew, with_a_call_inside, {"outer": options}, steps=3, accumulate=accumulate)


def with_a_checkpoint_inside(step: int) -> Tensor:
    return mse_loss(part("saving")(call(SERVER, apply, "table", ids(rank(), step))), target(rank(), step))


@each_option
def test_a_checkpoint_inside_of_the_module(crew: Crew, options: Options) -> None:
    check(crew, with_a_checkpoint_inside, {"saving": options}, steps=3)


def called_twice(step: int) -> Tensor:
    """The results go to two workers, and meet on one of them."""
    module = part("front")
    kept = keep(MASTER, apply, "middle", module(inputs(rank(), step)))
    return mse_loss(call(SERVER, join, kept, module(inputs(rank(), step + 50))), target(rank(), step))


def join(kept: Any, x: Tensor) -> Tensor:
    y: Tensor = part("middle")(x) * kept.to_here()
    return y[:, :3]


@each_way
@each_option
def test_a_ddp_module_is_called_once_for_each_of_two_workers(
    crew: Crew, options: Options, accumulate: Accumulate
) -> None:
    """Two messages, whose parts of the graph share only the module's parameters."""
    check(crew, called_twice, {"front": options}, steps=3, accumulate=accumulate)


def called_twice_in_turn(step: int) -> Tensor:
    """The second call depends on the first one, through the server."""
    module = part("front")
    first = call(SERVER, apply, "middle", module(inputs(rank(), step)))
    return mse_loss(call(SERVER, apply, "middle", module(first))[:, :3], target(rank(), step))


@each_option
def test_a_ddp_module_is_called_before_and_after_a_call(crew: Crew, options: Options) -> None:
    check(crew, called_twice_in_turn, {"front": options}, steps=3)


def partly_used(step: int) -> Tensor:
    """The result of a call with the module's output does not reach the loss."""
    hidden = part("front")(inputs(rank(), step))
    call(MASTER, apply, "middle", hidden)
    return mse_loss(call(SERVER, apply, "middle", hidden)[:, :3], target(rank(), step))


def test_a_result_that_is_not_used(crew: Crew) -> None:
    check(crew, partly_used, {"front": {}})


def in_a_u(step: int) -> Tensor:
    """A plain layer, one under DDP, the server, and then both layers again."""
    first = part("local")(inputs(rank(), step))
    second = part("front")(first)
    third = call(SERVER, apply, "middle", second)
    return mse_loss(part("dense")(first * second * third), target(rank(), step))


@each_way
@each_option
def test_ddp_modules_inside_a_u_shaped_model(crew: Crew, options: Options, accumulate: Accumulate) -> None:
    check(crew, in_a_u, {"front": options, "dense": {}}, steps=3, accumulate=accumulate)
    check(crew, in_a_u, {"front": options}, accumulate=accumulate)
    check(crew, in_a_u, {"dense": options}, accumulate=accumulate)


def delegate(step: int) -> dict[int, Found]:
    """Runs on the master. It calls the trainers, which make passes in their own contexts."""
    futures = {each: rpc.rpc_async(f"worker{each}", run_pass, args=(hybrid, step)) for each in TRAINERS}
    return {each: future.wait() for each, future in futures.items()}


@each_option
def test_trainers_that_a_master_calls(crew: Crew, options: Options) -> None:
    together(crew, ALL, set_up, {"dense": options})
    for step in range(3):
        assert_found(crew[MASTER].run(delegate, step), expected(hybrid, step))


def loss_of_both(step: int) -> Tensor:
    """The sum of the trainers' losses, computed in the caller's context."""
    shared = part("local")(inputs(rank(), step))
    losses = [start(each, loss_there, step, shared) for each in TRAINERS]
    return torch.stack([loss.wait() for loss in losses]).sum()


def loss_there(step: int, x: Tensor) -> Tensor:
    rows = call(SERVER, apply, "table", ids(rank(), step))
    return mse_loss(part("dense")(rows + x), target(rank(), step))


@each_way
@each_option
@pytest.mark.parametrize("initiator", [MASTER, 0])
def test_one_context_spans_both_trainers(crew: Crew, options: Options, accumulate: Accumulate, initiator: int) -> None:
    """The master, or one of the trainers, makes the context."""
    check(crew, loss_of_both, {"dense": options}, initiators=[initiator], steps=3, accumulate=accumulate)


def around(ways: Sequence[tuple[int, str]], step: int) -> Tensor:
    """A chain of workers, in which each result goes through the initiator."""
    x = inputs(rank(), step)
    for to, name in ways:
        x = call(to, apply, name, x)
    return mse_loss(x[:, :3], target(rank(), step))


def chain(step: int) -> Tensor:
    return around([(0, "front"), (1, "front")], step)


def ring(step: int) -> Tensor:
    return around([(0, "front"), (1, "front"), (SERVER, "middle"), (0, "front"), (1, "front")], step)


def past_who_waits(step: int) -> Tensor:
    """Trainer 1 waits for trainer 0 to average, before it has sent the gradients that trainer 0 waits for."""
    return around([(0, "front"), (1, "local"), (SERVER, "middle"), (1, "local"), (1, "front")], step)


def three_against_one(step: int) -> Tensor:
    return around([(1, "front"), (0, "front"), (SERVER, "middle"), (1, "front"), (1, "front")], step)


@each_way
@pytest.mark.parametrize("options", [UNUSED, UNUSED | VIEW], ids="+".join)
@pytest.mark.parametrize("program", [chain, ring, past_who_waits, three_against_one])
@pytest.mark.parametrize("initiator", [MASTER, 0, 1])
def test_one_pass_goes_through_both_trainers(
    crew: Crew, program: trainers.Program, initiator: int, options: Options, accumulate: Accumulate
) -> None:
    """One trainer can average only after the gradients have reached the other, through it.

    (Without ``find_unused_parameters`` the trainers would also communicate in their second forward pass.)
    """
    check(crew, program, {"front": options}, initiators=[initiator], steps=2, accumulate=accumulate)


@pytest.mark.parametrize("program", [chain, ring, past_who_waits])
def test_one_step_goes_through_both_trainers_without_options(crew: Crew, program: trainers.Program) -> None:
    check(crew, program, {"front": {}}, initiators=[MASTER], steps=1)


def nested(step: int) -> Tensor:
    result: Tensor = call(0, inwards, [1, SERVER], inputs(rank(), step))
    return mse_loss(result[:, :3], target(rank(), step))


def inwards(ways: list[int], x: Tensor) -> Tensor:
    """Each worker calls the next one, and uses its result beside its own."""
    mine: Tensor = part("front")(x)
    return mine + call(ways[0], inwards, ways[1:], mine) if ways else mine


@each_way
@pytest.mark.parametrize("initiator", [MASTER, 1])
def test_trainers_that_call_each_other(crew: Crew, initiator: int, accumulate: Accumulate) -> None:
    """Both trainers have gates."""
    check(crew, nested, {"front": UNUSED}, initiators=[initiator], steps=2, accumulate=accumulate)


def u_of_the_master(step: int) -> Tensor:
    """The master combines the trainers' results with their inputs."""
    first = part("local")(inputs(rank(), step))
    there = [start(each, apply, "front", first) for each in TRAINERS]
    second = first * there[0].wait() + there[1].wait()
    return mse_loss(part("dense")(second), target(rank(), step))


@each_option
def test_a_ddp_module_at_the_bottom_of_a_u_shaped_model(crew: Crew, options: Options) -> None:
    check(crew, u_of_the_master, {"front": options}, initiators=[MASTER])


def two_ways(step: int) -> Tensor:
    """Two modules under DDP, whose results go to two workers."""
    first = start(MASTER, held, f"first of {rank()}", part("front")(inputs(rank(), step)))
    second = start(SERVER, held, f"second of {rank()}", part("twin")(inputs(rank(), step)))
    return mse_loss((first.wait() * second.wait())[:, :3], target(rank(), step))


def two_crossed_ways(step: int) -> Tensor:
    """The result that is computed first is sent last."""
    x = part("front")(inputs(rank(), step))
    y = part("twin")(inputs(rank(), step))
    second = start(SERVER, held, f"second of {rank()}", y)
    first = start(MASTER, held, f"first of {rank()}", x)
    return mse_loss((first.wait() * second.wait())[:, :3], target(rank(), step))


def held(name: str, x: Tensor) -> Tensor:
    return act(name, part("middle")(x))


_latches: dict[str, Latch] = {}


def hold(name: str) -> None:
    """Make the backward function of that name block on this worker."""
    _latches[name] = Latch(name)


def await_held(name: str) -> None:
    _latches[name].await_entered()


def let_go(name: str) -> None:
    _latches[name].released.set()


_seen: dict[str, list[Tensor]] = {}


def note(name: str) -> None:
    """Keep the gradients that the hooks of a part see."""
    for key, parameter in bare(name).named_parameters():
        seen = _seen[f"{name}.{key}"] = []
        parameter.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda leaf, seen=seen: seen.append(leaf.grad.clone())
        )


def noted() -> dict[str, list[Tensor]]:
    return _seen


@pytest.mark.parametrize("program", [two_ways, two_crossed_ways])
@pytest.mark.parametrize("late", [[(MASTER, "first of 0"), (SERVER, "second of 1")], [(MASTER, "first of 0")]], ids=len)
@each_option
def test_gradients_that_come_in_another_order_to_each_trainer(
    crew: Crew, options: Options, late: list[tuple[int, str]], program: trainers.Program
) -> None:
    """Trainer 0 gets the gradients of one module first, trainer 1 those of the other, or both at once.

    They must average in the same order anyway: a process group matches operations by their order alone.
    """
    together(crew, ALL, set_up, {"front": options, "twin": options})
    for step in range(2):
        for to, name in late:
            crew[to].run(hold, name)
        running = {each: crew[each].start(run_pass, program, step) for each in TRAINERS}
        for to, name in late:
            crew[to].run(await_held, name)
        for to, name in late:
            crew[to].run(let_go, name)
        got = {each: future.result(60) for each, future in running.items()}
        assert_found(got, expected(program, step, replicated=["front", "twin"]))


@each_way
@each_option
def test_hooks_run_once(crew: Crew, options: Options, accumulate: Accumulate) -> None:
    """Hooks see the trainer's own gradient, even if the tensor is used twice. DDP averages what they leave."""
    for program, name in ((hybrid, "dense"), (called_twice, "front")):
        together(crew, ALL, set_up, {name: options})
        together(crew, TRAINERS, note, name)
        for step in range(2):
            before: dict[int, Gradients] = together(crew, TRAINERS, trainers.grads_here)
            wanted = expected(program, step, replicated=())
            got = together(crew, TRAINERS, run_pass, program, step, accumulate)
            for each in TRAINERS:
                if accumulate == "context":
                    assert_same(got[each][each], expected(program, step, replicated=[name])[each][each])
                seen = crew[each].run(noted)
                mine = {key: wanted[each][each][key] for key in seen if key.startswith(name)}
                assert_same({key: seen[key][2 * step] for key in mine}, mine, "tensor hook")
                summed = trainers.added(mine, before[each])
                assert_same({key: seen[key][2 * step + 1] for key in mine}, summed, "post-accumulate hook")
                assert all(len(seen[key]) == 2 * (step + 1) for key in mine)
