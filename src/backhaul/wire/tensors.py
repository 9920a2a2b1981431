"""Tensors <-> a table of headers plus raw buffers.

`pack_tensors` describes the tensors of one message in a *table* (its bytes: see
`backhaul.wire.headers`) and lists the memory to send. The receiver makes a `Landing`
from the table, fills its buffers straight from the socket, and takes the tensors.

What arrives is the receiver's own: clean base tensors with their own memory, writable, leaves for autograd, and
resizable unless they lie in a segment. Tensors that shared memory in the message share it again.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import Parameter

from backhaul.compat import use_up_warning
from backhaul.errors import BackhaulError, ProtocolError, UnsendableError
from backhaul.wire import headers, modes, spans
from backhaul.wire.headers import Header

INLINE = 64 * 1024  # buffers up to this size are copied into bytes when packing

_HUGE = 4 * 1024 * 1024  # fresh memory from this size on asks for huge pages
_MOST_PINNED = 256 * 1024 * 1024  # larger buffers for GPUs are received in ordinary memory
_MADV_HUGEPAGE = 14

_ABOUT_MAPS = (
    '. Or give RpcOptions(device_maps="same"). In torch\'s words: TensorPipe RPC backend only supports CPU tensors by '
    "default; call `set_device_map` on `TensorPipeRpcBackendOptions`"
)

_CPU = torch.device("cpu")
_META = torch.device("meta")


_pinning = False


def pin() -> None:
    """Receive what goes to GPUs in pinned memory from now on: nobody waits for the copies to the GPU."""
    global _pinning
    _pinning = True


class Staging(Protocol):
    """How tensors on GPUs get to a peer: see `devices.staging`."""

    def code(self, device: torch.device) -> int:
        """Where at the peer a tensor on this device goes, as the table has it. Raises `UnsendableError`."""

    def stage(self, memory: torch.Tensor, size: int, code: int) -> tuple[int, memoryview | None, Any]:
        """Make the first bytes of a tensor ready to leave: their place, or 0 and the bytes; and what to keep."""


class Packed(NamedTuple):
    """What describes the tensors of one message, and the memory to send after it."""

    table: bytes  # binary tensor headers; b"" when there are no tensors
    buffers: list[bytes | memoryview]  # in order; the memoryviews point into live tensors
    keep: list[Any]  # what must stay alive until the buffers are written
    places: list[int]  # of all buffers, if some are elsewhere: those with a place are not among the buffers
    sizes: list[int]  # of all buffers, if some are elsewhere


def view_of(tensor: torch.Tensor, nbytes: int) -> memoryview:
    """The tensor's first bytes, writable. The view keeps the tensor alive.

    Not through ``.numpy()``: that makes the storage non-resizable for good.
    """
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def pack_small(tensor: torch.Tensor) -> tuple[int, bytes] | None:
    """The table of a message with this one tensor, followed by its bytes; and the size of the table.

    For small, plain tensors; None if it is another one. What `pack_tensors` does, in one go: most messages have one.
    """
    kind = type(tensor)
    code = headers.DTYPE_CODES.get(tensor.dtype)
    if (kind is not torch.Tensor and kind is not Parameter) or code is None or not tensor.is_cpu:
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.is_contiguous():
        return None
    nbytes = tensor.nbytes
    if not 0 < nbytes <= INLINE:
        return None
    storage = tensor.untyped_storage()
    if storage.nbytes() != nbytes:  # otherwise it is the whole of its storage
        _check_storage(tensor, nbytes)
    table = headers.encode_single(code, _flags(tensor), tensor.shape, nbytes)
    return len(table), table + ctypes.string_at(tensor.data_ptr(), nbytes)


def pack_staged(tensors: Sequence[torch.Tensor], staging: Staging) -> Packed:
    """As `pack_tensors`, for tensors of which some are on GPUs, or go to some."""
    try:
        return (_pack_one(tensors[0], staging) if len(tensors) == 1 else None) or _pack(tensors, staging)
    except UnsendableError:
        raise
    except (RuntimeError, TypeError) as error:
        raise UnsendableError(f"torch gives no access to the memory of a tensor: {error}") from error


def _pack_one(tensor: torch.Tensor, staging: Staging) -> Packed | None:
    """As `_pack`, for one plain tensor on a GPU, which most messages have; else None."""
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
    return Packed(table, [] if data is None else [data], [keep], [place], [nbytes])


def pack_tensors(tensors: Sequence[torch.Tensor]) -> Packed:
    """Describe tensors and list the memory to send.

    Small buffers are snapshots; large ones point into the tensors, which must not
    change before they are written. Raises UnsendableError.
    """
    if not tensors:
        return Packed(b"", [], [], [], [])
    try:
        return _pack_plain(tensors) or _pack(tensors)
    except UnsendableError:
        raise
    except (RuntimeError, TypeError) as error:
        raise UnsendableError(f"torch gives no access to the memory of a tensor: {error}") from error


def _pack_plain(tensors: Sequence[torch.Tensor]) -> Packed | None:
    """As `_pack`, if all are contiguous, on the CPU, and over memory that no other has; else None."""
    plain: list[headers.Plain] = []
    storages: set[int] = set()
    packed = Packed(b"", [], [], [], [])
    for tensor in tensors:
        kind = type(tensor)
        code = headers.DTYPE_CODES.get(tensor.dtype)
        if (
            (kind is not torch.Tensor and kind is not Parameter)
            or code is None
            or tensor.layout is not torch.strided
            or not tensor.is_cpu
            or tensor.is_nested
            or not tensor.is_contiguous()
        ):
            return None
        nbytes = tensor.nbytes
        storage = tensor.untyped_storage()._cdata
        if not nbytes or storage in storages:
            return None
        storages.add(storage)
        plain.append(headers.Plain(code, _flags(tensor), tensor.shape, nbytes))
        _add_buffer(packed, tensor, nbytes)
    return packed._replace(table=headers.encode_plain(tuple(plain)))


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
    """Add the first bytes of a tensor as a buffer; returns its index."""
    _check_storage(memory, nbytes)
    if staging is not None:
        packed.sizes.append(nbytes)
        packed.places.append(0)
        if memory.is_cuda:
            place, data, keep = staging.stage(memory, nbytes, code)
            packed.places[-1] = place
            packed.keep.append(keep)
            if data is not None:
                packed.buffers.append(data)
            return len(packed.sizes) - 1
    if nbytes <= INLINE:
        packed.buffers.append(ctypes.string_at(memory.data_ptr(), nbytes))
    else:
        packed.buffers.append(view_of(memory, nbytes))
        packed.keep.append(memory)
    return len(packed.buffers if staging is None else packed.sizes) - 1


def _check_storage(tensor: torch.Tensor, nbytes: int) -> None:
    # A storage that was shrunk under its tensor, as FSDP does, would be read past its end.
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
    packed = Packed(b"", [], [], [], [])
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
            # The receiver reads all of it to check it, so it takes no expanded ones.
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
    """Add a tensor that shares its memory with no other of the message."""
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
    """Add tensors over one storage, so that those which alias here alias there."""
    for region in spans.share([item.tensor for item in group]):
        if len(region.members) == 1:
            _add_alone(packed, entries, group[region.members[0][0]], staging)
            continue
        buffer = _add_buffer(packed, region.memory, region.nbytes, staging, entries[group[0].place].device)
        for index, offset in region.members:
            place = group[index].place
            entries[place] = entries[place]._replace(buffer=buffer, offset=offset)


def claimed(tensors: Sequence[torch.Tensor]) -> int:
    """How many bytes the shapes of these stand for beyond what is sent: see `headers.claim`."""
    total = 0
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            total += headers.claim(tensor.shape, tensor.itemsize)
        elif not tensor.is_contiguous():
            nbytes = spans.span(tensor.shape, tensor.stride()) * tensor.itemsize
            total += headers.claim(tensor.shape, tensor.itemsize, nbytes)
    return total


def land_small(table: bytes, address: int, size: int) -> torch.Tensor | None:
    """The one tensor of a message, from its table and the ``size`` bytes at an address; None if it is not plain.

    What a `Landing` does, in one go. Raises ProtocolError.
    """
    plain = headers.recognise(table, size)
    if plain is None or modes.are_on():
        return None
    dtype, shape, requires_grad = plain
    if dtype is torch.complex32:
        use_up_warning(torch.complex32)
    try:
        # Unpacked: torch takes twice as long to make sense of a tuple.
        tensor = torch.empty(*shape or ((),), dtype=dtype, device=_CPU)
    except (RuntimeError, TypeError):
        return None  # the landing says what is wrong
    ctypes.memmove(tensor.data_ptr(), address, size)
    if requires_grad:
        tensor.requires_grad_(True)
    return tensor


class Later(list[torch.Tensor]):
    """The tensors of a message of which some go to GPUs. It is empty until `land` is called, by who wants them."""

    def __init__(self, landing: Landing | Missing) -> None:
        super().__init__()
        self._landing: Landing | Missing | None = landing

    def land(self, expected: Sequence[torch.device] = ()) -> None:
        """Make the tensors, ready on the current streams of the calling thread. Raises ProtocolError, MemoryError.

        ``expected`` says where those go whose sender does not say it, one for each tensor.
        """
        landing, self._landing = self._landing, None
        if landing is not None:
            self.extend(landing.land(expected))


class Missing:
    """Stands for the landing of a message whose tensors have no room here. Who wants the tensors is told why."""

    sizes: Sequence[int] = ()

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def tensors(self) -> list[torch.Tensor]:
        return Later(self)

    def land(self, expected: Sequence[torch.device] = ()) -> list[torch.Tensor]:
        raise MemoryError(self._reason)


def land(tensors: list[torch.Tensor], expected: Sequence[torch.device] = ()) -> None:
    """Make the tensors of a message that are not there yet."""
    if type(tensors) is Later:
        tensors.land(expected)


class Landing:
    """Where the buffers of one message go: made from a table, filled, then turned into tensors.

    Memory is allocated by `put` and `place`, buffer by buffer. Not thread-safe.
    """

    __slots__ = ("_alone", "_headers", "_leases", "_memory", "_owners", "_pinned", "_target", "claimed", "sizes")

    sizes: Sequence[int]  # of each buffer, in bytes
    claimed: int  # see `headers.Table`

    def __init__(self, table: headers.Table) -> None:
        self.sizes = table.sizes
        self.claimed = table.claimed
        self._headers = table.headers
        self._memory: list[torch.Tensor | None] = [None] * len(table.sizes)
        # A buffer that is exactly one tensor is allocated as that tensor.
        self._owners = list(table.owners)
        self._leases: dict[int, Any] = {}
        self._alone: set[int] = set()  # buffers on GPUs that are exactly one tensor
        self._pinned: set[int] = set()  # buffers in pinned memory
        self._target: torch.device | None = None

    @classmethod
    def parse(cls, table: bytes | memoryview, payload: int) -> Landing:
        """Check a table; `payload` is how many bytes of buffers follow. Raises ProtocolError.

        Allocates nothing in proportion to what the table claims.
        """
        return cls(headers.parse(table, payload))

    def put(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Fill a whole buffer at once; for small ones."""
        size = self.sizes[index]
        if len(data) != size:
            raise ProtocolError(f"buffer {index} has {len(data)} bytes, its table says {size}")
        if type(data) is not bytes:
            data = bytes(data)
        ctypes.memmove(self._allocate(index).data_ptr(), data, size)

    def copy(self, index: int, address: int) -> None:
        """Fill a whole buffer with the bytes at an address."""
        ctypes.memmove(self._allocate(index).data_ptr(), address, self.sizes[index])

    def place(self, index: int) -> memoryview:
        """Allocate a buffer and return all of its bytes, for the caller to fill.

        The memory is not touched: what a table merely claims costs nothing.
        """
        return view_of(self._allocate(index), self.sizes[index])

    def adopt_device(self, index: int, lease: Any) -> None:
        """Take an object that has the bytes of a buffer on a GPU: ``take(device)`` gets them."""
        if self._owners[index] is not None:
            self._alone.add(index)
        self._owners[index] = None
        self._leases[index] = lease

    def adopt(self, index: int, buffer: Any) -> None:
        """Take an object that has the bytes of a buffer, and lives as long as somebody uses them."""
        self._owners[index] = None
        if modes.are_on():
            with modes.off():
                self._memory[index] = torch.frombuffer(buffer, dtype=torch.uint8)
        else:
            self._memory[index] = torch.frombuffer(buffer, dtype=torch.uint8)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, once every buffer was put, adopted, or placed and filled. Raises ProtocolError."""
        if self._leases or any(header.device >= headers.GPU for header in self._headers):
            return Later(self)
        return self.land()

    def land(self, expected: Sequence[torch.device] = ()) -> list[torch.Tensor]:
        """The tensors, also those on GPUs."""
        try:
            if modes.are_on():
                with modes.off():
                    return self._build_all(expected)
            return self._build_all(expected)
        except BackhaulError:
            raise
        except Exception as error:
            raise ProtocolError(f"torch refuses a tensor of the table: {error}") from error

    def _allocate(self, index: int) -> torch.Tensor:
        size = self.sizes[index]
        owner = self._owners[index]
        try:
            if _pinning and self._goes_to_a_gpu(index):
                memory = torch.empty(size, dtype=torch.uint8, device=_CPU, pin_memory=True)
                self._owners[index] = None
                self._pinned.add(index)
                self._memory[index] = memory
                return memory
            if modes.are_on():
                with modes.off():
                    memory = _fresh(owner, size)
            else:
                memory = _fresh(owner, size)
        except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
            raise MemoryError(f"no memory for a buffer of {size} bytes: {error}") from error
        if size >= _HUGE:
            _ask_for_huge_pages(memory.data_ptr(), size)
        self._memory[index] = memory
        return memory

    def _goes_to_a_gpu(self, index: int) -> bool:
        """Whether a buffer does, as far as its sender knows: a gradient goes where its tensor came from."""
        return (
            any(each.buffer == index and each.device >= headers.GPU for each in self._headers)
            and self.sizes[index] <= _MOST_PINNED
            and not modes.are_on()
        )

    def _build_all(self, expected: Sequence[torch.device]) -> list[torch.Tensor]:
        following = iter(self._headers)
        found: list[torch.Tensor] = []
        for header in following:
            self._target = _device(header.device, expected[len(found)] if expected else None)
            found.append(self._build(header, following))
        return found

    def _build(self, header: Header, following: Iterator[Header]) -> torch.Tensor:
        if header.layout != headers.STRIDED:
            tensor = self._build_sparse(header, following)
        elif header.buffer != headers.NO_BUFFER:
            tensor = self._build_over(header)
        else:
            tensor = _empty(header, _META if header.device == headers.META else self._target or _CPU)
        flags = header.flags
        if flags:
            # The bits are set in place: conj() and _neg_view() would make autograd views.
            if flags & headers.CONJ:
                torch._C._set_conj(tensor, True)
            if flags & headers.NEG:
                torch._C._set_neg(tensor, True)
            if flags & headers.PARAMETER:
                return Parameter(tensor, bool(flags & headers.GRAD))
            if flags & headers.GRAD:
                tensor.requires_grad_(True)
        return tensor

    def _build_over(self, header: Header) -> torch.Tensor:
        target = self._target or _CPU
        lease = self._leases.pop(header.buffer, None)
        if lease is not None:
            if header.buffer in self._alone and target.type == "cuda":
                made = _empty(header, target)
                lease.fill(made)
                return made
            self._memory[header.buffer] = lease.take(target)
        memory = self._memory[header.buffer]
        if memory is None:
            raise ProtocolError(f"buffer {header.buffer} never arrived")
        if memory.device != target:
            # A GPU may read ordinary memory long after the copy was asked for. Of pinned memory, torch knows.
            memory = self._memory[header.buffer] = memory.to(target, non_blocking=header.buffer in self._pinned)
            self._pinned.discard(header.buffer)
        elif header.buffer in self._pinned:
            memory = self._memory[header.buffer] = memory.clone()  # the pinned memory goes back to its pool
            self._pinned.remove(header.buffer)
        if self._owners[header.buffer] is not None:
            return memory
        strides = header.strides
        if strides is None:
            strides = spans.contiguous_strides(header.sizes)
        if header.dtype is torch.complex32:
            use_up_warning(torch.complex32)
        offset = header.offset // header.dtype.itemsize
        # Another tensor over that storage, not a view of `memory` for autograd.
        return torch.empty(0, dtype=header.dtype, device=target).set_(
            memory.untyped_storage(), offset, header.sizes, strides
        )

    def _build_sparse(self, header: Header, following: Iterator[Header]) -> torch.Tensor:
        """Made with its invariants checked: a wrong index would be undefined behaviour later."""
        count = headers.COMPONENTS[header.layout]
        *indices, values = [self._build(next(following), following) for _ in range(count)]
        if values.dtype is not header.dtype:
            raise ProtocolError(f"a sparse tensor of {header.dtype} with values of {values.dtype}")
        sizes = tuple(header.sizes)
        if header.layout == headers.COO:
            use_up_warning(torch.sparse_coo)
            coalesced = bool(header.flags & headers.COALESCED)
            return torch.sparse_coo_tensor(indices[0], values, sizes, is_coalesced=coalesced, check_invariants=True)
        layout = headers.LAYOUTS[header.layout]
        use_up_warning(layout)
        return torch.sparse_compressed_tensor(
            indices[0], indices[1], values, sizes, layout=layout, check_invariants=True
        )


def _device(code: int, expected: torch.device | None) -> torch.device:
    if code == headers.EXPECTED:
        if expected is None:
            raise ProtocolError("a tensor for a device that nobody expects it on")
        return expected
    if code < headers.GPU:
        return _CPU
    index = code - headers.GPU
    if index >= torch.cuda.device_count():
        raise ProtocolError(f"a tensor for cuda:{index}, and this process has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def _fresh(owner: Header | None, size: int) -> torch.Tensor:
    if owner is None:
        return torch.empty(size, dtype=torch.uint8, device=_CPU)
    return _empty(owner, _CPU)


def _empty(header: Header, device: torch.device) -> torch.Tensor:
    if header.dtype is torch.complex32:
        use_up_warning(torch.complex32)
    if header.strides is None:
        # Unpacked: torch takes twice as long to make sense of a tuple.
        return torch.empty(*header.sizes or ((),), dtype=header.dtype, device=device)
    return torch.empty_strided(header.sizes, header.strides, dtype=header.dtype, device=device)


@lru_cache(maxsize=1)
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Fewer page faults while the buffer is filled; a refusal costs nothing but speed."""
    madvise = _madvise()
    if madvise is not None:
        start = -(-address // 4096) * 4096
        madvise(start, (address + size - start) // 4096 * 4096, _MADV_HUGEPAGE)
