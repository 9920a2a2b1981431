"""Modules under DistributedDataParallel in distributed passes: gradients are averaged over the trainers."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
import torch.distributed as dist
import trainers
from models import Accumulate
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from trainers import (
    SERVER,
    TRAINERS,
    WITHIN,
    Found,
    Gradients,
    Options,
    added,
    apply,
    assert_found,
    assert_same,
    bare,
    call,
    check,
    collect,
    expected,
    gradients_here,
    grads_here,
    hybrid,
    ids,
    inputs,
    join_group,
    part,
    plus,
    rank,
    run_pass,
    set_up,
    target,
    together,
)

import backhaul.autograd as dist_autograd
from backhaul.autograd.replicas import replicas
from crew import Crew

UNUSED = {"find_unused_parameters": True}
STATIC = {"static_graph": True}
VIEW = {"gradient_as_bucket_view": True}
SMALL_BUCKETS = {"bucket_cap_mb": 1e-4}

ALL = range(4)


def title(options: Any) -> str:
    return "+".join(options) or "plain"


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """Two trainers, a server, and a master."""
    with Crew(4) as made:
        together(made, TRAINERS, join_group, f"file://{tmp_path_factory.mktemp('group') / 'store'}")
        yield made


@pytest.mark.parametrize("accumulate", ["context", "grad"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        UNUSED,
        STATIC,
        VIEW,
        UNUSED | VIEW,
        STATIC | VIEW,
        STATIC | UNUSED | VIEW,
        SMALL_BUCKETS,
        SMALL_BUCKETS | VIEW | UNUSED,
        {"broadcast_buffers": False},
    ],
    ids=title,
)
def test_each_option_of_ddp(crew: Crew, options: Options, accumulate: Accumulate) -> None:
    """Several steps, because DDP rebuilds its buckets after the first."""
    check(crew, hybrid, {"dense": options}, steps=4, accumulate=accumulate)


def train(program: trainers.Program, steps: int) -> None:
    """The steps of a trainer. The trainers take turns at the server."""
    for step in range(steps):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [program(step)], timeout=WITHIN)
            dist.barrier()
            for turn in TRAINERS:
                if turn == rank():
                    call(SERVER, descend, context_id)
                    descend(context_id)
                dist.barrier()


def descend(context_id: int) -> None:
    """A step on this worker."""
    found = gradients_here(context_id)
    for name, value in values().items():
        if name in found:
            value.sub_(found[name], alpha=0.3)


def values() -> Gradients:
    """The parameters of this worker."""
    return {
        f"{name}.{key}": value.detach()
        for name in trainers.part_names()
        for key, value in bare(name).named_parameters()
    }


@pytest.mark.parametrize("options", [{}, UNUSED, STATIC, VIEW | SMALL_BUCKETS], ids=title)
def test_training(crew: Crew, options: Options) -> None:
    """After some steps of an optimizer all parameters are those of one process."""
    together(crew, ALL, set_up, {"dense": options})
    together(crew, TRAINERS, train, hybrid, 5)
    got = together(crew, ALL, values)

    with trainers.one_process():
        for step in range(5):
            found: Found = {}
            for each in TRAINERS:
                with trainers.as_worker(each):
                    hybrid(step).backward()  # type: ignore[no-untyped-call]
                    found[each] = grads_here()
            with trainers.as_worker(SERVER):
                found[SERVER] = grads_here()
            for key in found[0]:
                found[0][key] = found[1][key] = (found[0][key] + found[1][key]) / 2
            for each, gradients in found.items():
                with trainers.as_worker(each):
                    for key, gradient in gradients.items():
                        values()[key].sub_(gradient, alpha=0.3)
                    for name in trainers.part_names():
                        part(name).zero_grad()
        for each in (*TRAINERS, SERVER):
            with trainers.as_worker(each):
                assert_same(got[each], values(), f"worker {each}:")
    table = trainers.new_parts()["table"].weight
    assert isinstance(table, Tensor)
    assert not torch.equal(got[SERVER]["table.weight"], table)


def some_ways(step: int) -> Tensor:
    """Step 0 uses both halves. In step 1 one trainer skips a half, in step 2 both do, in step 3 each skips another."""
    ways = [
        (["left", "right"], ["right", "left"]),
        (["left"], ["left", "right"]),
        (["right"], ["right"]),
        (["left"], ["right"]),
    ][step][rank()]
    rows = call(SERVER, apply, "table", ids(rank(), step))
    return mse_loss(part("forked")(rows, ways)[:, :3], target(rank(), step))


@pytest.mark.parametrize("accumulate", ["context", "grad"])
@pytest.mark.parametrize("options", [UNUSED, UNUSED | VIEW, UNUSED | SMALL_BUCKETS], ids=title)
def test_parameters_that_a_trainer_does_not_use(crew: Crew, options: Options, accumulate: Accumulate) -> None:
    """The trainer gets the average all the same. A parameter that no trainer has used gets no gradient."""
    assert "forked.left.weight" not in expected(some_ways, 2, replicated=["forked"])[0][0]
    check(crew, some_ways, {"forked": options}, steps=4, accumulate=accumulate)


def two_passes(apart: bool) -> list[Found]:
    """A pass under ``no_sync()``, then one without, in one context or in two. Returns the gradients at the end."""
    found = []
    module = part("dense")
    assert isinstance(module, DistributedDataParallel)
    with ExitStack() as stack:
        context_id = stack.enter_context(dist_autograd.context())
        for step in (0, 1):
            with module.no_sync() if step == 0 else nullcontext():
                dist_autograd.backward(context_id, [hybrid(step)], timeout=WITHIN)
            found.append(collect(context_id))
            if apart:
                stack.close()
                context_id = stack.enter_context(dist_autograd.context())
    return found


@pytest.mark.parametrize("apart", [False, True], ids=["one context", "two contexts"])
@pytest.mark.parametrize("options", [{}, UNUSED, VIEW, VIEW | SMALL_BUCKETS], ids=title)
def test_no_sync(crew: Crew, options: Options, apart: bool) -> None:
    """Gradients that were not averaged are averaged with those of the next pass in the same context."""
    together(crew, ALL, set_up, {"dense": options})
    run_both = together(crew, TRAINERS, run_pass, hybrid, 2)
    assert_found(run_both, expected(hybrid, 2))
    got = together(crew, TRAINERS, two_passes, apart)
    assert_found({each: found[0] for each, found in got.items()}, expected(hybrid, 0, replicated=()))
    second = expected(hybrid, 1)
    assert_found(
        {each: found[1] for each, found in got.items()}, second if apart else plus(expected(hybrid, 0), second)
    )
    assert_found(together(crew, TRAINERS, run_pass, hybrid, 2), expected(hybrid, 2))


def two_passes_into_grad() -> None:
    module = part("dense")
    assert isinstance(module, DistributedDataParallel)
    for step in (0, 1):
        with module.no_sync() if step == 0 else nullcontext():
            run_pass(hybrid, step, "grad")


@pytest.mark.parametrize("options", [{}, VIEW], ids=title)
def test_no_sync_into_grad(crew: Crew, options: Options) -> None:
    together(crew, ALL, set_up, {"dense": options})
    together(crew, TRAINERS, two_passes_into_grad)
    wanted = plus(expected(hybrid, 0), expected(hybrid, 1))
    got = together(crew, ALL, grads_here)
    for each in TRAINERS:
        assert_same(got[each], wanted[each][each])
    assert_same(got[SERVER], added(wanted[0][SERVER], wanted[1][SERVER]))


def fill_grads(locally: bool) -> None:
    """Put something into ``.grad``: the result of a local backward, or numbers."""
    if locally:
        part("dense")(inputs(rank(), 9)).sum().backward()
        return
    for name in ("table", "dense"):
        for number, parameter in enumerate(bare(name).parameters()):
            parameter.grad = torch.full_like(parameter, 7.0 + number)


@pytest.mark.parametrize("locally", [False, True], ids=["numbers", "of a local backward"])
@pytest.mark.parametrize("options", [{}, UNUSED, STATIC, VIEW], ids=title)
def test_a_pass_into_the_context_leaves_grad_unchanged(crew: Crew, options: Options, locally: bool) -> None:
    together(crew, ALL, set_up, {"dense": options})
    for step in range(3):
        together(crew, TRAINERS if locally else (*TRAINERS, SERVER), fill_grads, locally)
        before = together(crew, ALL, grads_here)
        assert len(before[0]) == 4 + (not locally)
        assert_found(together(crew, TRAINERS, run_pass, hybrid, step), expected(hybrid, step))
        for each, grads in together(crew, ALL, grads_here).items():
            assert_same(grads, before[each], f"worker {each}:")


def beside(step: int) -> Tensor:
    """A plain module before the one under DDP; both use the rows."""
    rows = call(SERVER, apply, "table", ids(rank(), step))
    return mse_loss(part("dense")(rows + part("local")(rows)), target(rank(), step))


@pytest.mark.parametrize("accumulate", ["context", "grad"])
@pytest.mark.parametrize("options", [{}, UNUSED, STATIC, VIEW], ids=title)
def test_a_plain_module_beside_a_ddp_module_is_not_averaged(
    crew: Crew, options: Options, accumulate: Accumulate
) -> None:
    got = expected(beside, 0)
    assert not torch.equal(got[0][0]["local.weight"], got[1][1]["local.weight"])
    check(crew, beside, {"dense": options}, accumulate=accumulate)


def inside_out(step: int) -> Tensor:
    """The inner module is called directly, not through DDP."""
    return mse_loss(bare("dense")(call(SERVER, apply, "table", ids(rank(), step))), target(rank(), step))


@pytest.mark.parametrize("options", [{}, VIEW], ids=title)
def test_the_module_inside_called_directly_is_not_averaged(crew: Crew, options: Options) -> None:
    """The pass waits for no other trainer either, and DDP works as before afterwards."""
    together(crew, ALL, set_up, {"dense": options})
    for step in range(2):
        alone = {each: crew[each].run(run_pass, inside_out, step) for each in TRAINERS}
        assert_found(alone, expected(inside_out, step, replicated=()))
        assert_found(together(crew, TRAINERS, run_pass, hybrid, step), expected(hybrid, step))


def looked_up(step: int) -> Tensor:
    """Rows of a local table under DDP, with sparse gradients, which go through the server."""
    return mse_loss(call(SERVER, apply, "middle", part("sparse")(ids(rank(), step)))[:, :3], target(rank(), step))


def is_sparse_in_context(step: int) -> bool:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [looked_up(step)], timeout=WITHIN)
        (gradient,) = dist_autograd.get_gradients(context_id).values()
        return gradient.is_sparse


@pytest.mark.parametrize("accumulate", ["context", "grad"])
def test_sparse_gradients(crew: Crew, accumulate: Accumulate) -> None:
    check(crew, looked_up, {"sparse": {}}, steps=3, accumulate=accumulate)
    assert together(crew, TRAINERS, is_sparse_in_context, 3) == {0: True, 1: True}


def run_uneven(counts: dict[int, int]) -> list[Found]:
    module = part("dense")
    assert isinstance(module, DistributedDataParallel)
    with module.join():
        return [run_pass(hybrid, step) for step in range(counts[rank()])]


@pytest.mark.parametrize("options", [{}, VIEW | UNUSED], ids=title)
def test_trainers_with_different_numbers_of_steps(crew: Crew, options: Options) -> None:
    """``join()``: a trainer that is done early takes part with zeros."""
    together(crew, ALL, set_up, {"dense": options})
    got = together(crew, TRAINERS, run_uneven, {0: 1, 1: 3})
    assert [len(found) for found in got.values()] == [1, 3]
    assert_found({each: found[0] for each, found in got.items()}, expected(hybrid, 0))
    for step in (1, 2):
        found = expected(hybrid, step, replicated=())[1]
        for key in found[1]:
            found[1][key] /= 2
        assert_found({1: got[1][step]}, {1: found})


def sum_up(state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are strings
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def register_sum() -> None:
    module = part("dense")
    assert isinstance(module, DistributedDataParallel)
    module.register_comm_hook(None, sum_up)


@pytest.mark.parametrize("options", [{}, VIEW], ids=title)
def test_a_communication_hook(crew: Crew, options: Options) -> None:
    """The hook sums instead of averaging."""
    together(crew, ALL, set_up, {"dense": options})
    together(crew, TRAINERS, register_sum)
    for step in range(3):
        wanted = expected(hybrid, step)
        for each in TRAINERS:
            wanted[each][each] = {key: 2 * gradient for key, gradient in wanted[each][each].items()}
        assert_found(together(crew, TRAINERS, run_pass, hybrid, step), wanted)


def replace_by_copy() -> None:
    """Replace modules by copies, and by copies of copies."""
    trainers.put_part("dense", copy.deepcopy(pickle.loads(pickle.dumps(part("dense")))))


@pytest.mark.parametrize("options", [{}, VIEW], ids=title)
def test_a_copy_of_a_module_under_ddp(crew: Crew, options: Options) -> None:
    together(crew, ALL, set_up, {"dense": options})
    together(crew, TRAINERS, replace_by_copy)
    for step in range(2):
        assert_found(together(crew, TRAINERS, run_pass, hybrid, step), expected(hybrid, step))


_kept: list[Any] = []


def wrap_again(options: list[Options]) -> None:
    """Wrap modules again. The earlier wrappers stay alive."""
    for each in options:
        _kept.append(part("dense"))
        trainers.put_part("dense", DistributedDataParallel(bare("dense"), **each))


def drop_kept() -> None:
    _kept.clear()


def contexts_side_by_side() -> list[Found]:
    """Two passes, one after the other. Returns the first one's gradients after the second."""
    with dist_autograd.context() as first:
        dist_autograd.backward(first, [hybrid(0)], timeout=WITHIN)
        found: list[Found] = []
        thread = threading.Thread(target=lambda: found.append(run_pass(hybrid, 1)))
        thread.start()
        thread.join()
        return [collect(first), *found]


