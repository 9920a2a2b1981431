"""The vocabulary of adversarial programs: tensor subclasses, Functions, modules, and notes of what happens.

The text of a program uses these names as a user's program would use its own. A `Place` is the state of a worker while a
program runs: its leaves and modules, and the notes that hooks and `see` make. The tests compare the notes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import register_multi_grad_hook
from torch.masked import MaskedTensor, as_masked_tensor
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from backhaul.eager import eager

SIZE = 4
MASK = torch.tensor([[True, False, True, True]] * SIZE)
OFFSETS = torch.tensor([0, 1, SIZE])


@contextmanager
def without_notices() -> Iterator[None]:
    """A block in which torch does not warn about its beta or deprecated features."""
    with warnings.catch_warnings():
        for text in (
            "The PyTorch API of MaskedTensors",
            "It is not recommended to create a MaskedTensor",
            "The PyTorch API of nested tensors",
            "Sparse (CSR|CSC|BSR|BSC) tensor support is in beta state",
            "The .grad attribute of a Tensor that is not a leaf",
            "Full backward hook is firing when gradients are computed",
            "None of the inputs have requires_grad=True",
            "Sparse invariant checks are implicitly disabled",
            "Dynamo does not know how to trace",
        ):
            warnings.filterwarnings("ignore", text, UserWarning)
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        yield


# What a worker has.


@dataclass
class Place:
    """What lives on one worker while a program runs."""

    things: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, tuple[str, Tensor | None]] = field(default_factory=dict)
    """By name: the kind of a tensor, and its values."""
    events: list[tuple[str, list[Tensor | None]]] = field(default_factory=list)
    """Each call of a hook: its name, and the gradients that it got."""
    watched: dict[str, Any] = field(default_factory=dict)
    """By the name of a hook: the graph node at which it is called, which gives the order that torch promises."""
    retained: dict[str, Tensor] = field(default_factory=dict)
    optimizer: Any = None


class _Here(threading.local):
    stack: tuple[Place, ...] = ()


_here = _Here()
_find: list[Callable[[], Place | None]] = []


@contextmanager
def standing(place: Place) -> Iterator[None]:
    """A block in which the calling thread is at this place, for programs that run in one process."""
    before, _here.stack = _here.stack, (*_here.stack, place)
    try:
        yield
    finally:
        _here.stack = before


def place_here() -> Place:
    if _here.stack:
        return _here.stack[-1]
    found = _find[0]() if _find else None
    assert found is not None, "no program runs on this worker"
    return found


@eager
def here(name: str) -> Any:
    """A leaf or a module of this worker."""
    return place_here().things[name]


def _copy(value: Any) -> Tensor | None:
    return value.detach().clone() if isinstance(value, Tensor) else None


@eager
def see(name: str, *values: Any) -> None:
    """Note these values the first time only, because a checkpoint may run the function again."""
    notes = place_here().seen
    for index, value in enumerate(values):
        if isinstance(value, Tensor):
            grad = value.requires_grad and torch.is_grad_enabled()
            kind = f"{type(value).__name__} {value.dtype} {value.layout} {'requires grad' if grad else ''}"
            notes.setdefault(f"{name}[{index}]", (kind, value.detach().clone()))


# Hooks. Each has a name; a tensor that requires no grad gets none.


def _noting(place: Place, name: str, change: float | None = None) -> Callable[..., Any]:
    def note(*values: Any) -> Any:
        given = values[-1] if isinstance(values[-1], tuple | list) else values[-1:]
        place.events.append((name, [_copy(each) for each in given]))
        if change is None:
            return None
        changed = [None if each is None else each * change for each in given]
        return tuple(changed) if isinstance(values[-1], tuple | list) else changed[0]

    return note


# Nor does a leaf, which has its hooks from the start: a function that a checkpoint runs again would add more.


@eager
def hook(name: str, tensor: Any, change: float | None = None) -> None:
    if isinstance(tensor, Tensor) and not tensor.is_leaf:
        place = place_here()
        place.watched[name] = torch.autograd.graph.get_gradient_edge(tensor).node
        tensor.register_hook(_noting(place, name, change))  # type: ignore[no-untyped-call]


@eager
def retain(name: str, tensor: Any) -> None:
    if isinstance(tensor, Tensor) and not tensor.is_leaf:
        tensor.retain_grad()
        place_here().retained[name] = tensor


@eager
def node_prehook(name: str, tensor: Any, change: float | None = None) -> None:
    """A hook on the node of a tensor, which sees its gradient and may change it."""
    if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
        tensor.grad_fn.register_prehook(_noting(place_here(), name, change))


@eager
def node_hook(name: str, tensor: Any) -> None:
    """A hook after the node. It notes the gradients that came to the node."""
    if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
        note = _noting(place_here(), name)
        tensor.grad_fn.register_hook(lambda _, outputs: note(outputs))


@eager
def multi_hook(name: str, mode: str, *tensors: Tensor) -> None:
    mode, _, block = mode.partition(" in ")
    found = [each for each in tensors if each.requires_grad and (block == "main" or not each.is_leaf)]
    if found:
        place = place_here()
        if mode == "all":
            register_multi_grad_hook(found, lambda grads: _noting(place, name)(list(grads)))
        else:  # the order of its tensors is not defined
            register_multi_grad_hook(found, lambda _: place.events.append((name, [])), mode="any")


def hook_leaf(place: Place, name: str, leaf: Tensor, flags: Sequence[str]) -> None:
    """The hooks that a leaf has from the start."""
    for flag in flags:
        label = f"{flag} of {name}"
        if flag == "hook":
            place.watched[label] = torch.autograd.graph.get_gradient_edge(leaf).node
            leaf.register_hook(_noting(place, label))  # type: ignore[no-untyped-call]
        elif flag == "halving hook":
            leaf.register_hook(_noting(place, label, 0.5))  # type: ignore[no-untyped-call]
        elif flag == "post-accumulate hook":
            note = _noting(place, label)
            leaf.register_post_accumulate_grad_hook(lambda leaf, note=note: note(leaf.grad))  # type: ignore[no-untyped-call, misc]
        elif flag in ("accumulate prehook", "accumulate halving prehook", "accumulate hook"):
            node = torch.autograd.graph.get_gradient_edge(leaf).node
            place.things[f"node of {name}"] = node  # otherwise torch frees the node with its hooks
            if flag == "accumulate hook":
                after = _noting(place, label)
                node.register_hook(lambda _, outputs, after=after: after(outputs))  # type: ignore[misc]
            else:
                node.register_prehook(_noting(place, label, 0.5 if "halving" in flag else None))
        elif flag == "multi-grad hook":
            place.things.setdefault("multi-grad", []).append(leaf)


# Tensor subclasses.


class Labelled(Tensor):
    """A plain subclass."""


class Weight(nn.Parameter):
    """A Parameter subclass."""


class Pair(Tensor):
    """A wrapper around two tensors of one shape, and a scale. Each operation applies to both tensors."""

    first: Tensor
    second: Tensor
    scale: float

    @staticmethod
    def __new__(cls, first: Tensor, second: Tensor, scale: float) -> Pair:
        made = torch.Tensor._make_wrapper_subclass(
            cls, first.shape, strides=first.stride(), dtype=first.dtype, device=first.device
        )
        made.first, made.second, made.scale = first, second, scale
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["first", "second"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scale: float, size: Any, stride: Any) -> Pair:
        return Pair(inner["first"], inner["second"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scales = [each.scale for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Pair)]
        one = func(*pytree.tree_map_only(Pair, lambda pair: pair.first, args), **(kwargs or {}))
        other = func(*pytree.tree_map_only(Pair, lambda pair: pair.second, args), **(kwargs or {}))
        return pytree.tree_map(lambda a, b: Pair(a, b, scales[0]) if isinstance(a, Tensor) else a, one, other)


class Both(torch.autograd.Function):
    """A tensor and its half as a Pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Pair(x.detach(), x.detach() / 2, 3.0)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.first + gradient.second / 2


