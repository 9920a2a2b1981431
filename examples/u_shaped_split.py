"""U-shaped split learning: the client keeps its data, its labels, and both ends of the model.

    client (this process)                        server
    ┌────────────────────┐                       ┌──────────┐
    │ images ──► first ──┼────── features ─────► │          │
    │                    │                       │  middle  │
    │ labels ──► loss ◄── last ◄── features ──── │          │
    └────────────────────┘                       └──────────┘

Only the outputs of the first and the middle part, and their gradients, cross the line. The server records what it
receives. No raw data leaves the client, but the features are not secret, because they are computed from the data.

At the end the program compares the trained model with the same model, trained in one process.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import backhaul
import backhaul.autograd as dist_autograd
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer

STEPS, BATCH, CLASSES, SIZE = 80, 32, 4, 12

torch.set_num_threads(1)  # the processes share the cores, and sums are made in the same order in each


class Middle(nn.Module):
    """The server's part. It records the shape and type of everything that it receives."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)
        )
        self.received: set[tuple[torch.Size, torch.dtype]] = set()

    def forward(self, features: Tensor) -> Tensor:
        self.received.add((features.shape, features.dtype))
        return self.layers(features)  # type: ignore[no-any-return]

    def what_came(self) -> set[tuple[torch.Size, torch.dtype]]:
        return self.received


class Model(nn.Module):
    """The whole model. ``middle`` is a local `Middle`, or a `RemoteModule` that stands for a remote one."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.middle = middle
        self.last = nn.Sequential(nn.Flatten(), nn.Linear(16 * (SIZE // 4) ** 2, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.last(self.middle(self.first(images)))  # type: ignore[no-any-return]


def make_data(count: int) -> tuple[Tensor, Tensor]:
    """Noisy images of stripes: horizontal, vertical, and along both diagonals."""
    torch.manual_seed(2)
    labels = torch.randint(CLASSES, (count,))
    down, across = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    directions = torch.stack([down, across, down + across, down - across])
    phase = 6.3 * torch.rand(count, 1, 1)
    stripes = torch.sin(1.5 * directions[labels] + phase)
    return (stripes + 0.8 * torch.randn(count, SIZE, SIZE)).unsqueeze(1), labels


def batch(step: int, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % len(images)
    return images[chosen], labels[chosen]


def train_split(model: Model, images: Tensor, labels: Tensor) -> None:
    optimizer = DistributedOptimizer(torch.optim.Adam, parameter_rrefs(model), lr=0.003)
    for step in range(STEPS):
        x, y = batch(step, images, labels)
        with dist_autograd.context() as context_id:
            scores = model(x)
            loss = cross_entropy(scores, y)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)  # each parameter on its own worker
        if step % 10 == 9:
            right = (scores.argmax(dim=1) == y).float().mean()
            print(f"step {step + 1:3}   loss {loss.item():.4f}   {right:4.0%} right", flush=True)


def train_alone(model: Model, images: Tensor, labels: Tensor) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step in range(STEPS):
        x, y = batch(step, images, labels)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> int:
    images, labels = make_data(640)
    with backhaul.cluster(1, name="client", names=["server"]):
        middle = RemoteModule("server", Middle)
        model = Model(middle)
        train_split(model, images, labels)
        trained = model.state_dict()  # includes the server's part, under the names of one process
        received = middle.get_module_rref().rpc_sync().what_came()

    print(f"the client has        images {tuple(images.shape[1:])}, labels {labels.dtype}")
    for shape, dtype in received:
        print(f"the server was given  features {tuple(shape[1:])}, {dtype}")
    if received != {((BATCH, 8, SIZE // 2, SIZE // 2), torch.float32)}:
        print("✗ the server was given something else than features")
        return 1

    alone = Model(Middle())
    train_alone(alone, images, labels)
    differ = [name for name, value in alone.state_dict().items() if not torch.equal(trained[name], value)]
    if differ:
        print(f"✗ not as in one process: {', '.join(differ)}")
        return 1
    print(f"✓ all {len(trained)} tensors of the trained model are, bit by bit, those of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main())
