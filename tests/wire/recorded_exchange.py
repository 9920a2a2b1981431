"""A recorded exchange of messages, ways to feed it to a decoder, and the expected messages."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from backhaul.errors import MisuseError, ProtocolError
from backhaul.ids import RefId, ShareId
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import HEADER, encode
from backhaul.wire.messages import (
    AwaitEnd,
    AwaitReady,
    Call,
    Check,
    Create,
    Failed,
    Failure,
    Fetch,
    Goodbye,
    Gradients,
    Inquire,
    Inspect,
    Leave,
    Mark,
    Notices,
    Pass,
    Ping,
    Recall,
    Register,
    Registered,
    Release,
    Report,
    Resolve,
    Resolved,
    Result,
    Sweep,
    Swept,
    TakePart,
    Tally,
    Unpin,
)
from backhaul.wire.values import Codec

SMALL = 64 * 1024  # what a decoder's buffer starts with
CODECS = (Codec(), Codec(allow_pickle=False))


def head(
    kind: int = 4, metadata: int = 2, table: int = 0, payload: int = 0, magic: bytes = b"BH", version: int = 1
) -> bytes:
    return HEADER.pack(magic, version, kind, metadata, table, payload)


def chunks(data: bytes, sizes: Iterable[int]) -> Iterator[bytes]:
    """The data in pieces of these sizes, the rest in one."""
    start = 0
    for size in sizes:
        if start >= len(data):
            return
        yield data[start : start + size]
        start += size
    yield data[start:]


def take(decoder: Decoder, pieces: Iterable[bytes]) -> list[Envelope]:
    return [envelope for piece in pieces for envelope in decoder.receive_data(piece)]


def take_in_place(decoder: Decoder, pieces: Iterable[bytes]) -> list[Envelope]:
    """Feed the decoder as a transport does: `writable`, `wrote`, `next`."""
    done = []
    for piece in pieces:
        while piece:
            room = decoder.writable()
            count = min(len(room), len(piece))
            room[:count] = piece[:count]
            decoder.wrote(count)
            piece = piece[count:]
            while (envelope := decoder.next()) is not None:
                done.append(envelope)
    return done


def check_tensor(got: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(got) is type(sent)
    assert got.dtype == sent.dtype
    assert got.shape == sent.shape
    assert got.layout == sent.layout
    assert got.requires_grad == sent.requires_grad
    assert got.device == sent.device
    if not sent.is_meta:
        assert torch.equal(got.detach().to_dense(), sent.detach().to_dense())


def check_all(got: Sequence[Envelope], sent: Sequence[tuple[Any, Sequence[torch.Tensor]]]) -> None:
    assert [envelope.message for envelope in got] == [message for message, _ in sent]
    for envelope, (_, tensors) in zip(got, sent, strict=True):
        assert len(envelope.tensors) == len(tensors)
        for one, other in zip(envelope.tensors, tensors, strict=True):
            check_tensor(one, other)


def resident() -> int:
    """Bytes of memory that this process really uses."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def outcome(data: bytes, pieces: Iterable[bytes] | None = None, limit: int = 64 << 30) -> list[Envelope] | None:
    """The decoded messages, or None after a ProtocolError. Any other exception fails the test."""
    decoder = Decoder(limit)
    try:
        got = take(decoder, [data] if pieces is None else pieces)
    except ProtocolError:
        got = None
    # Collecting at most doubles the buffer, and leaves half of it free.
    assert len(decoder._buffer) <= 4 * len(data) + 2 * SMALL
    return got


def unpack(envelopes: Sequence[Envelope]) -> None:
    """Unpack the trees, as a worker does next. This may raise only ProtocolError and MisuseError."""
    for envelope in envelopes:
        message, tensors = envelope.message, envelope.tensors
        if isinstance(message, Call | Result | Failure | Create):
            # No pickles: a mutated one may name anything that can be called, and unpickling calls it.
            try:
                CODECS[1].unpack(message.tree, tensors)
            except (ProtocolError, MisuseError):
                pass


