"""Modules that several processes share (FSDP, replicate, tensor parallel) inside workers: as in one process.

Two trainers are in a process group and share the module. The third worker is a server, which has a table, or calls
them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from trainers import TRAINERS, WITHIN, join_group, rank, together

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.errors import MisuseError, UnsendableError
from backhaul.nn import parameter_rrefs
from backhaul.optim import DistributedOptimizer, clip_grad_norm_
from backhaul.worker import current
from crew import Crew

pytestmark = pytest.mark.timeout(400)  # on a busy machine three processes take minutes to import what they need

SERVER = 2
DATA_PARALLEL = ["fully_shard", "FSDP", "FSDP use_orig_params", "replicate", "replicate of fully_shard"]
Gradients = dict[str, Tensor]

sharding = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard of this torch does not run on CPUs"
)
replicating = pytest.mark.skipif(
    find_spec("torch.distributed._composable.replicate_with_fsdp") is None,
    reason="this torch has no replicate that is made like fully_shard",
)
MARKS = {"fully_shard": [sharding], "replicate of fully_shard": [sharding, replicating]}


def kinds(*names: str) -> list[Any]:
    return [pytest.param(name, marks=MARKS.get(name, [])) for name in names]


TABLE = torch.randn(5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
HELD: dict[str, Any] = {}


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    with Crew(3) as made:
        together(made, TRAINERS, join_group, f"file://{tmp_path_factory.mktemp('group') / 'store'}")
        together(made, TRAINERS, make_mesh)
        yield made


def make_mesh() -> None:
    HELD["mesh"] = init_device_mesh("cpu", (2,))


def new_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def wrapped(kind: str, model: nn.Sequential) -> nn.Module:
    mesh: DeviceMesh = HELD["mesh"]
    if kind == "fully_shard":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if kind.startswith("FSDP"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params="orig" in kind)
    if kind == "replicate":
        from torch.distributed._composable.replicate import replicate

        return replicate(model)
    if kind == "replicate of fully_shard":
        from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_like_fsdp

        return replicate_like_fsdp(model, mesh=mesh)  # type: ignore[no-any-return]
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def set_up(kind: str) -> None:
    """Make a new model. Trainers wrap it."""
    HELD["model"] = wrapped(kind, new_model()) if rank() in TRAINERS else None
    HELD["parameters"] = {} if HELD["model"] is None else dict(HELD["model"].named_parameters())


def local(value: Any) -> Tensor:
    """This process's part of a tensor."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach().clone()  # type: ignore[no-any-return]


def found_here(context_id: int) -> Gradients:
    found = current().autograd.gradients_here(context_id)
    known = {id(value): name.replace("_fsdp_wrapped_module.", "") for name, value in HELD["parameters"].items()}
    assert all(id(leaf) in known or leaf is TABLE for leaf in found), "a leaf that the user does not know"
    return {"table" if leaf is TABLE else known[id(leaf)]: local(each) for leaf, each in found.items()}


def grads_here() -> list[Tensor | None]:
    return [value.grad for value in HELD["parameters"].values()]


def in_one_process(who: int, step: int, model: nn.Module | None = None) -> Gradients:
    """The gradients of one trainer's loss."""
    model = new_model() if model is None else model
    table = TABLE.detach().clone().requires_grad_()
    loss_of(who, step, model(rows(table))).backward()  # type: ignore[no-untyped-call]
    assert table.grad is not None
    return {name: value.grad for name, value in model.named_parameters()} | {"table": table.grad}  # type: ignore[dict-item]


def loss_of(who: int, step: int, z: Tensor) -> Tensor:
    return (z * (who + 1) * (step + 1)).square().sum()


def rows(table: Tensor) -> Tensor:
    return (table * 2).sin()


def table_rows() -> Tensor:
    return rows(TABLE)


def mean(step: int) -> Gradients:
    """The wrapper's result for the gradients of all trainers."""
    one, other = (in_one_process(who, step) for who in TRAINERS)
    return {name: (one[name] + other[name]) / 2 for name in one}


