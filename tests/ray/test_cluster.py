"""`backhaul.ray.cluster`: workers on two nodes of a real Ray, with the driver in the group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parts
import pytest
import ray
import torch

import backhaul.autograd as dist_autograd
import backhaul.ray
from backhaul import rpc
from backhaul.cluster.handles import WorkerHandle
from backhaul.errors import MisuseError, OptionError
from backhaul.nn import RemoteModule
from backhaul.optim import DistributedOptimizer

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def _no_thread_stays() -> None:
    """The cluster stays from one test to the next, and so do its threads."""


@pytest.fixture(scope="module")
def workers(nodes: Any) -> Iterator[backhaul.ray.RayCluster]:
    options = rpc.RpcOptions(secret=SECRET)
    with backhaul.ray.cluster(3, resources={"CPU": 1, "GPU": 0}, env={"FLAVOUR": "salt"}, options=options) as found:
        yield found


def test_the_handles(workers: backhaul.ray.RayCluster) -> None:
    assert [worker.name for worker in workers] == ["worker1", "worker2", "worker3"]
    assert [worker.info.id for worker in workers] == [1, 2, 3]
    for worker in workers:
        assert isinstance(worker, WorkerHandle)
        assert worker.alive
        assert worker.rpc_sync(os.getpid) == worker.pid != os.getpid()
        assert rpc.rpc_sync(worker.name, parts.node_here) == worker.node
    assert workers[1].rpc_async(parts.name_here).wait() == "worker2"
    assert repr(workers[0]) == f"<worker1: pid {workers[0].pid} on {workers[0].address}>"


def test_ranks_by_node(workers: backhaul.ray.RayCluster) -> None:
    """Ranks on one node are consecutive, and the driver's node comes first."""
    where = [worker.node for worker in workers]
    assert len(set(where)) == 2
    assert where == sorted(where, key=where.index)
    assert ray.get_runtime_context().get_node_id() == where[0]
    local = [rpc.rpc_sync(worker.name, os.getenv, args=("LOCAL_RANK",)) for worker in workers]
    assert local == [str([where[0], *where][: rank + 1].count(node) - 1) for rank, node in enumerate(where, 1)]
    assert workers.run(os.getenv, ("WORLD_SIZE",)) == ["4", "4", "4"]


def test_the_environment(workers: backhaul.ray.RayCluster) -> None:
    assert workers.run(os.getenv, ("FLAVOUR",)) == ["salt"] * 3


def test_workers_call_each_other_and_the_driver(workers: backhaul.ray.RayCluster) -> None:
    x = torch.ones(3)
    expected = x
    for factor in (4, 3, 2, 1):
        expected = expected.sin() * factor
    assert torch.equal(parts.chain(x, "worker1", "worker2", "worker3"), expected)
    assert workers[2].rpc_sync(parts.peer_sum, ("driver", x)) == 3.0


def test_unix_sockets_and_shared_memory_within_a_machine(workers: backhaul.ray.RayCluster) -> None:
    """The nodes of `cluster_utils.Cluster` are on one machine."""
    large = torch.ones(1 << 20)
    for worker in workers:
        for other in ("driver", *(each.name for each in workers if each is not worker)):
            for _ in range(2):  # the first large tensor goes through the socket
                assert worker.rpc_sync(parts.peer_sum, (other, large)) == 1 << 20
        ways = worker.rpc_sync(parts.ways)
        assert {path for path, _ in ways.values()} == {"unix"}
        assert all(shared > large.nbytes / 2 for _, shared in ways.values()), ways