# The exchange.


def recorded() -> list[tuple[Any, Sequence[torch.Tensor]]]:
    """Messages of every kind, with nested values and several kinds of tensors."""
    base = torch.arange(6.0)
    args = (
        base[:4],
        {"views": [base[2:], base], "k": (1, -1, 1 << 70, 2.5, None, True)},
        [b"\x00\xff", "\u00e4\u00f6\u00fc", {1, 2}, slice(1, None), torch.float16, 3 + 4j],
    )
    kwargs = {
        "parameter": torch.nn.Parameter(torch.ones(2, 2)),
        "sparse": torch.eye(2).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "empty": torch.zeros(0, 4, dtype=torch.int64),
        "complex": torch.tensor([1 + 2j]).conj(),
        "strided": torch.arange(6, dtype=torch.int16).reshape(2, 3).t(),
    }
    exchange: list[tuple[Any, Sequence[torch.Tensor]]] = []
    tree, packing = CODECS[0].pack((operator.add, args, kwargs))
    exchange.append((Call(1, tree), packing.tensors))
    exchange.append((Ping(0), ()))
    tree, packing = CODECS[0].pack((operator.matmul, (torch.eye(3), torch.rand(3, 2, dtype=torch.float64)), {}))
    exchange.append((Call(2, tree), packing.tensors))
    tree, packing = CODECS[0].pack([torch.tensor([True, False]), "done"])
    exchange.append((Result(1, tree), packing.tensors))
    tree, packing = CODECS[0].pack(ValueError)
    exchange.append((Failure(2, "worker1", "builtins.ValueError", "no", "Traceback ...", tree), packing.tensors))
    exchange += [(AwaitReady(3, 0), ()), (AwaitEnd(4, 1), ()), (Tally(5), ()), (Result(5, [1, True, {}, {}]), ())]
    ref, share = RefId(1, 300, 1 << 40), ShareId(2, 70_000)
    exchange.append((Call(6, None, ((ref, share), (RefId(0, 0, 0), ShareId(0, 0)))), ()))
    exchange += [(Create(7, ref, tree, ((ref, share),)), packing.tensors), (Fetch(8, ref), ())]
    notices = (Register(ref), Registered(ref), Registered(ref, False), Unpin(share), Release(ref))
    exchange.append((Notices(9, 1 << 60, 1, (*notices, Sweep((1, 2)), Swept((3,)), Recall((share,)))), ()))
    batch = [torch.arange(48.0).reshape(4, 12), torch.arange(100, dtype=torch.uint8), torch.zeros(40).bool()]
    tree, packing = CODECS[0].pack((operator.mul, (batch, {"lr": 0.1, "names": ["a", "b", "c" * 40]}), {"x": None}))
    exchange.append((Call(10, tree), packing.tensors))
    backward, big = Pass((3 << 48) + 7, (3 << 48) + 1, (3 << 48) + 7, False, True), (2 << 48) + (1 << 46)
    exchange.append((Call(11, tree, (), Mark(backward.context, big)), packing.tensors))
    exchange.append((Gradients(backward, (big, big + 1), (0, 1)), [torch.ones(3), torch.ones(2).expand(4, 2)]))
    exchange += [(TakePart(backward, (big, big + 1)), ()), (Resolve(backward), ()), (Resolved(backward), ())]
    exchange += [(Report(backward, True, (0,), (big,)), ()), (Failed(backward, "w", "T", "x", "t"), ())]
    exchange += [(Check(12, backward, 1), ()), (Leave(backward.context), ()), (Inquire(13, (backward.context,)), ())]
    exchange += [(Inspect(14, "snapshot", {}), ())]
    exchange.append((Goodbye(), ()))
    return exchange


EXCHANGE = recorded()
FRAMES = [bytes(encode(message, tensors)) for message, tensors in EXCHANGE]
STREAM = b"".join(FRAMES)