class Joined(torch.autograd.Function):
    """One tensor of a Pair."""

    @staticmethod
    def forward(ctx: Any, pair: Any) -> Tensor:
        ctx.scale = pair.scale
        return pair.first - pair.second / pair.scale  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Pair(gradient.clone(), -gradient / ctx.scale, ctx.scale)


def pair_of(x: Tensor) -> Any:
    return Both.apply(x)  # type: ignore[no-untyped-call]


def joined(pair: Any) -> Any:
    return Joined.apply(pair)  # type: ignore[no-untyped-call]


def labelled(x: Tensor) -> Any:
    return x.as_subclass(Labelled)


def unlabelled(x: Tensor) -> Any:
    return x.as_subclass(Tensor)


def jagged(x: Tensor) -> Any:
    return torch.nested.nested_tensor_from_jagged(x, OFFSETS)


class Plainly(torch.autograd.Function):
    """The identity, with a plain tensor as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.to_tensor(0.0) if isinstance(gradient, MaskedTensor) else gradient


def masked(x: Tensor) -> Any:
    return as_masked_tensor(Plainly.apply(x), MASK)  # type: ignore[no-untyped-call]


def masked_bare(x: Tensor) -> Any:
    """The gradient of its input is a MaskedTensor, which few torch operations support."""
    return as_masked_tensor(x, MASK)


def unmasked(x: MaskedTensor) -> Any:
    return x.to_tensor(0.0)


# Functions.


class Saving(torch.autograd.Function):
    """A Function with ``setup_context``, an input that needs no gradient, and one that gets none."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, power: int) -> Tensor:
        return torch.tanh(x) * y.detach() ** power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, y, ctx.power = inputs
        ctx.save_for_backward(x, y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradient * (1 - torch.tanh(x) ** 2) * y**ctx.power, None, None


class Dirty(torch.autograd.Function):
    """Halves its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.div_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class Ranked(torch.autograd.Function):
    """Returns sorted values, and their places, which have no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.sort(dim=1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        (places,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(1, places, gradient)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.sin(x)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.cos(x)


class Halves(torch.autograd.Function):
    """Two outputs; the gradient of one that is not used is None, not zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x / 2, torch.sin(x)

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, other: Tensor | None) -> Tensor | None:
        if one is None and other is None:
            return None
        return (0 if one is None else one) + (0 if other is None else other / 3)  # type: ignore[return-value]


class Straight(torch.autograd.Function):
    """Rounds. Its gradient passes through unchanged, as the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x, decimals=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def saving(x: Tensor, y: Tensor) -> Any:
    return Saving.apply(x, y, 2)  # type: ignore[no-untyped-call]


def dirty(x: Tensor) -> Any:
    return Dirty.apply(x * 1)  # type: ignore[no-untyped-call]


def ranked(x: Tensor) -> Any:
    return Ranked.apply(x)[0]  # type: ignore[no-untyped-call]


def once(x: Tensor) -> Any:
    return Once.apply(x)  # type: ignore[no-untyped-call]


def halves(x: Tensor) -> Any:
    return Halves.apply(x)  # type: ignore[no-untyped-call]


def straight(x: Tensor) -> Any:
    return Straight.apply(x)  # type: ignore[no-untyped-call]


def times(a: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(a @ b.to(a.dtype))


def to_complex(a: Tensor, b: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return torch.complex(a.to(wide), b.to(wide))


def embedded(table: Tensor, number: int, sparse: bool) -> Tensor:
    places = torch.tensor([number % 5, (number * 3 + 1) % 5, 2, number % 5])
    return functional.embedding(places, table, sparse=sparse)


def dropped(x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return functional.dropout(x, 0.4)


def spread(x: Tensor, row: int) -> Tensor:
    """A row, repeated for all rows, without memory of its own."""
    return x[row].expand(SIZE, SIZE)


def nothing_of(x: Tensor) -> Tensor:
    """A tensor without elements."""
    return x[:0] * 2


def with_nothing(x: Tensor, empty: Tensor) -> Tensor:
    return torch.cat([empty.to(x.dtype), x]) + empty.sum()


def written(x: Tensor, y: Tensor) -> Tensor:
    """Changes a part in place."""
    made = x * 1
    made[1:3].mul_(y[1:3].to(made.dtype))
    made.t().add_(y.t().to(made.dtype))
    return made


def total(*values: Tensor) -> Tensor:
    return sum((torch.sin(each.double()).sum() for each in values), torch.zeros((), dtype=torch.float64))


# Modes that wrap every operation.


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Through(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def packed() -> Any:
    """Saved tensors are packed as another object."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: (x.detach().clone(),), lambda kept: kept[0])


# Modules. A seed determines their weights.


class Skew(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() - x.triu(1).t() / 2


class Tied(nn.Module):
    """Two layers with one weight, a buffer that counts, and a weight that is not trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE, dtype=dtype)
        self.second = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(SIZE, dtype=dtype), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator]
        return torch.tanh(self.second(self.first(x.to(self.first.weight.dtype))) * self.frozen)


class Plain(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.to(self.inner.weight.dtype)))


class Normed(Plain):
    """With running statistics."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.norm = nn.BatchNorm1d(SIZE, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(super().forward(x).to(self.inner.weight.dtype)))


class Skewed(Plain):
    """A parametrized weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        parametrize.register_parametrization(self.inner, "weight", Skew())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.to(self.inner.bias.dtype)))


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Listening(Plain):
    """With full backward hooks, before and after."""

    name = "module"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.inner.register_full_backward_pre_hook(self._before)
        self.inner.register_full_backward_hook(self._after)

    def _before(self, module: nn.Module, outputs: Any) -> None:
        self.place.events.append((f"backward pre hook of {self.name}", [_copy(each) for each in outputs]))

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        given = [_copy(each) for each in (*inputs, *outputs)]
        self.place.events.append((f"backward hook of {self.name}", given))

    def forward(self, x: Tensor) -> Tensor:
        if "place" not in vars(self):
            vars(self)["place"] = place_here()
        return super().forward(x)


MODULES: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "plain": Plain,
    "tied": Tied,
    "normed": Normed,
    "skewed": Skewed,
    "checkpointed": Checkpointed,
    "listening": Listening,
}
