"""Edge: the user's description of what a worker does to everything that it sends to a peer.

Pure, and without torch, because the launcher imports it. An edge treats values (arguments, results, fetched references)
and gradients separately. Each has a chain of transforms, which `crossing` applies in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from backhaul.errors import OptionError

if TYPE_CHECKING:
    import torch

    Chain = Sequence["Transform | Callable[[torch.Tensor], torch.Tensor]"]


class Transform:
    """Changes each tensor that leaves over an edge. A subclass defines ``__call__``.

    ``__call__`` takes a floating-point tensor and returns a tensor of the same shape and dtype. Torch's autograd
    records what it does to values, so the gradient that comes back is that of the transformed tensor.
    """

    norm: float | None = None
    """For a transform that bounds norms: the largest norm that a row, or the tensor, has afterwards."""
    multiplier: float | None = None
    """For a transform that adds noise: its standard deviation, as a multiple of that norm."""
    feedback: bool = False
    """Whether it keeps what it removes, and adds that to the next tensor."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """The transforms of tensors on their way to a peer: an entry of ``RpcOptions(edges={"bank": Edge(...)})``.

    - ``on_send``: the chain for tensors in arguments and results of calls, and for fetched values of references.
    - ``on_gradient``: the chain for the gradients that backward passes send to that peer.
    - ``passes``: what an edge with ``on_send`` lets pass unchanged: dtypes such as ``torch.int64`` for tensors, and
      ``float``, ``complex`` and ``bytes`` for plain values. All other tensors and values of these kinds are refused.

    A chain is a list of `Transform`s, or of functions from tensor to tensor. An empty chain lets everything leave
    unchanged. There is no default, so that neither direction is left open by mistake.
    """

    on_send: Chain
    on_gradient: Chain
    passes: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("on_send", "on_gradient"):
            object.__setattr__(self, name, _chain(name, getattr(self, name)))
        passes = self.passes
        if isinstance(passes, str) or not isinstance(passes, Sequence) or not all(map(_may_pass, passes)):
            raise OptionError(
                f"passes: {passes!r} must be a list of torch dtypes, float, complex and bytes: the kinds that may "
                "leave unchanged"
            )
        object.__setattr__(self, "passes", tuple(passes))


def _may_pass(kind: Any) -> bool:
    return kind in (float, complex, bytes) or (type(kind).__module__ == "torch" and type(kind).__name__ == "dtype")


def _chain(name: str, given: Any) -> tuple[Any, ...]:
    if not isinstance(given, list | tuple) or not all(callable(each) and not isinstance(each, type) for each in given):
        raise OptionError(
            f"{name}: {given!r} must be a list of transforms, as in [Clip(1.0), GaussianNoise(0.5)], or []"
        )
    feeds = False
    before: Any = None
    for each in given:
        if getattr(each, "multiplier", None) is not None:
            if getattr(before, "norm", None) is None:
                raise OptionError(
                    f"{name}: GaussianNoise(multiplier) scales its noise with the norm of a Clip: put a Clip right "
                    "before it, or give std"
                )
            if feeds:
                raise OptionError(
                    f"{name}: feedback before GaussianNoise would carry one batch into the next, and epsilon would no "
                    "longer hold: compress after the noise"
                )
        feeds = feeds or getattr(each, "feedback", False)
        before = each
    return tuple(given)


def check_edges(value: Any) -> dict[str, Edge] | None:
    """The option ``edges`` as a dict. Raises `OptionError` for other values."""
    if value is None:
        return None
    if (
        not isinstance(value, Mapping)
        or not all(isinstance(name, str) and name for name in value)
        or not all(isinstance(edge, Edge) for edge in value.values())
    ):
        raise OptionError("must be a dict of edges by the names of peers, as in {'bank': Edge(...), '*': Edge(...)}")
    return dict(value)


def edge_to(peer: str, edges: Mapping[str, Edge]) -> Edge | None:
    """The edge for a peer's name, or for the first pattern that matches the name. ``*`` stands for any text."""
    found = edges.get(peer)
    if found is not None:
        return found
    return next((edge for pattern, edge in edges.items() if "*" in pattern and _matches(peer, pattern)), None)


def _matches(name: str, pattern: str) -> bool:
    first, *middle, last = pattern.split("*")
    if not name.startswith(first):
        return False
    place = len(first)
    for part in middle:
        found = name.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return len(name) - place >= len(last) and name.endswith(last)
