"""Edge: what a worker does to all that it sends to a peer, as the user writes it. Pure; no torch, for the launcher.

An edge has two directions of its own: values (arguments, results, fetched references) and gradients. Each has a chain
of transforms, applied in their order. `crossing` applies them.
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

    It gets a tensor of floating-point numbers and returns one of the same shape and dtype. Torch's autograd sees what
    it does to values, so the gradient that comes back is that of the transformed tensor.
    """

    norm: float | None = None
    """The norm that each row, or the tensor, has afterwards at the most, if this is what it does."""
    multiplier: float | None = None
    """The standard deviation of the noise that is added, as a multiple of that norm."""
    feedback: bool = False
    """Whether it keeps what it took away, and adds that to the next tensor."""

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge:
    """What happens to tensors on their way to a peer: an entry of ``RpcOptions(edges={"bank": Edge(...)})``.

    - ``on_send``: what is applied to tensors in arguments and results of calls, and to fetched values of references.
    - ``on_gradient``: what is applied to the gradients that backward passes send to that peer.
    - ``passes``: what goes over an edge with ``on_send`` as it is: dtypes such as ``torch.int64`` for tensors, and
      ``float``, ``complex`` and ``bytes`` for plain values. Everything else of these kinds is refused.

    A chain is a list of `Transform` or of functions from tensor to tensor. An empty one lets everything leave as it is;
    there is no default, so that neither direction is left open by mistake.
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
                f"passes: {passes!r} must be a list of dtypes of torch, and of float, complex and bytes, for what may "
                "leave as it is"
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
                    f"{name}: GaussianNoise(multiplier) scales its noise with the norm that a Clip leaves: put a Clip "
                    "right before it, or give std"
                )
            if feeds:
                raise OptionError(
                    f"{name}: feedback before GaussianNoise would carry one batch into the noise of the next, and no "
                    "accounting of privacy holds then: compress after the noise"
                )
        feeds = feeds or getattr(each, "feedback", False)
        before = each
    return tuple(given)


def check_edges(value: Any) -> dict[str, Edge] | None:
    """The option ``edges``. Raises `OptionError`."""
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
    """The edge to a peer: that of its name, or else of the first pattern that it matches; ``*`` stands for any text."""
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
