"""`backhaul.ray.group` and `init_rpc(group=...)`: the user's own actors, and those of Ray Train, become workers."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import parts
import pytest
import ray
import torch
from eventually import eventually

import backhaul.ray
from backhaul import rpc
from backhaul.agent.endings import Ending
from backhaul.errors import MisuseError, OptionError, WorkerLostError
from backhaul.ray.joining import Arrival, deal
from backhaul.ray.obituaries import Life, ending_of


def test_ranks_by_node() -> None:
    came = [Arrival(process, node) for process, node in [("p", "a"), ("q", "b"), ("r", "a"), ("s", "b")]]
    assert deal(came) == {"p": 0, "r": 1, "q": 2, "s": 3}


LIFE = Life("actor", "node", 7)
HERE = {"State": "ALIVE", "Pid": 7, "Address": {"NodeID": "node"}}


@pytest.mark.parametrize(
    ("actor", "node_lives", "found"),
    [
        (HERE, True, None),
        (None, True, None),  # Ray does not know it
        ({"State": "DEAD"}, True, Ending("7", "has ended; Ray says: the actor is dead")),
        ({**HERE, "State": "RESTARTING"}, True, Ending("7", "has ended; Ray restarts its actor", True)),
        ({**HERE, "Pid": 8}, True, Ending("7", "has ended; Ray restarts its actor", True)),
        ({**HERE, "Address": {"NodeID": "other"}}, True, Ending("7", "has ended; Ray restarts its actor", True)),
        (HERE, False, Ending("7", "has ended; Ray says: node node is dead")),
    ],
)
def test_the_end_of_a_process_as_ray_reports_it(actor: Any, node_lives: bool, found: Ending | None) -> None:
    assert ending_of(LIFE, actor, node_lives) == found


@ray.remote(num_cpus=1, max_restarts=1)
class Trainer:
    """An actor as users write them."""

    def __init__(self, group: backhaul.ray.Group, **place: Any) -> None:
        self._group, self._place = group, place
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.join()

    def join(self) -> tuple[str, int, str]:
        backhaul.ray.init_rpc(group=self._group, **self._place)
        me = rpc.get_worker_info()
        return me.name, me.id, ray.get_runtime_context().get_node_id()

    def pid(self) -> int:
        return os.getpid()

    def sum_at(self, to: str, x: torch.Tensor, retry: int = 0) -> float:
        return float(rpc.rpc_sync(to, torch.sum, args=(x,), retry=retry))

    def hold(self, to: str) -> Any:
        self.value = rpc.remote(to, parts.keep, args=("x", 1))
        return self.value.to_here()

    def use(self) -> Any:
        return self.value.to_here()

    def leave(self) -> None:
        rpc.shutdown()


def test_actors_of_the_user(nodes: Any) -> None:
    with backhaul.ray.group(3) as group:
        assert b"_store" not in pickle.dumps(group) or pickle.loads(pickle.dumps(group))._store is None
        trainers = [Trainer.remote(group) for _ in range(3)]
        found = ray.get([trainer.join.remote() for trainer in trainers])
        assert sorted((name, rank) for name, rank, _ in found) == [(f"worker{rank}", rank) for rank in range(3)]
        where = [node for _, _, node in sorted(found, key=lambda each: each[1])]
        assert where == sorted(where, key=where.index)
        by_name = {name: trainer for (name, _, _), trainer in zip(found, trainers, strict=True)}
        for trainer in trainers:
            assert ray.get(trainer.sum_at.remote("worker2", torch.ones(4))) == 4.0

        # Ray restarts a killed actor, which takes its old place.
        one, other = by_name["worker1"], by_name["worker0"]
        ray.get(other.hold.remote("worker1"))
        old = ray.get(one.pid.remote())
        os.kill(old, 9)
        assert "worker 'worker1'" in eventually(lambda: _loss(other, "worker1"))
        eventually(lambda: _pid(one) not in (None, old), 200)
        assert ray.get(other.sum_at.remote("worker1", torch.ones(5), 1)) == 5.0
        assert ray.get(one.sum_at.remote("worker2", torch.ones(6))) == 6.0
        with pytest.raises(WorkerLostError, match="has its place and none of its values"):
            ray.get(other.use.remote())
        ray.get([trainer.leave.remote() for trainer in trainers])

        # The same group again, with the same ranks; then it is full.
        again = ray.get([trainer.join.remote() for trainer in trainers])
        assert again == found
        with pytest.raises(OptionError, match="all 3 places of the group are taken"):
            backhaul.ray.init_rpc(group=group)
        ray.get([trainer.leave.remote() for trainer in trainers])
    for trainer in trainers:
        ray.kill(trainer)


def _loss(actor: Any, peer: str) -> str:
    """An actor's report about a peer that it cannot call."""
    try:
        ray.get(actor.sum_at.remote(peer, torch.ones(4)))
    except WorkerLostError as error:
        return str(error)
    return ""


