"""A program for ``torch.distributed.rpc`` and its relatives, with torch's names only: it knows nothing of Backhaul.

A parameter server and two trainers; a model spread over all workers; references, futures, errors. Each worker
prints a line of JSON: its findings, and what is behind the names.

    python torch_program.py spawn | fork | forkserver     starts its three workers
    torchrun --nproc-per-node 3 torch_program.py          is one of them
"""

import json
import os
import pathlib
import socket
import sys
import threading

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.distributed.rpc.api as api
import torch.multiprocessing
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

WORLD_SIZE = 3
TRAINERS = 2


class ParameterServer:
    """Takes the gradients of all trainers, steps with their mean, and answers all with the new parameters."""

    def __init__(self):
        torch.manual_seed(1)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.lock = threading.Lock()
        self.waiting = torch.futures.Future()
        self.given = {}

    def fetch(self):
        return [parameter.detach() for parameter in self.model.parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def push(server_rref, trainer, gradients):
        self = server_rref.local_value()
        with self.lock:
            waiting = self.waiting
            self.given[trainer] = gradients
            if len(self.given) == TRAINERS:
                for index, parameter in enumerate(self.model.parameters()):
                    parameter.grad = sum(self.given[key][index] for key in sorted(self.given)) / TRAINERS
                self.optimizer.step()
                self.given, self.waiting = {}, torch.futures.Future()
                waiting.set_result(self.fetch())
        return waiting


def train_with_server(server_rref, trainer):
    """Runs on each trainer."""
    generator = torch.Generator().manual_seed(trainer)
    x = torch.randn(8, 4, generator=generator)
    model = nn.Linear(4, 1)
    new = server_rref.rpc_sync().fetch()
    losses = []
    for _ in range(3):
        for parameter, value in zip(model.parameters(), new, strict=True):
            parameter.data = value
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        new = rpc.rpc_sync(server_rref.owner(), ParameterServer.push, args=(server_rref, trainer, gradients))
        losses.append(loss.item())
    return losses


class Part(nn.Module):
    def __init__(self, inputs, outputs, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.tanh(self.linear(x))


def parameters_of(part_rref):
    return [RRef(parameter) for parameter in part_rref.local_value().parameters()]


def forward_of(part_rref, x):
    return part_rref.local_value()(x)


def train_parts():
    """A model over three workers: a local layer, a remote module, and a module behind a reference."""
    first = Part(4, 5, 2)
    second = RemoteModule("worker1/cpu", Part, args=(5, 6, 3))
    third = rpc.remote("worker2", Part, args=(6, 1, 4))
    params = [RRef(parameter) for parameter in first.parameters()] + second.remote_parameters()
    params += rpc.rpc_sync(third.owner(), parameters_of, args=(third,))
    optimizer = DistributedOptimizer(torch.optim.SGD, params, lr=0.05)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(3):
        with dist_autograd.context() as context_id:
            output = rpc.rpc_async(third.owner(), forward_of, args=(third, second(first(x)))).wait()
            loss = (output - 0.5).square().mean()
            dist_autograd.backward(context_id, [loss])
            assert len(dist_autograd.get_gradients(context_id)) == 2
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def fail():
    raise ValueError("as it is meant to be")


def lead():
    server = rpc.remote("worker0", ParameterServer)
    futures = [rpc.rpc_async(f"worker{rank}", train_with_server, args=(server, rank)) for rank in (1, 2)]
    served = torch.futures.wait_all(futures)
    return {"served": served, "parts": train_parts(), "error": error_of(fail)}


def error_of(function):
    try:
        rpc.rpc_sync("worker1", function)
    except Exception as error:
        return type(error).__name__


def behind():
    """What is behind torch's names."""
    threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    return {
        "agent": type(api._get_current_rpc_agent()).__module__,
        "torch's agent runs": any(thread.startswith("TP_") for thread in threads),  # TensorPipe's threads
        "rpc": dist.rpc.__name__,
        "optimizer": DistributedOptimizer.__module__,
        "remote module": RemoteModule.__module__,
    }


def work(rank, port=None):
    torch.set_num_threads(1)
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, rpc_timeout=60)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    found = lead() if rank == 0 else {}
    line = json.dumps({"rank": rank, **behind(), **found}) + "\n"
    rpc.shutdown()
    os.write(1, line.encode())  # one write, so that the line stays whole


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def main(start_method):
    if "RANK" in os.environ:
        work(int(os.environ["RANK"]))
    else:
        torch.multiprocessing.start_processes(work, (free_port(),), nprocs=WORLD_SIZE, start_method=start_method)


if __name__ == "__main__":
    main(*sys.argv[1:2] or ["spawn"])