def shares(kind: str, who: int, full: Gradients) -> Gradients:
    """A trainer's parts of the model's full gradients."""
    if kind.startswith("replicate"):
        return full
    if kind == "tensor parallel":
        along = {"0.weight": 0, "0.bias": 0, "2.weight": 1}
        return {name: each.chunk(2, along[name])[who] if name in along else each for name, each in full.items()}
    if kind == "fully_shard":
        return {name: each.chunk(2)[who] for name, each in full.items()}
    flat = torch.cat([each.flatten() for each in full.values()]).chunk(2)[who]
    if kind == "FSDP":
        return {"_flat_param": flat}
    result, start = {}, -who * len(flat)
    for name, each in full.items():
        piece = flat[max(start, 0) : max(start + each.numel(), 0)]
        if len(piece):
            result[name] = piece
        start += each.numel()
    return result


def assert_same(got: Gradients, wanted: Gradients) -> None:
    assert got.keys() == wanted.keys()
    for name, each in got.items():
        torch.testing.assert_close(each.flatten(), wanted[name].flatten(), rtol=1e-12, atol=1e-14, msg=name)


def of_model(gradients: Gradients) -> Gradients:
    return {name: each for name, each in gradients.items() if name != "table"}


def own_passes(kind: str, steps: int, fill: bool) -> list[tuple[Gradients, Gradients]]:
    """Passes of a trainer in its own context. Returns the gradients after each, here and at the server."""
    before = []
    if fill:
        for value in HELD["parameters"].values():
            value.grad = torch.full_like(value, 7.0)
        before = [each.clone() for each in grads_here() if each is not None]
    found = []
    with dist_autograd.context() as context_id:
        for step in range(steps):
            z = HELD["model"](rpc.rpc_sync("worker2", table_rows))
            dist_autograd.backward(context_id, [loss_of(rank(), step, z)], timeout=WITHIN)
            found.append((found_here(context_id), rpc.rpc_sync("worker2", found_here, args=(context_id,))))
    after = grads_here()
    assert not fill or all(torch.equal(local(one), local(other)) for one, other in zip(before, after, strict=True))
    assert fill or after == [None] * len(after)
    return found


@pytest.mark.parametrize("kind", kinds(*DATA_PARALLEL))
def test_data_parallel_trainers(crew: Crew, kind: str) -> None:
    """Each trainer runs two passes in its own context. ``.grad`` stays unchanged."""
    together(crew, (*TRAINERS, SERVER), set_up, kind)
    # With use_orig_params, FSDP itself drops a .grad that it has not made.
    for fill in (False, True) if "orig" not in kind else (False,):
        got = together(crew, TRAINERS, own_passes, kind, 2, fill)
        for who in TRAINERS:
            total: Gradients = {}
            own: Gradients = {}
            for step, (here, there) in enumerate(got[who]):
                total = {name: total.get(name, 0) + each for name, each in mean(step).items()}
                own = {name: own.get(name, 0) + each for name, each in in_one_process(who, step).items()}
                assert_same(here, shares(kind, who, of_model(total)))
                assert_same(there, {"table": own["table"]})


def forward_here(z: Tensor) -> Tensor:
    result: Tensor = HELD["model"](z)
    return result


def call_both() -> dict[int, Gradients]:
    """One context of the server. Its pass runs in both trainers at once, with two calls to each."""
    with dist_autograd.context() as context_id:
        losses = []
        for step in range(2):
            futures = [rpc.rpc_async(f"worker{who}", forward_here, args=(table_rows(),)) for who in TRAINERS]
            losses += [loss_of(who, step, future.wait()) for who, future in zip(TRAINERS, futures, strict=True)]
        dist_autograd.backward(context_id, losses, timeout=WITHIN)
        found = {who: rpc.rpc_sync(f"worker{who}", found_here, args=(context_id,)) for who in TRAINERS}
        return {**found, SERVER: found_here(context_id)}


