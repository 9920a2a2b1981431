"""The targets of `make fuzz`, which get hostile bytes: one function for each place where a peer's bytes are read.

A target returns, or raises `Finding`, or lets an exception through that the tested code has not declared. For an input
of a few thousand bytes it may use at most a second of processor time and some memory, which `bounded` checks.
"""

from __future__ import annotations

import dataclasses
import enum
import fcntl
import functools
import mmap
import operator
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import live
import msgspec
import torch
from reference_scripts import play

from backhaul.devices import pages
from backhaul.edges.compression import expanded
from backhaul.errors import AuthenticationError, MisuseError, ProtocolError, UnsendableError
from backhaul.security import handshake
from backhaul.security.handshake import HEAD_SIZE, Hello, Welcome
from backhaul.security.tls import first_record
from backhaul.transport.segments import Borrowing
from backhaul.wire import headers, spans
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.landing import Landing, Later, land_plain
from backhaul.wire.messages import Coded
from backhaul.wire.values import Codec

Target = Callable[[bytes], None]

SECONDS = 1.0
MEMORY = 32 << 20
LARGEST = 1 << 16  # larger tensors are not examined: a tensor that repeats one element can have any size

_SEGMENT = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Finding(Exception):
    """Hostile bytes had an effect that they must not have."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Finding(what)


def resident() -> int:
    """Bytes of memory that this process really uses."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def bounded(target: Target) -> Target:
    """The target with limits on the time and the memory for one input."""

    @functools.wraps(target)
    def run(data: bytes) -> None:
        before = resident()
        start = time.thread_time()
        target(data)
        seconds = time.thread_time() - start
        require(seconds < SECONDS, f"{len(data)} bytes took {seconds:.1f} s")
        grown = resident() - before
        require(grown < MEMORY, f"{len(data)} bytes took {grown >> 20} MiB")

    return run


# Frames.


def frames(data: bytes) -> None:
    """Any stream gives messages, a wait for more bytes, or `ProtocolError`: the same in one piece and in many."""
    count = data[0] % 8 if data else 0
    stream = data[1 + count :]
    whole = _decoded(stream, [stream])
    parts = _decoded(stream, _cut(stream, data[1 : 1 + count]), _OneWay)
    require((whole is None) == (parts is None), "it depends on the cutting whether bytes are refused")
    if whole is None or parts is None:
        return
    require(len(whole) == len(parts), "the number of messages depends on the cutting")
    for one, other in zip(whole, parts, strict=True):
        require(type(one.message) is type(other.message), "the kind of a message depends on the cutting")
        same = msgspec.msgpack.encode(one.message) == msgspec.msgpack.encode(other.message)
        require(same and len(one.tensors) == len(other.tensors), "a message depends on the cutting")
        require(one.size == other.size, "the size of a message depends on the cutting")
        require(type(one.tensors) is type(other.tensors), "it depends on the cutting when tensors are made")
        if type(one.tensors) is Later:
            continue  # nothing is behind the page of the segment
        for tensor in one.tensors:
            examine(tensor)
        tree = getattr(one.message, "tree", None)
        if tree is not None:
            _unpack(tree, one.tensors, codec())


class _OneWay(Decoder):
    """A decoder without the way of its own for one tensor in device memory: both must read the same."""

    def _next_on_device(self, *_: int) -> None:
        return None


def _decoded(stream: bytes, pieces: Iterable[bytes], kind: type[Decoder] = Decoder) -> list[Envelope] | None:
    decoder = kind(1 << 40, _segments())
    try:
        found = [envelope for piece in pieces for envelope in decoder.receive_data(piece)]
    except ProtocolError:
        found = None
    # Collecting at most doubles the buffer, and leaves half of it free.
    require(len(decoder._buffer) <= 4 * len(stream) + (128 << 10), "the decoder collects more than it was given")
    return found


