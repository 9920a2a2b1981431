"""Tensor subclasses <-> trees: their inner tensors travel, with their autograd history.

An instance is rebuilt at the receiver from plain tensors, which travel like all others:

- A *plain* subclass (``tensor.as_subclass(cls)``) is a tensor with another class and perhaps attributes.
- A *wrapper* is made of inner tensors, which ``__tensor_flatten__`` names. Autograd knows the wrapper and not the inner
  tensors. So `_Unwrap` connects the wrapper to those inner tensors that have gradients, and at the receiver `_Wrap`
  connects these to the new wrapper. The gradient of a wrapper is a wrapper of the same kind, so it travels back as its
  inner tensors, too. `MaskedTensor` is treated as a wrapper although it has no ``__tensor_flatten__``.
- A `DTensor` is one process's part of a tensor that several processes hold: see `shards`.
- An `AsyncCollectiveTensor` is a tensor that is not complete yet. The sender waits for it and sends the complete one.

Any other subclass is pickled and loses its history: `Packing.unrecorded` then names it.

Aliases and inner tensors are always made with grad mode on, so that they require grad if the subclass does. Later code
decides for every tensor whether it is recorded, arrives as a leaf or is detached.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from backhaul.errors import MisuseError, ProtocolError, UnsendableError
from backhaul.wire import shards, trees
from backhaul.wire.trees import Lift, Lower, Packing, Refusal, Unpacking, check_arity, malformed

_NO_DISPATCH = torch.Tensor.__torch_dispatch__
_PICKLED_ITS_OWN_WAY = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__deepcopy__")

# How a subclass travels: the item after the number in its tree. `shards.HOW` is 2.
_PLAIN, _PARTS = range(2)

_FOR_A_FEDERATION = (
    "a tensor subclass does not go to a worker of a federation, which would have to run code of its class: send a "
    "plain tensor, such as tensor.as_subclass(torch.Tensor), or the tensors it is made of"
)


def _loaded(module: str, name: str) -> type | None:
    """A class of torch; None if its module is not imported, since then there are no instances."""
    found: type | None = getattr(sys.modules.get(module), name, None)
    return found


def _is(kind: type, module: str, name: str) -> bool:
    other = _loaded(module, name)
    return other is not None and issubclass(kind, other)


def _is_awaited(kind: type) -> bool:
    return _is(kind, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")


def _is_masked(kind: type) -> bool:
    return _is(kind, "torch.masked.maskedtensor.core", "MaskedTensor")


def _is_wrapper(kind: type) -> bool:
    return _is_masked(kind) or (hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__"))


def _is_plain(kind: type) -> bool:
    """Whether a class adds only methods and attributes to a tensor that has its own memory."""
    return (
        kind.__torch_dispatch__ is _NO_DISPATCH  # type: ignore[attr-defined]
        and all(getattr(kind, name, None) is getattr(_base(kind), name, None) for name in _PICKLED_ITS_OWN_WAY)
        and not copyreg._slotnames(kind)  # type: ignore[attr-defined]
    )


def _base(kind: type) -> type:
    return Parameter if issubclass(kind, Parameter) else torch.Tensor


def lowerer(kind: type) -> Lower | None:
    """How to lower the instances of a tensor subclass; None for any other class."""
    if not issubclass(kind, torch.Tensor):
        return None
    if _is_awaited(kind):
        return _lower_awaited
    if _is(kind, "torch.distributed.tensor", "DTensor"):
        return _lower_shard
    if _is_wrapper(kind):
        return _lower_wrapper
    return _lower_plain if _is_plain(kind) else _lower_opaque


def plain(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a plain tensor. Raises `UnsendableError` if its class is more than a plain subclass."""
    kind = type(gradient)
    if kind is torch.Tensor or kind is Parameter:
        return gradient
    if _is_awaited(kind):
        return gradient.clone()
    if not _is_plain(kind):
        raise UnsendableError(
            f"the gradient of a tensor from another worker is a {kind.__qualname__}, and what came was a plain tensor: "
            "have the function that makes this gradient return a plain tensor"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.as_subclass(torch.Tensor)


def _name(kind: type, packing: Packing) -> str:
    try:
        return packing.names.name_of(kind)
    except UnsendableError as error:
        raise Refusal(str(error)) from error


def _class(name: Any, unpacking: Unpacking) -> Any:
    found = unpacking.find(name)
    if not isinstance(found, type) or not issubclass(found, torch.Tensor):
        malformed("a class of tensors", name)
    return found


def _lower_awaited(value: Any, packing: Packing) -> Any:
    known = packing.known(value)
    if known is not None:
        return known
    with torch.enable_grad():
        complete = value.clone()  # waits, and is a plain tensor
    return packing.remember(value, packing.lower(complete))


def _lower_opaque(value: torch.Tensor, packing: Packing) -> Any:
    if value.requires_grad:
        packing.unrecorded = type(value).__qualname__
    return packing.lower_unknown(value, _FOR_A_FEDERATION)


def _lower_plain(value: torch.Tensor, packing: Packing) -> Any:
    known = packing.known(value)
    if known is not None:
        return known
    if packing.bounds:
        raise Refusal(_FOR_A_FEDERATION)
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        tensor = value.as_subclass(torch.Tensor)
    number = packing.remember(value)
    return [
        trees.SUBCLASS,
        number,
        _PLAIN,
        _name(type(value), packing),
        packing.lower_part(tensor, ""),
        packing.lower_part(dict(vars(value)), ".__dict__"),
    ]


def _lift_plain(tree: list[Any], unpacking: Unpacking) -> torch.Tensor:
    check_arity(tree, 5)
    kind = _class(tree[3], unpacking)
    tensor = _plain_tensor(unpacking.lift(tree[4]))
    attributes = unpacking.lift(tree[5])
    if not _is_plain(kind) or type(attributes) is not dict:
        malformed("a plain subclass of tensors", tree[3])
    if tensor.grad_fn is None:
        made: torch.Tensor = torch.Tensor._make_subclass(kind, tensor.data, tensor.requires_grad)
    elif issubclass(
        kind, Parameter
    ):  # it was recorded: as a Parameter itself, it arrives as a tensor that was computed
        return tensor
    else:
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            made = tensor.as_subclass(kind)
    vars(made).update(attributes)
    return made


def _plain_tensor(value: Any) -> torch.Tensor:
    if type(value) is not torch.Tensor:
        malformed("a tensor", type(value))
    return value


def _lower_shard(value: Any, packing: Packing) -> Any:
    if packing.bounds:
        raise Refusal(_FOR_A_FEDERATION)
    return packing.known(value) or shards.lower(value, packing)


# Wrappers.


def _flatten(value: Any) -> tuple[Sequence[str], Any]:
    """The names of the attributes that hold a wrapper's inner tensors, and the rest of its state."""
    if _is_masked(type(value)):
        return ("_masked_data", "_masked_mask"), None
    names, context = value.__tensor_flatten__()
    return names, context


def _has_gradient(part: torch.Tensor) -> bool:
    return part.is_floating_point() or part.is_complex()


class _Form(NamedTuple):
    """All parts of a wrapper except the inner tensors that have gradients."""

    kind: Any
    context: Any
    size: Any
    stride: Any
    others: Mapping[str, torch.Tensor]
    names: Sequence[str]
    """The names of the inner tensors that have gradients."""

    def build(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A wrapper that requires no grad."""
        inner = {**self.others, **{name: part.detach() for name, part in zip(self.names, parts, strict=True)}}
        if _is_masked(self.kind):
            return self.kind(inner["_masked_data"], inner["_masked_mask"])  # type: ignore[no-any-return]
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, self.size, self.stride)
        return made.detach() if made.requires_grad else made


class _Unwrap(torch.autograd.Function):
    """The inner tensors of a wrapper, with its history."""

    @staticmethod
    def forward(ctx: Any, wrapper: torch.Tensor, form: _Form) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.form = form
        return tuple(getattr(wrapper, name).detach() for name in form.names)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        present = next((each for each in gradients if each is not None), None)
        if present is None:
            return None, None
        if None in gradients:  # cannot happen with `_Wrap`, which makes all of them together
            raise MisuseError(f"only some inner tensors of a {ctx.form.kind.__qualname__} have gradients")
        return ctx.form.build(gradients), None


class _Wrap(torch.autograd.Function):
    """A wrapper around received inner tensors, with their history."""

    @staticmethod
    def forward(ctx: Any, form: _Form, *parts: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.form = form
        return form.build(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        form: _Form = ctx.form
        if gradient is None:
            return None, *[None] * len(form.names)
        if type(gradient) is not form.kind:
            raise MisuseError(
                f"the gradient of a {form.kind.__qualname__} from another worker is a {type(gradient).__qualname__}, "
                "which lacks the inner tensors of the first class: send a plain tensor, and wrap it there"
            )
        inner = [getattr(gradient, name) for name in form.names]
        if _is_masked(form.kind):
            _check_mask(form.others["_masked_mask"], gradient)
        return None, *inner


def _check_mask(mask: torch.Tensor, gradient: Any) -> None:
    found = gradient._masked_mask
    if mask.layout is torch.strided and not (found.layout is mask.layout and torch.equal(found, mask)):
        raise MisuseError("the gradient of a MaskedTensor from another worker has another mask than the tensor")


def _lower_wrapper(value: torch.Tensor, packing: Packing) -> Any:
    known = packing.known(value)
    if known is not None:
        return known
    if packing.bounds:
        raise Refusal(_FOR_A_FEDERATION)
    kind = type(value)
    names, context = _flatten(value)
    parts = {name: getattr(value, name) for name in names}
    with_gradient = [name for name in names if _has_gradient(parts[name])]
    if value.requires_grad and not with_gradient:
        return _lower_opaque(value, packing)
    if value.requires_grad:
        others = {name: part for name, part in parts.items() if name not in with_gradient}
        form = _Form(kind, context, value.size(), value.stride(), others, with_gradient)
        with torch.enable_grad():
            used = shards.first_use(value)
            parts.update(zip(with_gradient, _Unwrap.apply(value, form), strict=True))  # type: ignore[no-untyped-call]
            del used
    number = packing.remember(value)
    tree: list[Any] = [
        trees.SUBCLASS,
        number,
        _PARTS,
        _name(kind, packing),
        value.requires_grad,
        isinstance(value, Parameter),
        packing.lower_part(context, ".__tensor_flatten__()"),
        packing.lower_part(None if _is_masked(kind) else _known_shape(value), ".shape"),
    ]
    for name, part in parts.items():
        tree += [name, packing.lower_part(part, f".{name}")]
    return tree


def _known_shape(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Size and stride; None if they are symbolic. Those of a jagged tensor are: it derives them from its offsets."""
    size, stride = tuple(value.size()), tuple(value.stride())
    return (size, stride) if all(type(each) is int for each in (*size, *stride)) else None


def _lift_wrapper(tree: list[Any], unpacking: Unpacking) -> torch.Tensor:
    if len(tree) < 8:
        malformed("a tensor subclass", tree[1:3])
    kind = _class(tree[3], unpacking)
    requires_grad, is_parameter = tree[4:6]
    context, shape = unpacking.lift(tree[6]), unpacking.lift(tree[7])
    names, parts = tree[8::2], [unpacking.lift(part) for part in tree[9::2]]
    inner = dict(zip(names, parts, strict=True))
    if not _is_wrapper(kind) or not all(isinstance(part, torch.Tensor) for part in parts):
        malformed("a tensor subclass", tree[3])
    with_gradient = [name for name in names if requires_grad and _has_gradient(inner[name])]
    others = {name: part for name, part in inner.items() if name not in with_gradient}
    given = [inner[name] for name in with_gradient]
    size, stride = (None, None) if shape is None else (torch.Size(shape[0]), tuple(shape[1]))
    form = _Form(kind, context, size, stride, others, with_gradient)
    if any(part.grad_fn is not None for part in given):
        with torch.enable_grad():
            made: torch.Tensor = _Wrap.apply(form, *given)  # type: ignore[no-untyped-call]
        return made
    made = form.build(given)
    needs_grad = any(part.requires_grad for part in given)
    return Parameter(made, needs_grad) if is_parameter else made.requires_grad_(needs_grad)


_HOW = {_PLAIN: _lift_plain, _PARTS: _lift_wrapper, shards.HOW: shards.lift}


def _lift(tree: list[Any], unpacking: Unpacking) -> Any:
    if unpacking.bounds:
        raise ProtocolError("a tensor subclass, from a peer that may not send any")
    if len(tree) < 2 or type(tree[1]) is not int:
        malformed("a tensor subclass", tree[1:2])
    if len(tree) == 2:
        return unpacking.recall(tree[1])
    lift = _HOW.get(tree[2])
    if lift is None:
        malformed("a tensor subclass", tree[2])
    return unpacking.keep(tree[1], lift(tree, unpacking))


LIFT: dict[int, Lift] = {trees.SUBCLASS: _lift}