@pytest.mark.parametrize("kind", kinds("fully_shard", "replicate of fully_shard"))
def test_modules_of_trainers_are_called_by_a_server(crew: Crew, kind: str) -> None:
    together(crew, (*TRAINERS, SERVER), set_up, kind)
    got = crew[SERVER].run(call_both)
    total = {name: mean(0)[name] + mean(1)[name] for name in mean(0)}
    for who in TRAINERS:
        assert_same(got[who], shares(kind, who, of_model(total)))
    assert_same(got[SERVER], {"table": sum(in_one_process(w, s)["table"] for w in TRAINERS for s in (0, 1))})  # type: ignore[dict-item]


def train(steps: int) -> Gradients:
    """Make steps of this trainer's optimizer. Returns its parameters."""
    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(HELD["model"]), lr=0.1)
    for step in range(steps):
        with dist_autograd.context() as context_id:
            z = HELD["model"](rpc.rpc_sync("worker2", table_rows))
            dist_autograd.backward(context_id, [loss_of(rank(), step, z)], timeout=WITHIN)
            optimizer.step(context_id)
    return {name.replace("_fsdp_wrapped_module.", ""): local(each) for name, each in HELD["parameters"].items()}


@pytest.mark.parametrize("kind", kinds("fully_shard", "FSDP", "replicate"))
def test_training(crew: Crew, kind: str) -> None:
    together(crew, (*TRAINERS, SERVER), set_up, kind)
    got = together(crew, TRAINERS, train, 3)
    model = new_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (sum(loss_of(who, step, model(rows(TABLE.detach()))) for who in TRAINERS) / 2).backward()  # type: ignore[operator,union-attr]
        optimizer.step()
    wanted = {name: each.detach() for name, each in model.named_parameters()}
    for who in TRAINERS:
        assert_same(got[who], shares(kind, who, wanted))


def clipped(most: float) -> tuple[float, Gradients]:
    """The norm of a pass's gradients over all processes, and the clipped gradients."""
    with dist_autograd.context() as context_id:
        z = HELD["model"](rpc.rpc_sync("worker2", table_rows))
        dist_autograd.backward(context_id, [loss_of(rank(), 0, z)], timeout=WITHIN)
        norm: Any = clip_grad_norm_(context_id, parameter_rrefs(HELD["model"]), most)
        return norm.full_tensor().item(), found_here(context_id)


@sharding
def test_clipping_of_fully_shard(crew: Crew) -> None:
    together(crew, (*TRAINERS, SERVER), set_up, "fully_shard")
    got = together(crew, TRAINERS, clipped, 0.5)
    full = of_model(mean(0))
    norm = torch.stack([each.norm() for each in full.values()]).norm()
    for who in TRAINERS:
        assert got[who][0] == pytest.approx(norm.item(), rel=1e-12)
        wanted = {name: each * (0.5 / (norm + 1e-6)) for name, each in full.items()}
        assert_same(got[who][1], shares("fully_shard", who, wanted))


def pass_without_sync() -> list[Gradients]:
    found = []
    with dist_autograd.context() as context_id:
        for step, sync in enumerate((False, True)):
            HELD["model"].set_requires_gradient_sync(sync)
            z = HELD["model"](rpc.rpc_sync("worker2", table_rows))
            dist_autograd.backward(context_id, [loss_of(rank(), step, z)], timeout=WITHIN)
            found.append(found_here(context_id))
    return found


@sharding
def test_fully_shard_without_sync(crew: Crew) -> None:
    """Gradients that were not reduced are reduced with those of the next pass."""
    together(crew, (*TRAINERS, SERVER), set_up, "fully_shard")
    got = together(crew, TRAINERS, pass_without_sync)
    for who in TRAINERS:
        assert got[who][0] == {}
        total = {name: mean(0)[name] + mean(1)[name] for name in of_model(mean(0))}
        assert_same(got[who][1], shares("fully_shard", who, total))


def refused_without_sync() -> None:
    with dist_autograd.context() as context_id, HELD["model"].no_sync():
        loss = HELD["model"](rpc.rpc_sync("worker2", table_rows)).sum()
        with pytest.raises(MisuseError, match=r"no_sync\(\) of FullyShardedDataParallel"):
            dist_autograd.backward(context_id, [loss], timeout=WITHIN)