def _cut(data: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    start = 0
    for size in sizes:
        yield data[start : start + size]
        start += size
    yield data[start:]


@functools.cache
def _segments() -> Borrowing:
    """Two segments that the peer has passed, of a size that it may lie about, and one of device memory."""
    borrowing = Borrowing()
    for _ in range(2):
        descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _SEGMENT + mmap.PAGESIZE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        borrowing.add([descriptor])
    page = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(page, pages.PAGE)
    fcntl.fcntl(page, fcntl.F_ADD_SEALS, pages.SEALS)
    fields = pages.FIELDS.pack(pages.MAGIC, _SEGMENT, bytes(64), bytes(64), bytes(40), 1, bytes(16))
    os.pwrite(page, fields, pages.FIELDS_AT)
    borrowing.add([page, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)])
    return borrowing


# Greetings.


def greetings(data: bytes) -> None:
    """One side of a greeting, or the start of TLS. The first byte chooses."""
    side, data = data[:1], data[1:]
    choice = side[0] if side else 0
    try:
        if choice & 8:
            first_record(data, server=bool(choice & 1))
        elif choice & 1:
            _greet_client(data)
        else:
            _greet_server(data)
    except (AuthenticationError, ProtocolError):
        pass


def _greet_server(data: bytes) -> None:
    head, message = data[:HEAD_SIZE].ljust(HEAD_SIZE, b"\0"), data[HEAD_SIZE:]
    rest = handshake.length_of_hello(head)
    require(rest <= handshake.MAX_MESSAGE, "a greeting may be of any length")
    hello = handshake.decode_hello(message)
    require(type(hello) is Hello and type(hello.name) is str and type(hello.id) is int, f"{hello!r}")
    handshake.encode(Welcome(0, "server", f"no {hello.name!r}"))


def _greet_client(data: bytes) -> None:
    head, message = data[:HEAD_SIZE].ljust(HEAD_SIZE, b"\0"), data[HEAD_SIZE:]
    rest = handshake.length_of_welcome(head)
    require(rest <= handshake.MAX_MESSAGE, "an answer may be of any length")
    welcome = handshake.decode_welcome(message)
    require(type(welcome) is Welcome and not welcome.refused, f"{welcome!r}")


