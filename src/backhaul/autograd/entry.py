"""Checks the arguments of backward, and turns them into roots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from backhaul.autograd.contexts import current_context
from backhaul.errors import MisuseError, OptionError
from backhaul.refs.rref import RRef

Root = torch.Tensor | RRef[Any]


class Roots(NamedTuple):
    """The tensors at which a pass starts, and their gradients."""

    tensors: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]


def check_id(context_id: Any) -> int:
    """The id of a context as a plain int. Raises `TypeError` for other values."""
    if isinstance(context_id, torch.Tensor | RRef | list | tuple):
        raise TypeError(
            "incompatible function arguments: the context id is missing. Write backward(context_id, [loss]), with the "
            "id from `with context() as context_id`"
        )
    if isinstance(context_id, bool) or not isinstance(context_id, int):
        raise TypeError(
            f"incompatible function arguments: the context id must be an int, not a {type(context_id).__name__}"
        )
    return int(context_id)


def into_grad(accumulate: str) -> bool:
    if accumulate not in ("context", "grad"):
        raise OptionError(f'accumulate={accumulate!r} must be "context" or "grad"')
    return accumulate == "grad"


def fetch(roots: Any, context_id: int) -> list[torch.Tensor]:
    """The root tensors. References are fetched in the context."""
    found = []
    for root in _listed(roots):
        if isinstance(root, RRef):
            token = current_context.set(context_id)
            try:
                with torch.enable_grad():
                    root = root.to_here()
            finally:
                current_context.reset(token)
            require_tensor(root)
        found.append(root)
    return found


def require_tensor(value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        raise MisuseError(f"RRef should contain a tensor for .backward(), not a {type(value).__name__}")


def choose(roots: Sequence[torch.Tensor], grad_tensors: Any) -> Roots:
    """The roots that require grad, and their gradients. Raises `MisuseError` if backward cannot start from them."""
    if not roots:
        raise MisuseError("No tensors provided for gradient computation.")
    given = _gradients(roots, grad_tensors)
    tensors: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for number, (root, gradient) in enumerate(zip(roots, given, strict=True)):
        if not root.requires_grad:
            continue
        if gradient is None:
            if root.numel() != 1:
                raise MisuseError(
                    f"root {number}, of shape {tuple(root.shape)}, is not a scalar, all roots need to be scalar or to "
                    "have a gradient in grad_tensors"
                )
            if root.is_complex():
                raise MisuseError(
                    "grad can be implicitly created only for real scalar outputs but got "
                    f"{root.dtype}: give the gradient of root {number} in grad_tensors, or take root.abs() or root.real"
                )
            gradient = torch.ones_like(root, memory_format=torch.preserve_format)
        elif gradient.shape != root.shape:
            raise MisuseError(
                f"grad_tensors[{number}] has shape {tuple(gradient.shape)}, but its root has {tuple(root.shape)}"
            )
        else:
            # Torch may use a view of the gradient as a .grad, and add to that memory in the next pass.
            gradient = gradient.detach().clone()
        if root.grad_fn is None:
            raise MisuseError(
                f"root {number} does not have a valid gradient function: it is a leaf, not computed from anything"
            )
        tensors.append(root)
        gradients.append(gradient)
    if not tensors:
        raise MisuseError("requires_grad not set on root: none of the roots depends on a tensor that requires grad")
    return Roots(tensors, gradients)


def _listed(roots: Any) -> Sequence[Any]:
    if isinstance(roots, torch.Tensor | RRef):
        return [roots]
    if not isinstance(roots, list | tuple) or not all(isinstance(root, torch.Tensor | RRef) for root in roots):
        number = " A number, such as loss.item(), has no autograd graph: give the tensor itself"
        raise TypeError(
            "incompatible function arguments: roots must be a tensor, an RRef, or a list of them."
            + (number if any(map(_is_number, roots if isinstance(roots, list | tuple) else [roots])) else "")
        )
    return roots


def _is_number(root: Any) -> bool:
    return isinstance(root, int | float | complex)


def _gradients(roots: Sequence[torch.Tensor], given: Any) -> Sequence[torch.Tensor | None]:
    if given is None:
        return [None] * len(roots)
    if isinstance(given, torch.Tensor):
        given = [given]
    if not isinstance(given, list | tuple) or not all(g is None or isinstance(g, torch.Tensor) for g in given):
        raise TypeError("grad_tensors must be a tensor, or a list of tensors and None")
    if len(given) != len(roots):
        raise MisuseError(f"{len(given)} grad_tensors for {len(roots)} roots: give one for each root, or None")
    return given


def seconds(timeout: float | None) -> float:
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise OptionError(f"timeout {timeout!r} must be in seconds; None or 0 means no limit")
    return float(timeout) or math.inf
