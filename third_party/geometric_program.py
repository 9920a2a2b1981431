"""torch_geometric's RPC between two processes, each with one part of a graph's features.

``python geometric_program.py`` runs it on torch's RPC, ``python -m backhaul.dropin geometric_program.py`` on Backhaul.
Each process writes a line of JSON.
"""

import json
import os
import socket

import torch
import torch.distributed.rpc
import torch.multiprocessing
from torch_geometric.distributed import DistContext, LocalFeatureStore
from torch_geometric.distributed import rpc as graph_rpc

PARTS, NODES, WIDTH = 2, 12, 3


def features():
    return torch.arange(NODES * WIDTH, dtype=torch.float32).reshape(NODES, WIDTH)


def part_of_node():
    """Nodes alternate between the processes."""
    return torch.arange(NODES) % PARTS


def make_store(part):
    store = LocalFeatureStore()
    mine = (part_of_node() == part).nonzero().flatten()
    store.put_global_id(mine, group_name=None)
    store.put_tensor(features()[mine], group_name=None, attr_name="x")
    store.meta = {"is_hetero": False}
    store.num_partitions, store.partition_idx, store.node_feat_pb = PARTS, part, part_of_node()
    return store


class Scaled(graph_rpc.RPCCallBase):
    """What a process serves to the other one."""

    def __init__(self, part):
        self.factor = part + 1

    def rpc_sync(self, x):
        return self.factor * x

    def rpc_async(self, x, *, plus=0):
        return self.factor * x + plus


def work(part, port):
    torch.set_num_threads(1)
    context = DistContext(part, part, PARTS, PARTS, "sampler")
    assert not graph_rpc.rpc_is_initialized()
    graph_rpc.init_rpc(context, "127.0.0.1", port, rpc_timeout=60)
    assert graph_rpc.rpc_is_initialized()
    graph_rpc.init_rpc(context, "127.0.0.1", port)  # the second call does nothing

    workers = graph_rpc.rpc_partition_to_workers(context, PARTS, part)
    router = graph_rpc.RPCRouter(workers)
    store = make_store(part)
    store.set_rpc_router(router)
    call = graph_rpc.rpc_register(Scaled(part))
    graph_rpc.global_barrier()

    wanted = torch.tensor([5, 0, 11, 4, 4, 7])
    found = store.lookup_features(wanted).wait()
    assert torch.equal(found, features()[wanted]), found

    other = router.get_to_worker(1 - part)
    scaled = graph_rpc.rpc_sync(other, call, args=(torch.ones(2),))
    shifted = graph_rpc.rpc_async(other, call, args=(torch.ones(2),), kwargs={"plus": 10}).wait()
    everyone = graph_rpc.global_all_gather({"part": part}, timeout=30)
    line = {
        "part": part,
        "workers": workers,
        "other": [scaled.tolist(), shifted.tolist()],
        "everyone": dict(sorted(everyone.items())),
        "agent": type(torch.distributed.rpc.api._get_current_rpc_agent()).__module__,
    }
    graph_rpc.global_barrier(timeout=30)
    graph_rpc.shutdown_rpc(context.worker_name)
    assert not graph_rpc.rpc_is_initialized()
    os.write(1, (json.dumps(line) + "\n").encode())


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    torch.multiprocessing.spawn(work, (free,), nprocs=PARTS)
