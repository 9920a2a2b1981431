"""A layer on another worker, and one backward pass over both: ``backhaul run -n 2 examples/two_workers.py``."""

import torch
from torch import nn

import backhaul.autograd as dist_autograd
import backhaul.rpc as rpc


def gradients(context_id: int, layer: rpc.RRef[nn.Linear]) -> list[torch.Tensor]:
    """Runs on the layer's owner: gradients stay on the worker of their parameters."""
    found = dist_autograd.get_gradients(context_id)
    return [found[parameter] for parameter in layer.local_value().parameters()]


def train_step() -> None:
    first = nn.Linear(5, 4)  # lives here
    second = rpc.remote("worker1", nn.Linear, args=(4, 3))  # lives on worker1
    x, target = torch.randn(8, 5), torch.randn(8, 3)

    with dist_autograd.context() as context_id:
        output = second.rpc_sync().forward(first(x))
        loss = nn.functional.mse_loss(output, target)
        dist_autograd.backward(context_id, [loss])
        here = dist_autograd.get_gradients(context_id)
        there = rpc.rpc_sync("worker1", gradients, args=(context_id, second))

    # The same model in this process alone.
    copy = second.to_here()
    nn.functional.mse_loss(copy(first(x)), target).backward()

    pairs = [(here[parameter], parameter.grad) for parameter in first.parameters()]
    pairs += [(found, parameter.grad) for found, parameter in zip(there, copy.parameters(), strict=True)]
    for found, expected in pairs:
        assert torch.allclose(found, expected), (found, expected)
    print(f"all {len(pairs)} gradients equal those of one process")


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.get_worker_info().name == "worker0":
        train_step()
    rpc.shutdown()
