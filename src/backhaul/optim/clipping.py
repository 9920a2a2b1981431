"""Clipping the gradients of a model by their common norm, wherever its parameters live."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from backhaul.errors import BackhaulError
from backhaul.ids import WorkerInfo
from backhaul.optim import gradients
from backhaul.optim.claims import claims
from backhaul.optim.distributed import DistributedOptimizer
from backhaul.optim.groups import rrefs_from
from backhaul.optim.local import LocalOptimizer
from backhaul.optim.parties import parted, refuse
from backhaul.refs.rref import RRef
from backhaul.spread import Work, spread

Holder = list[RRef[torch.Tensor]] | RRef[LocalOptimizer]
"""How a call names parameters to their worker: references to them, or one to the optimizer that has them."""


@torch.no_grad()
def clip_grad_norm_(
    context_id: int | None,
    params_rref: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale the gradients of an autograd context so that their norm is at most ``max_norm``. Returns the old norm.

    - ``context_id``: the context; None means ``.grad``.
    - ``params_rref``: references to parameters, or parameters of this worker. Their norms are combined in this order,
      so the result equals that of ``torch.nn.utils.clip_grad_norm_`` for the same parameters in one process. A
      `DistributedOptimizer` stands for all of its parameters. It is cheaper, since one reference for each worker is
      sent.
    - ``norm_type``: the order of the norm; ``math.inf`` means the largest absolute value.
    - ``error_if_nonfinite``: raise `BackhaulError` for a norm that is infinite or NaN, and scale nothing.

    Gradients of a context are replaced by scaled copies; ``.grad`` is changed in place. The norm of a sparse gradient
    is that of its coalesced values. Raises `PartialError` if some workers have failed.
    """
    gradients.require(context_id)
    max_norm, norm_type = float(max_norm), float(norm_type)
    on, places = _placed(params_rref)

    work: dict[WorkerInfo, Work] = {worker: (norms, (holder, context_id, norm_type)) for worker, holder in on.items()}
    found: list[torch.Tensor | None] = [None] * sum(map(len, places.values()))
    for worker, by_type in spread("clipping gradients (their norms)", work).items():
        for mine, values in by_type:
            for place, value in zip(mine, values if isinstance(values, list) else values.unbind(), strict=True):
                found[places[worker][place]] = value
    total = _total([norm for norm in found if norm is not None], norm_type)
    if error_if_nonfinite and not math.isfinite(total):
        raise BackhaulError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be clipped. Use "
            "error_if_nonfinite=False to scale them anyway"
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if coefficient == 1:
        return total
    having = [worker for worker in places if any(found[place] is not None for place in places[worker])]
    spread("clipping gradients", {worker: (scale, (on[worker], context_id, coefficient)) for worker in having})
    return total


def _placed(params_rref: Any) -> tuple[dict[WorkerInfo, Holder], dict[WorkerInfo, list[int]]]:
    """For each worker: the holder of its parameters, and their places among all parameters."""
    places: dict[WorkerInfo, list[int]] = {}
    if isinstance(params_rref, DistributedOptimizer):
        refuse(params_rref._parties, "clip_grad_norm_")
        for place, (worker, _) in enumerate(params_rref._places):
            places.setdefault(worker, []).append(place)
        return {worker: params_rref._locals[worker] for worker in places}, places
    params_rref, parties = parted(params_rref)
    refuse(parties, "clip_grad_norm_")
    params = rrefs_from(params_rref)
    for place, param in enumerate(params):
        places.setdefault(param.owner(), []).append(place)
    return {worker: [params[place] for place in mine] for worker, mine in places.items()}, places


def _total(each: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    if not each:
        return torch.tensor(0.0)
    # Norms are grouped by type, as torch does: the order of the summands decides the last bit of the sum.
    by_type: Any = _group_tensors_by_device_and_dtype([each])  # type: ignore[list-item]
    ordered = [norm for (group,), _ in by_type.values() for norm in group]
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(ordered), norm_type)
    return total


def _params(holder: Holder) -> list[torch.Tensor]:
    if isinstance(holder, RRef):
        return holder.local_value().params
    return [rref.local_value() for rref in holder]


@torch.no_grad()
def norms(
    holder: Holder, context_id: int | None, norm_type: float
) -> list[tuple[list[int], torch.Tensor | list[torch.Tensor]]]:
    """For each dtype: the places of this worker's parameters that have a gradient, and the norms of these gradients.

    The norms are stacked, since one tensor is sent faster than hundreds. The norms of `DTensor`s stay a list: some
    versions of torch cannot unbind a stack of norms whose parts are in several processes. Norms are moved to the CPU,
    so that those of all devices can be combined.
    """
    params = _params(holder)
    by_type: dict[torch.dtype, tuple[list[int], list[torch.Tensor]]] = {}
    with claims.on(params):
        for place, gradient in enumerate(gradients.gradients_of(params, context_id)):
            if gradient is not None:
                norm = torch.linalg.vector_norm(_values(gradient), norm_type)
                norm = norm.cpu() if type(norm) is torch.Tensor and norm.is_cuda else norm
                places, found = by_type.setdefault(norm.dtype, ([], []))
                places.append(place)
                found.append(norm)
    return [
        (places, torch.stack(found) if all(type(norm) is torch.Tensor for norm in found) else found)
        for places, found in by_type.values()
    ]


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


@torch.no_grad()
def scale(holder: Holder, context_id: int | None, coefficient: torch.Tensor) -> None:
    """Multiply the gradients of this worker's parameters by ``coefficient``."""
    params = _params(holder)
    with claims.on(params):
        found = gradients.gradients_of(params, context_id)
        if context_id is not None:  # other code may hold the same tensors
            found = [None if gradient is None else gradient.clone() for gradient in found]
        for gradient in found:
            if gradient is not None:
                gradient.mul_(coefficient.to(gradient.device))
        if context_id is not None:
            gradients.replace(params, found, context_id)