def _pid(actor: Any) -> int | None:
    try:
        return int(ray.get(actor.pid.remote(), timeout=30))
    except ray.exceptions.RayError:
        return None


def test_the_driver_takes_part(nodes: Any) -> None:
    with backhaul.ray.group(2) as group:
        trainer = Trainer.remote(group, name="trainer", rank=1)
        joined = trainer.join.remote()
        backhaul.ray.init_rpc("driver", group=group, rank=0)
        assert ray.get(joined)[:2] == ("trainer", 1)
        assert rpc.rpc_sync("trainer", torch.add, args=(1, 2)) == 3
        assert ray.get(trainer.sum_at.remote("driver", torch.ones(2))) == 2.0
        left = trainer.leave.remote()
        rpc.shutdown()
        ray.get(left)
    ray.kill(trainer)


def test_mistakes(nodes: Any) -> None:
    with pytest.raises(OptionError, match=r"must be made by backhaul\.ray\.group"):
        backhaul.ray.init_rpc(group="trainers")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a number of workers, at least 1; got 0"):
        backhaul.ray.group(0)
    with backhaul.ray.group(2) as group:
        assert repr(group).startswith("<Group of 2, which meets at ")
        with pytest.raises(OptionError, match=r"rank 2 is not in 0\.\.1"):
            backhaul.ray.init_rpc(group=group, rank=2)
        with pytest.raises(OptionError, match="leave out the option init_method"):
            backhaul.ray.init_rpc(group=group, rank=0, rpc_backend_options=rpc.RpcOptions(init_method="tcp://a:1"))


def test_a_client_outside_of_the_cluster(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.util import client

    monkeypatch.setattr(type(client.ray), "is_connected", lambda self: True)
    with pytest.raises(MisuseError, match=r"connected by Ray Client \(ray://\)"):
        backhaul.ray.cluster(1)


def train(config: dict[str, Any]) -> None:
    """A training function: the first worker has the last layer, and each learns with its own first layer."""
    import ray.train

    import backhaul.autograd as dist_autograd

    backhaul.ray.init_rpc(group=config["group"])
    me = rpc.get_worker_info()
    assert me.id == ray.train.get_context().get_world_rank()
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context:
        y = rpc.rpc_sync(f"worker{1 - me.id}", torch.mul, args=(x, 3.0))
        dist_autograd.backward(context, [y.sum()])
        gradient = dist_autograd.get_gradients(context)[x].tolist()
    rpc.shutdown()
    with tempfile.TemporaryDirectory() as directory:  # later versions of Ray keep metrics only with a checkpoint
        Path(directory, me.name).touch()
        checkpoint = ray.train.Checkpoint.from_directory(directory)
        ray.train.report({"gradient": gradient, "name": me.name}, checkpoint=checkpoint)


def test_ray_train(nodes: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Ray Train is not installed")
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with backhaul.ray.group(2) as group:
        trainer = TorchTrainer(
            train,
            train_loop_config={"group": group},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(tmp_path)),
        )
        result = trainer.fit()
    assert result.metrics is not None
    assert result.metrics["gradient"] == [3.0, 3.0]
    assert result.metrics["name"] == "worker0"