# Values.


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Right(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any


class Handle:
    """A value that travels by an extension of the codec, as references do."""

    def __init__(self, number: int) -> None:
        self.number = number


class Closed:
    """A closed set of names: an unknown name imports nothing, and follows no attribute."""

    _found: ClassVar[dict[str, Any]] = {
        "m:Colour": Colour,
        "m:Right": Right,
        "m:Pair": Pair,
        "m:Point": Point,
        "m:Frozen": Frozen,
        "m:add": operator.add,
        "m:Error": ValueError,
        "m:Tensor": torch.Tensor,
        "m:list": list,
    }

    def name_of(self, obj: Any) -> str:
        for name, found in self._found.items():
            if found is obj:
                return name
        raise UnsendableError("it has no name here")

    def find(self, name: str) -> Any:
        if name not in self._found:
            raise MisuseError(f"there is no {name[:50]!r} here")
        return self._found[name]


def _lift_handle(value: Any, _: Any) -> Handle:
    if type(value) is not int:
        raise ProtocolError("not a handle")
    return Handle(value)


@functools.cache
def codec(*, strict: bool = False) -> Codec:
    """The safe codec: no pickles, and a closed list of names. The strict one is that of a federation."""
    made = Codec(Closed(), allow_pickle=False, bounded=strict)
    made.register(Handle, "handle", lambda handle, _: handle.number, _lift_handle)
    return made


@functools.cache
def _trees() -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder()


def beside() -> list[torch.Tensor]:
    """The tensors of a message; a tree may refer to them in any way."""
    return [
        torch.arange(16, dtype=torch.uint8),
        torch.ones(2, 2, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.empty(1 << 40, device="meta"),
        torch.arange(8, dtype=torch.uint8)[::2],
    ]


def values(data: bytes) -> None:
    """Any tree that msgpack can carry gives a value, `ProtocolError`, or `MisuseError` for an unknown name."""
    try:
        tree = _trees().decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # as the decoder of frames has it
    _unpack(tree, beside(), codec(strict=True))
    _unpack(tree, beside(), codec())


def _unpack(tree: Any, tensors: Sequence[torch.Tensor], codec: Codec) -> None:
    try:
        value = codec.unpack(tree, tensors)
    except (ProtocolError, MisuseError) as error:
        require(len(str(error)) < 16_384, "an error that repeats what it was given")
        return
    # Whatever it is, a worker can try to send it on.
    try:
        again, packing = codec.pack(value)
    except UnsendableError:
        return
    codec.unpack(again, packing.tensors)


# Tensors.


def tensors(data: bytes) -> None:
    """A tensor table and its buffers give tensors that lie within the buffers, or `ProtocolError`.

    The first four bytes say where the table ends, and which of the ways to read it is taken.
    """
    if len(data) < 4:
        return
    length, way = struct.unpack_from("<HB", data)
    table, payload = data[4 : 4 + length], data[4 + length :]
    try:
        if way & 1:
            table, places, elsewhere = headers.split_places(table)
            require(len(places) * 4 <= length and elsewhere >= 0, "places that are not in the table")
        if way & 2:
            buffer = bytearray(payload)
            address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() if buffer else 0
            if table:
                for tensor in land_plain(table, address, len(payload)) or ():
                    examine(tensor)
            return
        landing = Landing.parse(table, len(payload))
        start = 0
        for index, size in enumerate(landing.sizes):
            chunk = payload[start : start + size]
            if way & 4:
                landing.place(index)[:] = chunk
            else:
                landing.put(index, chunk)
            start += size
        for tensor in landing.tensors():
            examine(tensor)
    except ProtocolError as error:
        require(len(str(error)) < 65_536, "an error that repeats what it was given")


_READABLE = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
)


def examine(tensor: torch.Tensor) -> None:
    """Check that every element of a tensor lies in its storage, and can be read."""
    if tensor.layout is not torch.strided:
        _examine_sparse(tensor)
        return
    if tensor.is_meta:
        return
    reach = spans.span(tensor.shape, tensor.stride())
    end = (tensor.storage_offset() + reach) * tensor.itemsize
    require(not reach or end <= tensor.untyped_storage().nbytes(), f"a tensor ends at {end}, beyond its storage")
    if reach and tensor.numel() <= LARGEST and tensor.dtype in _READABLE:
        tensor.detach().clone()


def _examine_sparse(tensor: torch.Tensor) -> None:
    plain = tensor.detach()
    if plain.layout is torch.sparse_coo:
        parts = (plain._indices(), plain._values())
    elif plain.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (plain.crow_indices(), plain.col_indices(), plain.values())
    else:
        parts = (plain.ccol_indices(), plain.row_indices(), plain.values())
    for part in parts:
        examine(part)
    if plain.numel() <= LARGEST and plain.dtype in (torch.float32, torch.float64):
        plain.to_dense()


# Compressed tensors.


def parts() -> list[torch.Tensor]:
    """Tensors of a message that may be parts of compressed ones."""
    return [
        *beside(),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(2, 8, dtype=torch.int8),
        torch.ones(2),
        torch.ones(1, dtype=torch.float64),
        torch.tensor([0, 3], dtype=torch.int32),
        torch.tensor([1, 1, 5]),
        torch.ones(1, dtype=torch.int8).expand(1 << 40),
        torch.ones(1, dtype=torch.bfloat16).expand(0, 1 << 40),
    ]


def compressed(data: bytes) -> None:
    """The codes of compressed tensors give tensors of the claimed size, or `ProtocolError`.

    The first byte says how many tensors there are, the next ones which; then come the codes.
    """
    count = data[0] % 8 if data else 0
    pool = parts()
    chosen = [pool[number % len(pool)] for number in data[1 : 1 + count]]
    try:
        codes = msgspec.msgpack.decode(data[1 + count :], type=tuple[Coded, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return  # as the decoder of frames has it
    try:
        found = expanded(codes, chosen, MEMORY // 8)
    except ProtocolError:
        return
    for code in codes:
        require(list(found[code.place].shape) == list(code.shape), "a tensor that is not as its code says")
        examine(found[code.place].detach())


# References.


def references(data: bytes) -> None:
    """A script of notices from peers, and of local actions: the state machine keeps its invariants."""
    play(data)


LIVE = (live.gradients, live.contexts, live.notices, live.operators)
"""Those with a live worker."""

TARGETS: dict[str, Target] = {
    target.__name__: bounded(target) for target in (frames, greetings, values, tensors, compressed, references, *LIVE)
}
