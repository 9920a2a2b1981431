"""torchrl over RPC: a replay buffer, or collectors, on other workers.

    python rl_program.py buffer | sync | async          on torch's RPC
    python -m backhaul.dropin rl_program.py …           on Backhaul

``sync`` collectors wait for each other; each batch uses the current parameters of the policy.

The first process writes a line of JSON.
"""

import json
import os
import socket
import sys

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors.distributed import RPCCollector
from torchrl.data import LazyTensorStorage, RandomSampler, RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter
from torchrl.envs import EnvCreator
from torchrl.envs.custom.pendulum import PendulumEnv

TRAINER, BUFFER, COLLECTOR = "trainer", "buffer", "collector"


def agent():
    return type(rpc.api._get_current_rpc_agent()).__module__


def write(**found):
    os.write(1, (json.dumps(found) + "\n").encode())


def make_buffer(size):
    return RemoteTensorDictReplayBuffer(
        storage=LazyTensorStorage(size), sampler=RandomSampler(), writer=RoundRobinWriter(), batch_size=16
    )


def frames(start, count):
    numbers = torch.arange(start, start + count, dtype=torch.float32)
    return TensorDict({"observation": numbers[:, None].expand(count, 4).clone(), "reward": numbers}, [count])


def collect(buffer, start):
    """Runs on the collector, and fills the buffer of another worker."""
    return rpc.rpc_sync(buffer.owner(), RemoteTensorDictReplayBuffer.extend, args=(buffer, frames(start, 20)))


def with_buffer(rank, port):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    name = (TRAINER, BUFFER, COLLECTOR)[rank]
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=16, rpc_timeout=60, init_method="env://")
    rpc.init_rpc(name, rank=rank, world_size=3, rpc_backend_options=options)
    if name == TRAINER:
        buffer = rpc.remote(BUFFER, make_buffer, args=(100,))
        calls = [rpc.rpc_async(COLLECTOR, collect, args=(buffer, start)) for start in (0, 20)]
        places = sorted(torch.cat([call.wait().flatten() for call in calls]).tolist())
        one = rpc.rpc_sync(BUFFER, RemoteTensorDictReplayBuffer.add, args=(buffer, frames(40, 1)[0]))
        batch = rpc.remote(BUFFER, RemoteTensorDictReplayBuffer.sample, args=(buffer, 64)).to_here()
        same = buffer.rpc_sync().sample(8)
        length = buffer.rpc_sync().__len__()
        assert torch.equal(batch["observation"], batch["reward"][:, None].expand(64, 4))
        write(
            agent=agent(),
            places=places,
            one=int(one),
            length=length,
            batch=list(batch.batch_size),
            kind=type(batch).__name__,
            rewards=[batch["reward"].min().item() >= 0, batch["reward"].max().item() <= 40],
            same=list(same.batch_size),
        )
    rpc.shutdown()


class Gain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, angle):
        return (self.gain * angle).unsqueeze(-1)


def with_collectors(port, sync):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = TensorDictModule(Gain(), in_keys=["th"], out_keys=["action"])
    collector = RPCCollector(
        [EnvCreator(make_env)] * 2,
        policy,
        frames_per_batch=20,
        total_frames=60,
        launcher="mp",
        tcp_port=port,
        sync=sync,
    )
    batches = []
    try:
        for batch in collector:
            gain = batch["action"].squeeze(-1) / batch["th"]
            batches.append([batch.numel(), bool((gain - policy.module.gain).abs().max() < 1e-5)])
            with torch.no_grad():
                policy.module.gain.add_(1.0)
            collector.update_policy_weights_()
        found = agent()
    finally:
        collector.shutdown()
    write(agent=found, batches=batches)


def make_env():
    torch.set_num_threads(1)
    return PendulumEnv()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    if sys.argv[1] == "buffer":
        torch.multiprocessing.spawn(with_buffer, (free,), nprocs=3)
    else:
        with_collectors(free, sync=sys.argv[1] == "sync")
