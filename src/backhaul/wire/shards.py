"""DTensors <-> trees: the local part of a DTensor travels, with its place in the mesh.

The receiver must be part of the same mesh. In a dimension in which the tensor is replicated, all places are the same.
In any other dimension the receiver must have the same coordinate as the sender. Otherwise it would mistake the part of
another place for its own, so the part is refused.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.nn import Parameter

from backhaul.errors import UnsendableError
from backhaul.wire import trees
from backhaul.wire.trees import Packing, Refusal, Unpacking, check_arity, malformed

HOW = 2
"""The item after the number in the tree of a DTensor: see `subclasses`."""

# A cache of torch's meshes. Meshes belong to the process, so all its workers share the cache.
_meshes: list[weakref.ref[Any]] = []


def lower(value: Any, packing: Packing) -> Any:
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise Refusal("this process is not part of its mesh and has none of its data: send it from a process that is")
    with torch.enable_grad():
        used = first_use(value)
        local = value.to_local()
        del used
    number = packing.remember(value)
    description = (
        mesh.device_type,
        mesh.mesh.tolist(),
        mesh.mesh_dim_names,
        list(coordinate),
        [_describe_placement(each) for each in value.placements],
        list(value.shape),
        list(value.stride()),
    )
    return [
        trees.SUBCLASS,
        number,
        HOW,
        isinstance(value, Parameter),
        packing.lower_part(local, ".to_local()"),
        packing.lower_part(description, ".device_mesh"),
    ]


def _describe_placement(placement: Any) -> tuple[Any, ...]:
    from torch.distributed.tensor import Partial, Replicate, Shard

    # Subclasses of these are refused: for example, the norm of a sharded tensor is not a plain sum of its parts.
    if type(placement) is Replicate:
        return ("replicate",)
    if type(placement) is Partial:
        return ("partial", placement.reduce_op)
    if type(placement) is Shard:
        return ("shard", placement.dim)
    raise Refusal(f"its placement {placement!r} has no meaning on another worker: send tensor.full_tensor()")


def _placement(description: Any) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    match description:
        case ("replicate",):
            return Replicate()
        case ("partial", str() as operation):
            return Partial(operation)
        case ("shard", int() as dim):
            return Shard(dim)
    malformed("a placement", description)


def lift(tree: list[Any], unpacking: Unpacking) -> Any:
    check_arity(tree, 5)
    local, description = unpacking.lift(tree[4]), unpacking.lift(tree[5])
    if type(local) is not torch.Tensor:
        malformed("the part of a DTensor", type(local))
    if type(description) is not tuple or len(description) != 7:
        malformed("a DTensor", description)
    device, ranks, names, coordinate, placed, shape, stride = description
    placements = [_placement(each) for each in placed]
    mesh = _find_mesh(device, ranks, names)
    _check_place(mesh, ranks, coordinate, placements)
    from torch.distributed.tensor import DTensor

    options: Any = {"run_check": False, "shape": torch.Size(shape), "stride": tuple(stride)}
    if local.grad_fn is not None:
        with torch.enable_grad():
            return DTensor.from_local(local, mesh, placements, **options)
    made = DTensor.from_local(local.detach(), mesh, placements, **options)
    return Parameter(made, local.requires_grad) if tree[3] else made.requires_grad_(local.requires_grad)


def _check_place(mesh: Any, ranks: Any, coordinate: Sequence[int], placements: Sequence[Any]) -> None:
    mine = None if mesh is None else mesh.get_coordinate()
    advice = "send tensor.full_tensor(), or tensor.to_local() if its local part is meant"
    if mine is None:
        raise UnsendableError(
            f"a DTensor over a mesh of the ranks {ranks} cannot be received: this worker is not part of such a mesh; "
            + advice
        )
    for dim, placement in enumerate(placements):
        if not placement.is_replicate() and mine[dim] != coordinate[dim]:
            raise UnsendableError(
                f"a DTensor of placement {placement!r} cannot be received: its part is that of coordinate {coordinate} "
                f"of the mesh {ranks}, and this worker has coordinate {list(mine)}; " + advice
            )


def _find_mesh(device: Any, ranks: Any, names: Any) -> Any:
    """A mesh of this process over these ranks; None if there is none."""
    kind = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)

    def fits(mesh: Any) -> bool:
        return mesh is not None and (mesh.device_type, mesh.mesh_dim_names, mesh.mesh.tolist()) == (
            device,
            names,
            ranks,
        )

    for known in _meshes:
        if fits(mesh := known()):
            return mesh
    if kind is None or not torch.distributed.is_initialized():
        return None
    # Torch keeps no list of meshes, so look through all objects.
    found = next((each for each in gc.get_objects() if type(each) is kind and fits(each)), None)
    if found is not None:
        _meshes[:] = [known for known in _meshes if known() is not None]
        _meshes.append(weakref.ref(found))
    return found


def first_use(value: torch.Tensor) -> Any:
    """Make the graph node of a leaf before a Function uses the leaf: see `autograd.functions`.

    The caller keeps the result alive until then.
    """
    if value.is_leaf and value.requires_grad:
        with suppress(Exception):
            return value.view_as(value)
    return None