def test_no_sync_of_fsdp_1_is_refused(crew: Crew) -> None:
    together(crew, (*TRAINERS, SERVER), set_up, "FSDP")
    together(crew, TRAINERS, refused_without_sync)


def loss_there(step: int, z: Tensor) -> Tensor:
    assert type(z) is Tensor
    return loss_of(0, step, z)


def tensor_parallel_pass(step: int) -> tuple[str, Gradients, Gradients]:
    """The module's result, a partial sum, goes to the server, which computes the loss."""
    with dist_autograd.context() as context_id:
        z = HELD["model"](rpc.rpc_sync("worker2", table_rows))
        loss = rpc.rpc_sync("worker2", loss_there, args=(step, z))
        dist_autograd.backward(context_id, [loss], timeout=WITHIN)
        there = rpc.rpc_sync("worker2", found_here, args=(context_id,))
        return type(z).__name__, found_here(context_id), there


def test_tensor_parallel_modules(crew: Crew) -> None:
    together(crew, (*TRAINERS, SERVER), set_up, "tensor parallel")
    for step in range(2):
        got = together(crew, TRAINERS, tensor_parallel_pass, step)
        full = in_one_process(0, step)
        for who, (kind, here, there) in got.items():
            assert kind == "AsyncCollectiveTensor"
            assert_same(here, shares("tensor parallel", who, of_model(full)))
            assert_same(there, {"table": full["table"]})


def double(x: DTensor) -> DTensor:
    assert isinstance(x, DTensor)
    return x + x  # x * 2 would wait for the other process if x is a sum of parts, before torch 2.7


def placed(placement: Any) -> tuple[Tensor, DTensor]:
    x = torch.full((2, 2), 1.0 + rank()).requires_grad_()
    return x, DTensor.from_local(x, HELD["mesh"], [placement], run_check=False)


def send_dtensor(to: str, placement: Any) -> list[list[float]]:
    """The gradient of a DTensor that was sent and came back."""
    with dist_autograd.context() as context_id:
        x, sent = placed(placement)
        got = rpc.rpc_sync(to, double, args=(sent,))
        assert isinstance(got, DTensor)
        assert got.placements == (placement,)
        assert got.shape == sent.shape
        assert torch.equal(got.to_local(), 2 * x)
        context_id.backward(got.to_local().square().sum(), timeout=WITHIN)
        return context_id.gradients()[x].tolist()  # type: ignore[no-any-return]


def refused(to: str, placement: Any, says: str) -> None:
    _, sent = placed(placement)
    with pytest.raises(UnsendableError, match=says) as caught:
        rpc.rpc_sync(to, double, args=(sent,))
    assert "send tensor.full_tensor()" in str(caught.value)


def test_dtensors_keep_their_meaning_or_are_refused(crew: Crew) -> None:
    assert crew[0].run(send_dtensor, "worker1", Replicate()) == [[8.0, 8.0]] * 2
    assert crew[1].run(send_dtensor, "worker1", Shard(0)) == [[16.0, 16.0]] * 2
    assert crew[0].run(send_dtensor, "worker0", Partial()) == [[8.0, 8.0]] * 2
    other_place = r"coordinate \[0\] of the mesh \[0, 1\], and this worker has coordinate \[1\]"
    crew[0].run(refused, "worker1", Shard(0), other_place)
    crew[1].run(refused, "worker2", Replicate(), "this worker is not part of such a mesh")


def norm_refused() -> None:
    """With and without a context. Every process must take part, since torch may compute the norm collectively."""
    _, x = placed(Shard(0))
    norm = torch.linalg.vector_norm(x)
    for block in (nullcontext, dist_autograd.context):
        with block(), pytest.raises(UnsendableError, match=r"NormPartial.* has no meaning on another worker"):
            rpc.rpc_sync(f"worker{rank()}", double, args=(norm,))


def test_a_partial_norm_is_refused(crew: Crew) -> None:
    together(crew, TRAINERS, norm_refused)
