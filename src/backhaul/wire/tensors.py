"""Tensors -> a table of headers plus raw buffers. `landing` does the reverse.

`pack_tensors` describes the tensors of one message in a *table* (its bytes: see `backhaul.wire.headers`) and lists the
memory to send.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import Parameter

from backhaul.errors import UnsendableError
from backhaul.wire import headers, spans
from backhaul.wire.filling import Copying
from backhaul.wire.headers import Header

INLINE = 64 * 1024  # buffers up to this size are copied into bytes when packing
_REPEATED = (
    4 * 1024
)  # tensors up to this size are sent again rather than described as shared memory, where that is allowed

_PLAIN_KINDS = frozenset({torch.Tensor, Parameter})
_STRIDED = torch.strided
# A slice of it gives the bytes at an address sooner than `ctypes.string_at`, which calls a Python function.
_Memory: Any = ctypes.c_char * INLINE

# What decides about the entry of a plain tensor in a table: class, dtype, shape, whether it requires grad, and its conj
# and neg bits.
_Look = tuple[type, torch.dtype, tuple[int, ...], bool, bool, bool]
# The tables of messages with such tensors. No result depends on this cache, so all workers of a process share it.
_tables: dict[tuple[_Look, ...], bytes] = {}
_REMEMBERED = 1024
_MAX_REMEMBERED_SIZE = 4096

_ABOUT_MAPS = (
    '. Or give RpcOptions(device_maps="same"). In torch\'s words: TensorPipe RPC backend only supports CPU tensors by '
    "default; call `set_device_map` on `TensorPipeRpcBackendOptions`"
)


class Staging(Protocol):
    """How tensors on GPUs get to a peer: see `devices.staging`."""

    def code(self, device: torch.device) -> int:
        """The table's code for the peer's device that a tensor on this device goes to. Raises `UnsendableError`."""

    def stage(self, memory: torch.Tensor, size: int, code: int) -> tuple[int, memoryview | None, Any]:
        """Prepare the first ``size`` bytes of a tensor for sending.

        Returns the place of the bytes in a segment and None, or 0 and the bytes. The third item must stay alive until
        the bytes are sent. With bytes it is a `Copying`: the device may still be copying them.
        """


class Packed(NamedTuple):
    """The table that describes the tensors of one message, and the memory to send after the table."""

    table: bytes  # binary tensor headers; b"" when there are no tensors
    buffers: list[bytes | memoryview]  # in order; the memoryviews point into live tensors
    keep: list[Any]  # objects that must stay alive until the buffers are written
    # If the tensors are staged, one entry for each buffer; otherwise empty.
    places: list[int]  # the place of each buffer; one whose place is not 0 is not in `buffers`
    sizes: list[int]  # the size of each buffer
    copies: list[tuple[int, Copying]]  # for each of ``buffers`` that a device copies: its index, and the copy


def view_of(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """A writable view of the tensor's first bytes. The view keeps the tensor alive.

    It does not use ``.numpy()``, which makes the storage non-resizable permanently.
    """
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def pack_small(tensor: torch.Tensor) -> tuple[bytes, bytes] | None:
    """The table of a message with this one tensor, and the tensor's bytes.

    None if the tensor is not small and plain. This is a faster `pack_tensors` for the most common case. Raises
    UnsendableError if the storage of the tensor was freed or shrunk.
    """
    kind = type(tensor)
    if (
        kind not in _PLAIN_KINDS
        or not tensor.is_cpu
        or tensor.layout is not _STRIDED
        or tensor.is_nested
        or not tensor.is_contiguous()
    ):
        return None
    nbytes = tensor.nbytes
    if not 0 < nbytes <= INLINE:
        return None
    if tensor.untyped_storage().nbytes() != nbytes:  # if they are equal, the tensor is all of its storage
        _check_storage(tensor, nbytes)
    look = kind, tensor.dtype, tensor.shape, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()
    table = _tables.get((look,)) or _table((look,))
    if table is None:
        return None
    return table, _Memory.from_address(tensor.data_ptr())[:nbytes]


def _table(looks: tuple[_Look, ...]) -> bytes | None:
    """The table of a message with these plain tensors; None if one has a dtype that cannot travel."""
    plain: list[headers.Plain] = []
    for kind, dtype, shape, requires_grad, conj, neg in looks:
        code = headers.DTYPE_CODES.get(dtype)
        if code is None:
            return None
        flags = (headers.GRAD if requires_grad else 0) | (headers.PARAMETER if kind is Parameter else 0)
        flags |= (headers.CONJ if conj else 0) | (headers.NEG if neg else 0)
        plain.append(headers.Plain(code, flags, shape, math.prod(shape) * dtype.itemsize))
    table = headers.encode_plain(plain)
    if len(table) <= _MAX_REMEMBERED_SIZE:
        if len(_tables) >= _REMEMBERED:
            _tables.clear()
        _tables[looks] = table
    return table


def pack_staged(tensors: Sequence[torch.Tensor], staging: Staging) -> Packed:
    """Like `pack_tensors`, for messages with tensors that are on GPUs or go to GPUs. Raises UnsendableError."""
    try:
        return (_pack_one(tensors[0], staging) if len(tensors) == 1 else None) or _pack(tensors, staging)
    except UnsendableError:
        raise
    except (RuntimeError, TypeError) as error:
        raise UnsendableError(f"torch gives no access to the memory of a tensor: {error}") from error


def _pack_one(tensor: torch.Tensor, staging: Staging) -> Packed | None:
    """Like `_pack`, but faster, for one plain tensor on a GPU, the most common case. None for any other tensor."""
    kind = type(tensor)
    code = headers.DTYPE_CODES.get(tensor.dtype)
    if (kind is not torch.Tensor and kind is not Parameter) or code is None or not tensor.is_cuda:
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    nbytes = tensor.nbytes
    if not nbytes:
        return None
    _check_storage(tensor, nbytes)
    device = staging.code(tensor.device)
    place, data, keep = staging.stage(tensor, nbytes, device)
    table = headers.encode_single(code, _flags(tensor), tensor.shape, nbytes, device)
    if data is None:
        return Packed(table, [], [keep], [place], [nbytes], [])
    return Packed(table, [data], [keep], [place], [nbytes], [(0, keep)])


def pack_tensors(tensors: Sequence[torch.Tensor], *, apart: bool = False) -> Packed:
    """The table of these tensors, and the memory to send.

    Small buffers are snapshots. Large ones point into the tensors, which must not
    change before the buffers are written. Raises UnsendableError.

    Tensors that share memory also share memory at the receiver. With ``apart``, small ones need not: sending a few
    bytes twice costs less than describing what is shared.
    """
    if not tensors:
        return Packed(b"", [], [], [], [], [])
    try:
        return _pack_plain(tensors, _REPEATED if apart else 0) or _pack(tensors)
    except UnsendableError:
        raise
    except (RuntimeError, TypeError) as error:
        raise UnsendableError(f"torch gives no access to the memory of a tensor: {error}") from error


def _pack_plain(tensors: Sequence[torch.Tensor], repeats: int = 0) -> Packed | None:
    """Like `_pack`, if all tensors are contiguous, on the CPU, and share no storage with each other; else None.

    Tensors of at most ``repeats`` bytes may share storage. Their memory is sent once for each of them.
    """
    looks: list[_Look] = []
    storages: set[int] = set()
    buffers: list[bytes | memoryview] = []
    keep: list[Any] = []
    for tensor in tensors:
        kind = type(tensor)
        if (
            kind not in _PLAIN_KINDS
            or not tensor.is_cpu
            or tensor.layout is not _STRIDED
            or tensor.is_nested
            or not tensor.is_contiguous()
        ):
            return None
        nbytes = tensor.nbytes
        storage = tensor.untyped_storage()
        if not nbytes or (storage._cdata in storages and nbytes > repeats):
            return None
        storages.add(storage._cdata)
        if storage.nbytes() != nbytes:
            _check_storage(tensor, nbytes)
        looks.append((kind, tensor.dtype, tensor.shape, tensor.requires_grad, tensor.is_conj(), tensor.is_neg()))
        if nbytes <= INLINE:
            buffers.append(_Memory.from_address(tensor.data_ptr())[:nbytes])
        else:
            buffers.append(view_of(tensor, nbytes))
            keep.append(tensor)
    key = tuple(looks)
    table = _tables.get(key) or _table(key)
    return None if table is None else Packed(table, buffers, keep, [], [], [])


def _flags(tensor: torch.Tensor) -> int:
    flags = headers.GRAD if tensor.requires_grad else 0
    if type(tensor) is not torch.Tensor:
        flags |= headers.PARAMETER
    if tensor.is_conj():
        flags |= headers.CONJ
    if tensor.is_neg():
        flags |= headers.NEG
    return flags


def _add_buffer(
    packed: Packed, memory: torch.Tensor, nbytes: int, staging: Staging | None = None, code: int = 0
) -> int:
    """Add the first bytes of a tensor as a buffer, and return the index of the buffer."""
    _check_storage(memory, nbytes)
    if staging is not None:
        packed.sizes.append(nbytes)
        packed.places.append(0)
        if memory.is_cuda:
            place, data, keep = staging.stage(memory, nbytes, code)
            packed.places[-1] = place
            packed.keep.append(keep)
            if data is not None:
                packed.copies.append((len(packed.buffers), keep))
                packed.buffers.append(data)
            return len(packed.sizes) - 1
    if nbytes <= INLINE:
        packed.buffers.append(ctypes.string_at(memory.data_ptr(), nbytes))
    else:
        packed.buffers.append(view_of(memory, nbytes))
        packed.keep.append(memory)
    return len(packed.buffers if staging is None else packed.sizes) - 1


def _check_storage(tensor: torch.Tensor, nbytes: int) -> None:
    # FSDP shrinks the storage under a tensor. Without this check, the copy would read past the end of such a storage.
    if tensor.storage_offset() * tensor.itemsize + nbytes > tensor.untyped_storage().nbytes():
        raise UnsendableError(
            f"the storage of a tensor of shape {tuple(tensor.shape)} was freed or shrunk: "
            "there is nothing to send until it is filled again"
        )


class _Item(NamedTuple):
    """A tensor with bytes to send, and the place of its header."""

    place: int
    tensor: torch.Tensor
    nbytes: int  # of its span


def _pack(tensors: Sequence[torch.Tensor], staging: Staging | None = None) -> Packed:
    entries: list[Header] = []
    items: list[_Item] = []
    for tensor in tensors:
        _describe(tensor, entries, items, staging)
    storages: dict[int, list[_Item]] = {}
    for item in items:
        _check_storage(item.tensor, item.nbytes)
        storages.setdefault(item.tensor.untyped_storage()._cdata, []).append(item)
    packed = Packed(b"", [], [], [], [], [])
    for group in storages.values():
        if len(group) == 1:
            _add_alone(packed, entries, group[0], staging)
        else:
            _add_shared(packed, entries, group, staging)
    sizes = [len(buffer) for buffer in packed.buffers] if staging is None else packed.sizes
    return packed._replace(table=headers.encode(len(tensors), entries, sizes))


def _describe(tensor: torch.Tensor, entries: list[Header], items: list[_Item], staging: Staging | None = None) -> None:
    """Append the header of a tensor and those of its components, with no buffer yet."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not Parameter:
        raise UnsendableError(f"a {kind.__name__} is not a plain tensor: send its parts, or a plain copy")
    if tensor.is_nested:
        raise UnsendableError("a nested tensor cannot travel: send tensor.unbind() or a padded tensor")
    layout = headers.LAYOUT_CODES.get(tensor.layout)
    if layout is None:
        raise UnsendableError(f"a tensor of layout {tensor.layout} cannot travel: send tensor.to_dense()")
    if tensor.dtype not in headers.DTYPE_CODES:
        raise UnsendableError(
            f"a quantised tensor ({tensor.dtype}) cannot travel: send tensor.dequantize(), "
            "or tensor.int_repr() with its scale and zero point"
        )
    if tensor.is_meta and layout == headers.STRIDED:
        device = headers.META
    elif staging is not None and (tensor.is_cuda or tensor.is_cpu):
        device = staging.code(tensor.device)
    elif tensor.is_cpu:
        device = headers.CPU
    else:
        raise UnsendableError(
            f"a {tensor.layout} tensor on device {tensor.device} cannot travel: move it with .cpu() first"
            + (_ABOUT_MAPS if tensor.is_cuda else "")
        )
    if layout != headers.STRIDED:
        plain = tensor.detach()
        flags = (headers.GRAD if tensor.requires_grad else 0) | (headers.PARAMETER if kind is Parameter else 0)
        if layout == headers.COO and plain.is_coalesced():
            flags |= headers.COALESCED
        shape = tensor.shape
        entries.append(Header(layout, tensor.dtype, flags, device, shape, None, headers.NO_BUFFER, 0, 0))
        for component in _components(plain, layout):
            # The receiver reads every element of a component to check it, so it accepts no expanded components.
            if component.numel() > spans.span(component.shape, component.stride()):
                component = component.contiguous()
            _describe(component, entries, items, staging)
        return
    shape = tensor.shape
    strides = None if tensor.is_contiguous() else tensor.stride()
    nbytes = tensor.nbytes if strides is None else spans.span(shape, strides) * tensor.itemsize
    if nbytes and device != headers.META:
        items.append(_Item(len(entries), tensor, nbytes))
    entries.append(Header(layout, tensor.dtype, _flags(tensor), device, shape, strides, headers.NO_BUFFER, 0, nbytes))