@pytest.mark.parametrize(("first", "last"), [({}, VIEW), (VIEW, {})], ids=title)
def test_a_module_wrapped_again_and_again(crew: Crew, first: Options, last: Options) -> None:
    """Each context has its own memory, in whatever way the current wrapper gets its gradients."""
    together(crew, ALL, set_up, {"dense": first})
    for _ in range(4):  # which wrapper is found first depends on addresses
        together(crew, TRAINERS, wrap_again, [first, first, last])
        for step in (2, 3):  # after these DDP keeps its buckets
            assert_found(together(crew, TRAINERS, run_pass, hybrid, step), expected(hybrid, step))
        got = together(crew, TRAINERS, contexts_side_by_side)
        for step in (0, 1):
            assert_found({each: found[step] for each, found in got.items()}, expected(hybrid, step))
    together(crew, TRAINERS, drop_kept)


def forget_parts() -> int:
    """The number of parameters that are left after the parts are deleted."""
    left = [weakref.ref(value) for name in trainers.part_names() for value in bare(name).parameters()]
    trainers.put_part("dense", None)
    set_up({})
    gc.collect()
    return sum(each() is not None for each in left)


def count_replicated() -> int:
    gc.collect()
    return len(replicas.by_leaf())


def test_modules_that_are_gone_leave_nothing(crew: Crew) -> None:
    """A pass without modules under DDP does not search for any."""
    together(crew, ALL, set_up, {"dense": {}, "front": VIEW})
    assert_found(together(crew, TRAINERS, run_pass, hybrid, 0), expected(hybrid, 0))
    assert together(crew, ALL, count_replicated) == {0: 6, 1: 6, SERVER: 0, 3: 0}
    assert together(crew, ALL, forget_parts) == dict.fromkeys(ALL, 0)
    assert together(crew, ALL, count_replicated) == dict.fromkeys(ALL, 0)


