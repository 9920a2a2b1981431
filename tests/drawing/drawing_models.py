"""The computations of workers in drawn contexts, and how drawings are read back."""

from __future__ import annotations

import itertools
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from backhaul import rpc
from backhaul.drawing.layout import Rect

PATIENCE = 10.0
SVG = "{http://www.w3.org/2000/svg}"


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(torch.relu(self.fc1(x)))
        return made


class Stops(torch.autograd.Function):
    """A Function whose backward waits until the test releases it, and may fail."""

    go_on = threading.Event()
    error: Exception | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert Stops.go_on.wait(PATIENCE)
        if Stops.error is not None:
            raise Stops.error
        return gradient


def double(x: Tensor) -> Tensor:
    return x * 2


@rpc.expose
def exposed_double(x: Tensor) -> Tensor:
    return x * 2


def stop(x: Tensor) -> Tensor:
    made: Tensor = Stops.apply(x * 3)
    return made.sin()


def on(worker: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call the next worker from there."""
    made: Tensor = rpc.rpc_sync(worker, function, args=(x,))
    return made


def pass_on(worker: str, x: Tensor) -> Tensor:
    """A chain: to another worker and back, with an operation in between."""
    return on(worker, double, x.tanh()).exp()


def diamond(worker: str, x: Tensor) -> Tensor:
    """The sent tensor is also used here: its gradient and that of the result must come together."""
    hidden = x.tanh()
    return hidden * 2 + on(worker, stop, hidden)


def deep(x: Tensor) -> Tensor:
    for _ in range(3400):
        x = (x * 1.0).sin() + x
    return x


def leaf(*shape: int) -> Tensor:
    return torch.ones(*shape, requires_grad=True)


def boxes(svg: str) -> list[Rect]:
    """The boxes of a drawing in Backhaul's own layout."""
    found = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [
        Rect(*(float(each.attrib[name]) for name in ("x", "y", "width", "height")))
        for each in found
        if each.get("class") == "item"
    ]


def overlapping(rects: list[Rect]) -> list[tuple[Rect, Rect]]:
    return [
        (a, b)
        for a, b in itertools.combinations(rects, 2)
        if a.x < b.right and b.x < a.right and a.y < b.bottom and b.y < a.bottom
    ]


def texts(svg: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]
