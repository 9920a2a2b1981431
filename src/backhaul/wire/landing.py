"""A table of headers plus raw buffers -> tensors. `tensors` does the reverse.

The receiver makes a `Landing` from the table of a message, fills its buffers straight from the socket, and takes the
tensors. The receiver owns them: they are base tensors with their own memory, writable, leaves for autograd, and
resizable unless they are in a segment. Tensors that share memory at the sender share memory here too.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import Parameter

from backhaul.compat import use_up_warning
from backhaul.errors import BackhaulError, ProtocolError
from backhaul.wire import headers, modes, spans
from backhaul.wire.headers import Header, singles
from backhaul.wire.tensors import view_of

COLLECT_BELOW = 64 * 1024  # buffers beyond this are received in place rather than collected first
_MOST_TOGETHER = 256 * 1024  # more bytes than this are not collected, even if they are those of small tensors
_HUGE = 4 * 1024 * 1024  # fresh memory from this size on asks for huge pages
_MOST_PINNED = 256 * 1024 * 1024  # larger buffers for GPUs are received in ordinary memory
_MADV_HUGEPAGE = 14

_CPU = torch.device("cpu")
_META = torch.device("meta")

# Global, because the pool of pinned memory belongs to the process. A transport makes its decoders before its worker
# knows whether the group has GPUs, and a worker receives buffers for a GPU only if its group has GPUs.
_pinning = False


def pin() -> None:
    """Receive buffers for GPUs in pinned memory from now on, so that no thread waits for the copies to the GPU."""
    global _pinning
    _pinning = True


# `ctypes.memmove` lets other threads run, which may keep the interpreter for milliseconds: too long for a small tensor.
_COPY = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


def land_plain(table: bytes, address: int, size: int) -> list[torch.Tensor] | None:
    """The tensors of a message, from its table and the ``size`` bytes at an address; None if one is not plain.

    This is a faster `Landing` for small tensors whose bytes are all there. Raises ProtocolError.
    """
    known = singles.get(table)
    plain = known[1] if known is not None and known[0] == size else headers.recognise(table, size)
    if plain is None or modes.are_on():
        return None
    try:
        return _copies(plain, address)
    except (RuntimeError, TypeError):
        return None  # the caller then makes a `Landing`, which reports the error


def _copies(plain: Sequence[headers.Small], address: int) -> list[torch.Tensor]:
    """Plain tensors whose bytes follow each other from an address on."""
    tensors: list[torch.Tensor] = []
    for dtype, shape, flags, nbytes in plain:
        # The shape is unpacked because torch takes twice as long to parse a tuple.
        tensor = torch.empty(*shape or ((),), dtype=dtype, device=_CPU)
        _COPY(tensor.data_ptr(), address, nbytes)
        address += nbytes
        if flags:
            if flags & headers.PARAMETER:
                tensor = Parameter(tensor, bool(flags & headers.GRAD))
            else:
                tensor.requires_grad_(True)
        tensors.append(tensor)
    return tensors


class LandingTogether:
    """A faster `Landing` for several small plain tensors that have not arrived yet.

    Their bytes are collected and copied at once, so they count as one buffer.
    """

    __slots__ = ("_plain", "_tensors", "claimed", "collects", "sizes")

    def __init__(self, plain: Sequence[headers.Small], size: int) -> None:
        self.sizes = (size,)
        self.collects = size
        self.claimed = 0
        self._plain = plain
        self._tensors: list[torch.Tensor] = []

    def copy(self, index: int, address: int) -> None:
        """As in `Landing`. Raises MemoryError."""
        try:
            if modes.are_on():
                with modes.off():
                    self._tensors = _copies(self._plain, address)
            else:
                self._tensors = _copies(self._plain, address)
        except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
            raise MemoryError(f"no memory for tensors of {self.sizes[0]} bytes: {error}") from error

    def place(self, index: int) -> memoryview:
        raise NotImplementedError  # all bytes are collected

    def tensors(self) -> list[torch.Tensor]:
        """As in `Landing`."""
        return self._tensors


def landing_of(table: bytes, payload: int) -> Landing | LandingTogether:
    """The landing for a table that `payload` bytes of buffers follow. Raises ProtocolError if the table is invalid."""
    if payload <= _MOST_TOGETHER:
        plain = headers.recognise(table, payload)
        if plain and max(nbytes for *_, nbytes in plain) <= COLLECT_BELOW:
            return LandingTogether(plain, payload)
    return Landing.parse(table, payload)


class Later(list[torch.Tensor]):
    """The tensors of a message if some of them go to GPUs. Empty until the thread that needs them calls `land`."""

    def __init__(self, landing: Landing | LandingOfOne | Missing) -> None:
        super().__init__()
        self._landing: Landing | LandingOfOne | Missing | None = landing

    def land(self, expected: Sequence[torch.device] = ()) -> None:
        """Make the tensors, ready on the current streams of the calling thread. Raises ProtocolError, MemoryError.

        ``expected`` has one device for each tensor. It counts for the tensors whose sender does not name a device.
        """
        landing, self._landing = self._landing, None
        if landing is not None:
            self.extend(landing.land(expected))


class LandingOfOne:
    """A faster `Landing`, for the only tensor of a message, if it is plain and its bytes are in device memory."""

    __slots__ = ("_alone", "_lease", "_table")

    def __init__(self, alone: headers.Alone, lease: Any, table: bytes) -> None:
        self._alone = alone
        self._lease = lease
        self._table = table

    def land(self, expected: Sequence[torch.device] = ()) -> list[torch.Tensor]:
        """As in `Landing`."""
        dtype, shape, requires_grad, code, size = self._alone
        device = _device(code, expected[0] if expected else None)
        if device.type != "cuda" or dtype is torch.complex32 or modes.are_on():
            landing = Landing.parse(self._table, size)
            landing.adopt_device(0, self._lease)
            return landing.land(expected)
        try:
            # The shape is unpacked because torch takes twice as long to parse a tuple.
            tensor = torch.empty(*shape or ((),), dtype=dtype, device=device)
            self._lease.fill(tensor)
            if requires_grad:
                tensor.requires_grad_(True)
        except BackhaulError:
            raise
        except Exception as error:
            raise ProtocolError(f"torch refuses a tensor of the table: {error}") from error
        return [tensor]


class Missing:
    """Replaces the landing of a message if there is no room for its tensors. `land` raises MemoryError and says why."""

    sizes: Sequence[int] = ()

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def tensors(self) -> list[torch.Tensor]:
        return Later(self)

    def land(self, expected: Sequence[torch.device] = ()) -> list[torch.Tensor]:
        raise MemoryError(self._reason)


def land(tensors: list[torch.Tensor], expected: Sequence[torch.device] = ()) -> None:
    """Make the tensors of a message if they are not made yet. Raises ProtocolError, MemoryError."""
    if type(tensors) is Later:
        tensors.land(expected)


class Landing:
    """The memory for the buffers of one message. Make it from a table, fill it, then take the tensors.

    `put`, `copy` and `place` allocate the memory, buffer by buffer. Not thread-safe.
    """

    collects = COLLECT_BELOW
    """The bytes of a buffer are collected if it has at most this many, and then copied at once."""

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
        """The landing for a table that `payload` bytes of buffers follow. Raises ProtocolError if the table is invalid.

        Allocates no memory in proportion to the sizes that the table claims.
        """
        return cls(headers.parse(table, payload))

    def put(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Fill a whole buffer at once; meant for small buffers."""
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

        The memory is not touched, so a size that a table merely claims costs nothing.
        """
        return view_of(self._allocate(index), self.sizes[index])

    def adopt_device(self, index: int, lease: Any) -> None:
        """Use a buffer that is already on a GPU. The methods ``take`` and ``fill`` of ``lease`` copy its bytes."""
        if self._owners[index] is not None:
            self._alone.add(index)
        self._owners[index] = None
        self._leases[index] = lease

    def adopt(self, index: int, buffer: Any) -> None:
        """Use an object that already has the bytes of a buffer. The tensors over it keep the object alive."""
        self._owners[index] = None
        if modes.are_on():
            with modes.off():
                self._memory[index] = torch.frombuffer(buffer, dtype=torch.uint8)
        else:
            self._memory[index] = torch.frombuffer(buffer, dtype=torch.uint8)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors; a `Later` if some go to GPUs. Call it once every buffer is filled. Raises ProtocolError."""
        if self._leases or any(header.device >= headers.GPU for header in self._headers):
            return Later(self)
        return self.land()

    def land(self, expected: Sequence[torch.device] = ()) -> list[torch.Tensor]:
        """The tensors, including those on GPUs. Raises ProtocolError."""
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
        """Whether a buffer goes to a GPU and may be pinned.

        For a gradient this is a guess. Only the receiver knows its device, the device of its tensor, so the header says
        `headers.EXPECTED`.
        """
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
            # After an asynchronous copy was requested, the GPU may read its source much later. For pinned memory, torch
            # keeps track of that. Ordinary memory could be freed too early, so its copy is synchronous.
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
        # Make another tensor over that storage, because autograd would treat a view of `memory` as a view.
        return torch.empty(0, dtype=header.dtype, device=target).set_(
            memory.untyped_storage(), offset, header.sizes, strides
        )

    def _build_sparse(self, header: Header, following: Iterator[Header]) -> torch.Tensor:
        """A sparse tensor with its invariants checked: a wrong index would cause undefined behaviour later."""
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
            raise ProtocolError("a tensor names no device, and the receiver does not expect it on any")
        return expected
    if code < headers.GPU:
        return _CPU
    return _gpu(code - headers.GPU)


@lru_cache(maxsize=64)
def _gpu(index: int) -> torch.device:
    if index >= torch.cuda.device_count():
        raise ProtocolError(f"a tensor for cuda:{index}, but this process has {torch.cuda.device_count()} GPUs")
    return torch.device("cuda", index)


def _fresh(owner: Header | None, size: int) -> torch.Tensor:
    if owner is None:
        return torch.empty(size, dtype=torch.uint8, device=_CPU)
    return _empty(owner, _CPU)


def _empty(header: Header, device: torch.device) -> torch.Tensor:
    if header.dtype is torch.complex32:
        use_up_warning(torch.complex32)
    if header.strides is None:
        # The shape is unpacked because torch takes twice as long to parse a tuple.
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
    """Ask the kernel for huge pages: filling the buffer then causes fewer page faults. A refusal only costs speed."""
    madvise = _madvise()
    if madvise is not None:
        start = -(-address // 4096) * 4096
        madvise(start, (address + size - start) // 4096 * 4096, _MADV_HUGEPAGE)