MADE_FIRST = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/group", rank=0, world_size=1)
module = DistributedDataParallel(torch.nn.Linear(3, 2))
assert not any(name.startswith("backhaul") for name in sys.modules)

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.autograd.replicas import replicas

rpc.init_rpc("one", rank=0, world_size=1, rpc_backend_options=rpc.RpcOptions(init_method=f"file://{sys.argv[1]}/rpc"))
assert set(replicas.by_leaf()) == {id(parameter) for parameter in module.parameters()}
reduced = []


def note(state, bucket):
    reduced.append(bucket.buffer().clone())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


module.register_comm_hook(None, note)
with dist_autograd.context() as context_id:
    dist_autograd.backward(context_id, [module(torch.ones(4, 3)).sum()])
    found = dist_autograd.get_gradients(context_id)
    assert all(found[parameter].eq(4).all() for parameter in module.parameters())
assert [buffer.tolist() for buffer in reduced] == [[4.0] * 8]
rpc.shutdown()
dist.destroy_process_group()
print("found")
"""


def test_a_module_from_before_the_import(tmp_path: Path) -> None:
    """The search finds the module, and touches no deprecated torch object."""
    command = [sys.executable, "-W", "error::FutureWarning", "-c", MADE_FIRST, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout == "found\n", done.stderr
    assert done.returncode == 0