def test_gradients_are_those_of_one_process(workers: backhaul.ray.RayCluster) -> None:
    sizes = [(4, 5), (5, 3), (3, 2)]
    weights = [
        worker.rpc_sync(parts.make_weight, (*size, seed))
        for seed, (worker, size) in enumerate(zip(workers, sizes, strict=True))
    ]
    x = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    with dist_autograd.context() as context:
        found = x
        for worker in workers:
            found = worker.rpc_sync(parts.apply_weight, (found,)).tanh()
        dist_autograd.backward(context, [found.sum()])
        gradients = [worker.rpc_sync(parts.gradient_of_weight, (context,)) for worker in workers]
        of_x = dist_autograd.get_gradients(context)[x]
    leaves = [weight.requires_grad_() for weight in weights]
    here = x.detach().clone().requires_grad_()
    expected = here
    for leaf in leaves:
        expected = (expected @ leaf).tanh()
    wanted = torch.autograd.grad(expected.sum(), [here, *leaves])
    for one, other in zip([of_x, *gradients], wanted, strict=True):
        assert torch.equal(one, other)


def test_training_is_that_of_one_process(workers: backhaul.ray.RayCluster) -> None:
    torch.manual_seed(0)
    local = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    first = RemoteModule("worker1", torch.nn.Linear, (4, 8), {"dtype": torch.float64})
    last = RemoteModule("worker3", torch.nn.Linear, (8, 1), {"dtype": torch.float64})
    first.load_state_dict(local[0].state_dict())
    last.load_state_dict(local[2].state_dict())
    remote_steps = DistributedOptimizer(
        torch.optim.SGD, [*first.remote_parameters(), *last.remote_parameters()], lr=0.1
    )
    local_steps = torch.optim.SGD(local.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
        with dist_autograd.context() as context:
            loss = (last(first(x).tanh()) - y).square().mean()
            dist_autograd.backward(context, [loss])
            remote_steps.step(context)
        expected = (local(x) - y).square().mean()
        local_steps.zero_grad()
        expected.backward()
        local_steps.step()
        assert torch.equal(loss, expected)
    for module, name in ((first, "0"), (last, "2")):
        for key, value in module.state_dict().items():
            assert torch.equal(value, local.state_dict()[f"{name}.{key}"])


def test_run_raises_what_the_function_raises(workers: backhaul.ray.RayCluster) -> None:
    with pytest.raises(ValueError, match="spoiled"):
        workers.run(parts.fail, ("spoiled",))


def test_the_secret_is_nowhere_to_be_seen(workers: backhaul.ray.RayCluster, nodes: Any) -> None:
    assert workers.run(parts.secret_in_sight, (SECRET,)) == [[], [], []]
    shown = [SECRET, SECRET.hex().encode(), repr(SECRET)[2:-1].encode()]
    session = Path(nodes.head_node.get_session_dir_path())
    logs = [path for path in (session / "logs").rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if any(each in path.read_bytes() for each in shown)]
    from ray._private.state import actors

    table = repr(actors()) + repr(workers) + repr(workers._starts)
    assert not [each for each in shown if each in table.encode()]


def test_a_process_is_the_driver_of_one_cluster(workers: backhaul.ray.RayCluster) -> None:
    with pytest.raises(MisuseError, match=r"already worker 'driver' of a group; .*driver=False"):
        backhaul.ray.cluster(1)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n": 0}, "at least 1; got 0"),
        ({"strategy": "TIGHT"}, "'TIGHT' must be one of PACK, SPREAD"),
        ({"resources": {"CPU": 0}}, "must ask for something"),
        ({"resources": {"CPU": -1}}, "'CPU': -1 must be"),
        ({"restarts": -1}, "restarts=-1 must be a number"),
        ({"names": ["driver"]}, "needs 1 names that differ"),
        ({"env": {"THREADS": 1}}, "env: 'THREADS': 1 must be a variable and its value, both strings"),
        ({"on_rejoin": 3}, "on_rejoin=3 must be a function"),
        ({"options": rpc.RpcOptions(init_method="file:///tmp/x")}, "leave out the option init_method"),
        ({"options": rpc.RpcOptions(trust="federation")}, "workers of one user"),
    ],
)
def test_arguments(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(OptionError, match=error):
        backhaul.ray.cluster(**{"n": 1, **arguments})