def _components(tensor: torch.Tensor, layout: int) -> tuple[torch.Tensor, ...]:
    if layout == headers.COO:
        return tensor._indices(), tensor._values()
    if layout in (headers.CSR, headers.BSR):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def _add_alone(packed: Packed, entries: list[Header], item: _Item, staging: Staging | None = None) -> None:
    """Add a tensor that shares its memory with no other tensor of the message."""
    place, tensor, nbytes = item
    header = entries[place]
    strides = header.strides
    if strides is not None and not spans.is_dense(header.sizes, strides):
        tensor, strides = spans.compact(tensor)
        nbytes = tensor.nbytes
        if strides == spans.contiguous_strides(header.sizes):
            strides = None
    buffer = _add_buffer(packed, tensor, nbytes, staging, header.device)
    entries[place] = header._replace(strides=strides, buffer=buffer)


def _add_shared(packed: Packed, entries: list[Header], group: list[_Item], staging: Staging | None = None) -> None:
    """Add tensors over one storage, so that tensors that alias here also alias at the receiver."""
    for region in spans.regions([item.tensor for item in group]):
        if len(region.members) == 1:
            _add_alone(packed, entries, group[region.members[0][0]], staging)
            continue
        buffer = _add_buffer(packed, region.memory, region.nbytes, staging, entries[group[0].place].device)
        for index, offset in region.members:
            place = group[index].place
            entries[place] = entries[place]._replace(buffer=buffer, offset=offset)


def claimed(tensors: Sequence[torch.Tensor]) -> int:
    """The number of bytes that the shapes of these tensors represent beyond the bytes sent: see `headers.claim`."""
    total = 0
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            total += headers.claim(tensor.shape, tensor.itemsize)
        elif not tensor.is_contiguous():
            nbytes = spans.span(tensor.shape, tensor.stride()) * tensor.itemsize
            total += headers.claim(tensor.shape, tensor.itemsize, nbytes)
    return total
