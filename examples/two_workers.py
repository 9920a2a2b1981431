"""A layer on another worker, with its gradient: ``backhaul run -n 2 examples/two_workers.py``.

A tensor travels without its graph. So the chain rule crosses the workers by hand here: the gradient
goes to worker1, which runs torch's own autograd and returns what it found.
"""

import torch
from torch import nn

import backhaul.rpc as rpc

layers: dict[str, nn.Linear] = {}  # each worker has its own


def build(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    layers[name] = nn.Linear(4, 3)


def forward(name: str, x: torch.Tensor) -> torch.Tensor:
    return layers[name](x)


def backward(name: str, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of the layer's input, weight and bias, given that of its output."""
    return torch.autograd.grad(layers[name](x), [x, *layers[name].parameters()], grad)


def train_step() -> None:
    torch.manual_seed(0)
    first, x, target = nn.Linear(5, 4), torch.randn(8, 5), torch.randn(8, 3)
    rpc.rpc_sync("worker1", build, args=("second", 1))

    # Received tensors are leaves that keep requires_grad: `output` here, `x` of backward() there.
    hidden = first(x)
    output = rpc.rpc_sync("worker1", forward, args=("second", hidden))
    loss = nn.functional.mse_loss(output, target)
    (grad_output,) = torch.autograd.grad(loss, output)
    grad_hidden, *grads_there = rpc.rpc_sync("worker1", backward, args=("second", hidden, grad_output))
    grads_here = torch.autograd.grad(hidden, list(first.parameters()), grad_hidden)

    # The same model in this process alone.
    build("second", 1)
    second = layers["second"]
    loss_alone = nn.functional.mse_loss(second(first(x)), target)
    expected = torch.autograd.grad(loss_alone, [*first.parameters(), *second.parameters()])

    for found, alone in zip((*grads_here, *grads_there), expected, strict=True):
        assert torch.allclose(found, alone), (found, alone)
    print(f"loss {loss:.4f}; all {len(expected)} gradients equal those of one process")


if __name__ == "__main__":
    rpc.init_rpc()
    if rpc.get_worker_info().name == "worker0":
        train_step()
    rpc.shutdown()
