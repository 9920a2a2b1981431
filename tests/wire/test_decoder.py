"""Bytes -> messages: whatever the bytes and however they are cut, there is one answer or one error.

The decoder may return messages, wait for more, or raise ProtocolError; nothing else, and no memory beyond
what has arrived is touched.
"""

from __future__ import annotations

import ctypes
import gc
import math
import operator
import os
import random
import struct
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backhaul.errors import MisuseError, ProtocolError
from backhaul.ids import RefId, ShareId
from backhaul.wire import decoder as decoder_module
from backhaul.wire import headers, spans
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import HEADER, MAX_TABLE, encode
from backhaul.wire.messages import (
    KIND_OF,
    KINDS,
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

# 20,000 and more in all: see test_there_are_enough_examples.
EXAMPLES = {"random": 5_000, "framed": 4_000, "tables": 4_000, "mutated": 6_000, "trees": 2_000, "round": 1_500}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Torch checks sparse tensors in parallel: waking its threads takes longer than all the rest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def fuzz(kind: str) -> settings:
    return settings(
        max_examples=EXAMPLES[kind],
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


# How bytes are fed.


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
    """As a transport does it: `writable`, `wrote`, `next`."""
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
    """Messages so far, or None after a ProtocolError; anything else is a failure of the test."""
    decoder = Decoder(limit)
    try:
        got = take(decoder, [data] if pieces is None else pieces)
    except ProtocolError:
        got = None
    # Doubling, with half of it free, is the most that collecting costs.
    assert len(decoder._buffer) <= 4 * len(data) + 2 * SMALL
    return got


def unpack(envelopes: Sequence[Envelope]) -> None:
    """What a worker does with trees next: that, too, may only blame the peer or the names it gave."""
    for message, tensors in envelopes:
        if isinstance(message, Call | Result | Failure | Create):
            # No pickles: a mutated one may name anything that can be called, and unpickling calls it.
            try:
                CODECS[1].unpack(message.tree, tensors)
            except (ProtocolError, MisuseError):
                pass


# A recorded exchange.


def recorded() -> list[tuple[Any, Sequence[torch.Tensor]]]:
    """Call, Result, Failure and all the rest, with nested values and several kinds of tensors."""
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
    exchange.append((Goodbye(), ()))
    return exchange


EXCHANGE = recorded()
FRAMES = [bytes(encode(message, tensors)) for message, tensors in EXCHANGE]
STREAM = b"".join(FRAMES)


def test_the_recording_shows_every_kind() -> None:
    assert {type(message) for message, _ in EXCHANGE} == set(KINDS.values())
    assert 1_000 < len(STREAM) < 5_000


# Literal frames.

NO_TENSORS = "00000000 0000000000000000"

REF, SHARE = RefId(1, 2, 3), ShareId(4, 5)

LITERAL = [
    (f"4248 01 01 03000000 {NO_TENSORS} 92 01 c0", Call(1, None)),
    (f"4248 01 01 04000000 {NO_TENSORS} 93 01 c0 90", Call(1, None)),
    (f"4248 01 01 0c000000 {NO_TENSORS} 93 01 c0 91 92 93010203 920405", Call(1, None, ((REF, SHARE),))),
    (f"4248 01 02 0e000000 {NO_TENSORS} 92 02 93 00 c3 cb3ff8000000000000", Result(2, [0, True, 1.5])),
    (f"4248 01 03 0a000000 {NO_TENSORS} 95 03 a177 a154 a178 a174", Failure(3, "w", "T", "x", "t")),
    (f"4248 01 03 0b000000 {NO_TENSORS} 96 03 a177 a154 a178 a174 05", Failure(3, "w", "T", "x", "t", 5)),
    (f"4248 01 04 02000000 {NO_TENSORS} 91 04", Ping(4)),
    (f"4248 01 05 03000000 {NO_TENSORS} 92 05 00", AwaitReady(5, 0)),
    (f"4248 01 06 03000000 {NO_TENSORS} 92 06 01", AwaitEnd(6, 1)),
    (f"4248 01 07 04000000 {NO_TENSORS} 91 cd012c", Tally(300)),
    (f"4248 01 08 01000000 {NO_TENSORS} 90", Goodbye()),
    (f"4248 01 09 08000000 {NO_TENSORS} 94 07 93010203 c0 90", Create(7, REF, None)),
    (f"4248 01 0a 06000000 {NO_TENSORS} 92 08 93010203", Fetch(8, REF)),
    (
        f"4248 01 0b 10000000 {NO_TENSORS} 94 09 0c 0a 92 9201 93010203 9203 920405",
        Notices(9, 12, 10, (Register(REF), Unpin(SHARE))),
    ),
]


@pytest.mark.parametrize(("text", "message"), LITERAL)
def test_literal_frames(text: str, message: object) -> None:
    (envelope,) = Decoder().receive_data(bytes.fromhex(text))
    assert envelope == (message, [])


def test_a_literal_frame_with_a_tensor() -> None:
    data = bytes.fromhex(
        "4248 01 02 05000000 29000000 0800000000000000"
        "92 09 92 03 00"
        "01000000 01000000 0800000000000000"
        "00 0b 00 00 01 00000000 0000000000000000"
        "0200000000000000"
        "0000803f 000000c0"
    )
    (envelope,) = Decoder().receive_data(data)
    check_all([envelope], [(Result(9, [3, 0]), [torch.tensor([1.0, -2.0])])])


def test_nothing_is_nothing() -> None:
    decoder = Decoder()
    assert decoder.receive_data(b"") == []
    assert decoder.next() is None


# Chunks.


def test_many_frames_in_one_chunk() -> None:
    check_all(Decoder().receive_data(STREAM * 50), EXCHANGE * 50)


@pytest.mark.parametrize("feed", [take, take_in_place])
def test_one_byte_at_a_time(feed: Any) -> None:
    check_all(feed(Decoder(), chunks(STREAM, [1] * len(STREAM))), EXCHANGE)


@pytest.mark.parametrize("feed", [take, take_in_place])
def test_cut_in_two_at_every_byte(feed: Any) -> None:
    for cut in range(len(STREAM) + 1):
        decoder = Decoder()
        pieces = [STREAM[:cut], STREAM[cut:]]
        check_all(feed(decoder, pieces), EXCHANGE)


def test_a_message_comes_with_its_last_byte_and_not_before() -> None:
    decoder = Decoder()
    for frame in FRAMES:
        assert decoder.receive_data(frame[:-1]) == []
        assert len(decoder.receive_data(frame[-1:])) == 1


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("I")])
def test_any_buffer_will_do(kind: Any) -> None:
    message = next(made for made in (Result(1, "a" * length) for length in range(4)) if encode(made).size % 4 == 0)
    assert Decoder().receive_data(kind(bytes(encode(message)))) == [(message, [])]


def test_what_arrived_does_not_depend_on_the_chunk() -> None:
    chunk = bytearray(STREAM)
    got = Decoder().receive_data(chunk)
    chunk[:] = bytes(len(chunk))
    check_all(got, EXCHANGE)


# Large tensors.


def large(numel: int = 300_000) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.int32)


def test_a_large_tensor_is_received_in_place() -> None:
    tensor = large()
    frame = bytes(encode(Ping(1), [tensor]))
    decoder = Decoder()
    head = len(frame) - tensor.nbytes
    assert decoder.receive_data(frame[: head + 100]) == []
    room = decoder.writable()
    assert len(room) == tensor.nbytes - 100
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(room))
    room[:] = frame[head + 100 :]
    decoder.wrote(len(room))
    envelope = decoder.next()
    assert envelope is not None
    assert envelope.tensors[0].data_ptr() == address - 100
    check_tensor(envelope.tensors[0], tensor)


def test_in_place_stops_at_the_end_of_its_buffer() -> None:
    sent = [(Ping(1), [large(), large(70_000)]), (Ping(2), [torch.ones(3)]), (Ping(3), ())]
    data = b"".join(bytes(encode(*each)) for each in sent)
    for step in (10_000, 65_536, 1_000_000, len(data)):
        steps = [step] * (len(data) // step + 1)
        check_all(take(Decoder(), chunks(data, steps)), sent)
        check_all(take_in_place(Decoder(), chunks(data, steps)), sent)


@pytest.mark.parametrize("around", [-1, 0, 1])
def test_the_border_between_collected_and_in_place(around: int) -> None:
    tensor = torch.arange(decoder_module._COLLECT_BELOW + around).to(torch.uint8)
    sent = [(Ping(1), [tensor, torch.ones(5), tensor.clone()]), (Ping(2), ())]
    data = b"".join(bytes(encode(*each)) for each in sent)
    for step in (777, 40_000, len(data)):
        steps = [step] * (len(data) // step + 1)
        check_all(take(Decoder(), chunks(data, steps)), sent)
        check_all(take_in_place(Decoder(), chunks(data, steps)), sent)


def test_large_metadata_is_collected_and_the_buffer_shrinks_again() -> None:
    sent = [(Result(1, "x" * 3_000_000), ()), (Ping(2), ())]
    data = b"".join(bytes(encode(*each)) for each in sent)
    decoder = Decoder()
    check_all(take_in_place(decoder, chunks(data, [100_000] * 40)), sent)
    assert len(decoder._buffer) > 3_000_000
    decoder.writable()
    assert len(decoder._buffer) == SMALL


def test_the_buffer_does_not_grow_with_the_stream() -> None:
    decoder = Decoder()
    check_all(take_in_place(decoder, chunks(STREAM * 300, [60_001] * 100)), EXCHANGE * 300)
    assert len(decoder._buffer) <= 4 * SMALL


# Headers that lie.


def head(
    kind: int = 4, metadata: int = 2, table: int = 0, payload: int = 0, magic: bytes = b"BH", version: int = 1
) -> bytes:
    return HEADER.pack(magic, version, kind, metadata, table, payload)


BAD_HEADS = {
    "magic": (head(magic=b"BX"), "not a frame"),
    "plain text": (b"GET / HTTP/1.1\r\nHost: x\r\n", "not a frame"),
    "version 0": (head(version=0), "version 0"),
    "version 2": (head(version=2), "version 2; this worker speaks version 1"),
    "kind 0": (head(kind=0), "unknown kind 0"),
    "kind 9": (head(kind=max(KINDS) + 1), "unknown kind"),
    "kind 255": (head(kind=255), "unknown kind 255"),
    "payload without table": (head(payload=1), "without a tensor table"),
    "table too large": (head(table=MAX_TABLE + 1), "over the limit"),
    "table 4 GiB": (head(table=(1 << 32) - 1), "over the limit"),
    "payload 2**63-1": (head(table=41, payload=(1 << 63) - 1), "max_message_bytes"),
    "payload 2**64-1": (head(table=41, payload=(1 << 64) - 1), "max_message_bytes"),
}


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_bad_header_is_refused_before_anything_is_collected(name: str) -> None:
    data, text = BAD_HEADS[name]
    decoder = Decoder()
    assert decoder.receive_data(data[: HEADER.size - 1]) == []
    with pytest.raises(ProtocolError, match=text):
        decoder.receive_data(data[HEADER.size - 1 : HEADER.size])
    assert len(decoder._buffer) == SMALL


@pytest.mark.parametrize("name", BAD_HEADS)
def test_a_bad_header_is_refused_after_a_good_frame(name: str) -> None:
    with pytest.raises(ProtocolError):
        Decoder().receive_data(FRAMES[0] + BAD_HEADS[name][0] + bytes(100))


def test_the_limit_is_exact() -> None:
    frame = bytes(encode(Result(1, "abc"), [torch.ones(4)]))
    assert len(Decoder(len(frame)).receive_data(frame)) == 1
    with pytest.raises(ProtocolError, match=f"{len(frame)} bytes .* limit of {len(frame) - 1}"):
        Decoder(len(frame) - 1).receive_data(frame[: HEADER.size])


def test_the_limit_is_for_each_message() -> None:
    frame = bytes(encode(Ping(1)))
    assert len(Decoder(len(frame)).receive_data(frame * 1000)) == 1000


BAD_BODIES = {
    "not msgpack": b"\xc1",
    "empty": b"",
    "a map": b"\x80",
    "a wrong type": b"\x91\xa1x",
    "too few fields": b"\x90",
    "something after it": b"\x91\x01\x02",
    "cut short": b"\x91\xcd\x01",
    "bad UTF-8 in a field that is not known": b"\x92\x01\xa2\xff\xfe",
    "a map whose key is a map": b"\x92\x01\x81\x80\x01",
    "a list that claims 2**32-1 items": b"\x92\x01\xdd\xff\xff\xff\xff",
    "a map that claims 2**32-1 items": b"\x92\x01\xdf\xff\xff\xff\xff",
    "bytes that claim 2**32-1": b"\x92\x01\xc6\xff\xff\xff\xff",
    "text that claims 2**32-1": b"\x92\x01\xdb\xff\xff\xff\xff",
    "a timestamp out of range": b"\x92\x01\xc7\x0c\xff\x00\x00\x00\x00\x7f" + b"\xff" * 7,
}
# A field more than the message has, from a peer that may be newer, is skipped: only its length is looked at.
UNREAD = {"bad UTF-8 in a field that is not known", "a map whose key is a map", "a timestamp out of range"}


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("kind", [KIND_OF[Ping], KIND_OF[Call], KIND_OF[Failure]])
def test_bad_metadata_is_refused(name: str, kind: int) -> None:
    body = BAD_BODIES[name]
    tolerated = kind == KIND_OF[Ping] and name in UNREAD
    tracemalloc.start()
    try:
        got = outcome(head(kind, len(body)) + body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert got is None or tolerated
    assert peak < 1_000_000


@pytest.mark.parametrize("kind", [KIND_OF[Call], KIND_OF[Failure], KIND_OF[Ping], KIND_OF[Goodbye]])
@pytest.mark.parametrize(
    "step", [b"\x91", b"\x81\xa1k", b"\xdd\x00\x00\x00\x01", b"\x81\x91"], ids=["list", "map", "long", "key"]
)
@pytest.mark.parametrize("end", [b"\xc0", b""], ids=["complete", "cut"])
def test_nesting_100_000_deep_is_refused(kind: int, step: bytes, end: bytes) -> None:
    fields = {KIND_OF[Call]: b"\x92\x01", KIND_OF[Failure]: b"\x96\x01" + b"\xa1x" * 4}.get(kind, b"\x9f")
    body = fields + step * 100_000 + end
    assert outcome(head(kind, len(body)) + body) is None


def test_nesting_that_msgpack_takes_is_refused_by_the_codec() -> None:
    for depth in (110, 300, 800):
        body = b"\x92\x01" + b"\x92\x00" * depth + b"\xc0"
        got = outcome(head(KIND_OF[Call], len(body)) + body)
        if got is not None:
            with pytest.raises(ProtocolError, match="nested too deeply"):
                CODECS[0].unpack(got[0].message.tree, [])


# Lengths that are claimed, and do not come.


def one_tensor(nbytes: int) -> bytes:
    """All of a frame but its payload: a Ping with one tensor of uint8."""
    table = headers.encode_single(headers.DTYPE_CODES[torch.uint8], 0, (nbytes,), nbytes)
    return head(table=len(table), payload=nbytes) + b"\x91\x01" + table


@pytest.mark.parametrize(
    "claim",
    [
        head(metadata=(1 << 32) - 1),
        head(metadata=1 << 31),
        head(metadata=0, table=MAX_TABLE),
        head(metadata=(1 << 32) - 1, table=MAX_TABLE, payload=1 << 35),
        one_tensor(1 << 30),
        one_tensor(1 << 34),
        one_tensor((1 << 36) - 1000),
    ],
    ids=["M 4 GiB", "M 2 GiB", "T max", "all", "P 1 GiB", "P 16 GiB", "P 64 GiB"],
)
def test_a_claimed_length_is_waited_for_and_costs_nothing(claim: bytes) -> None:
    gc.collect()
    tracemalloc.start()
    before = resident()
    decoder = Decoder()
    try:
        for piece in (claim, b"\x00" * 1000, b"\x00" * 1000):
            assert decoder.receive_data(piece) == []
        _, peak = tracemalloc.get_traced_memory()
    except ProtocolError:  # the system does not promise as much memory
        peak = 0
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert len(decoder._buffer) == SMALL
    assert resident() - before < 8 << 20


@pytest.mark.parametrize("limit", [1 << 62, 1 << 63, 1 << 64, 1 << 70])
@pytest.mark.parametrize("nbytes", [1 << 40, 1 << 47, (1 << 62) - 100, (1 << 63) - 1])
def test_no_limit_makes_a_claim_dangerous(limit: int, nbytes: int) -> None:
    before = resident()
    decoder = Decoder(limit)
    try:
        assert decoder.receive_data(one_tensor(nbytes) + b"\x00" * 1000) == []
    except ProtocolError:
        pass
    assert len(decoder._buffer) == SMALL
    assert resident() - before < 8 << 20


def test_collecting_costs_in_proportion_to_what_arrived() -> None:
    decoder = Decoder()
    decoder.receive_data(head(metadata=(1 << 32) - 1))
    arrived = 0
    for _ in range(100):
        assert decoder.receive_data(bytes(10_000)) == []
        arrived += 10_000
        assert len(decoder._buffer) <= 4 * arrived + 2 * SMALL


# Every single-bit flip.


def test_every_single_bit_flip_of_the_exchange() -> None:
    """Messages, wait for more, or ProtocolError; then values, ProtocolError or MisuseError."""
    assert len(outcome(STREAM) or ()) == len(EXCHANGE)  # warm caches before memory is looked at
    before = resident()
    refused = 0
    start = 0
    for place, frame in enumerate(FRAMES):
        # What was before the flip is decoded as ever; what comes after it may be taken for its rest.
        rest = b"".join(FRAMES[place : place + 3])
        for bit in range(8 * len(frame)):
            flipped = bytearray(rest)
            flipped[bit // 8] ^= 1 << bit % 8
            got = outcome(bytes(flipped))
            assert resident() - before < 32 << 20, f"bit {bit % 8} of byte {start + bit // 8}"
            if got is None:
                refused += 1
            else:
                unpack(got)
        start += len(frame)
    assert refused > 2 * len(STREAM)  # headers and tables, at least, notice


def test_a_flip_in_the_middle_of_the_stream_leaves_what_came_before() -> None:
    for place in range(0, len(STREAM), 7):
        flipped = bytearray(STREAM)
        flipped[place] ^= 0x10
        decoder = Decoder()
        got = []
        try:
            for byte in chunks(bytes(flipped), [64] * (len(STREAM) // 64 + 1)):
                got += decoder.receive_data(byte)
        except ProtocolError:
            pass
        ends = [sum(map(len, FRAMES[: index + 1])) for index in range(len(FRAMES))]
        # Messages of the chunk that has the error may be lost with it.
        complete = sum(end <= place // 64 * 64 for end in ends)
        check_all(got[:complete], EXCHANGE[:complete])


# Hypothesis.

# One draw makes an example: many small draws take longer than what they test.


class Script(random.Random):
    """The choices of one example. Its number makes it again."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed

    def __repr__(self) -> str:
        return f"Script({self._seed})"

    def number(self, below: int) -> int:
        return int(self.random() * below)

    def pick(self, options: Sequence[Any]) -> Any:
        return options[self.number(len(options))]


scripts = st.integers(0, 1 << 64).map(Script)
cutting = st.binary(max_size=6).map(lambda data: [byte % 64 + 1 for byte in data])


def same(got: Any, sent: Any) -> bool:
    """Equal, NaNs included, and of the same types."""
    if type(got) is not type(sent):
        return False
    if isinstance(sent, dict):
        return same(list(got.items()), list(sent.items()))
    if isinstance(sent, list | tuple):
        return len(got) == len(sent) and all(map(same, got, sent))
    if isinstance(sent, msgspec.Struct):
        return same(msgspec.structs.astuple(got), msgspec.structs.astuple(sent))
    if isinstance(sent, float) and math.isnan(sent):
        return math.isnan(got)
    return bool(got == sent)


def judge(data: bytes, cuts: Sequence[int]) -> None:
    """In one piece or in many, by either way in: the same, and within bounds."""
    whole = outcome(data)
    decoder = Decoder()
    try:
        parts: list[Envelope] | None = take_in_place(decoder, chunks(data, cuts))
    except ProtocolError:
        parts = None
    assert (parts is None) == (whole is None)
    if whole is None or parts is None:
        return
    assert same([envelope.message for envelope in parts], [envelope.message for envelope in whole])
    assert [len(envelope.tensors) for envelope in parts] == [len(envelope.tensors) for envelope in whole]
    unpack(whole)


@fuzz("random")
@given(st.binary(max_size=40), scripts, cutting)
def test_random_bytes(data: bytes, script: Script, cuts: list[int]) -> None:
    start = script.pick([b"", b"", b"BH", b"BH\x01"])
    judge(start + data + script.randbytes(script.pick([0, 10, 30, 100])), cuts)


EDGES = [0, 1, 2, 3, 4, 8, 41, 100, 255, 1 << 16, 1 << 31, (1 << 32) - 1]
WIDE = [*EDGES, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@fuzz("framed")
@given(scripts, cutting)
def test_random_bodies_in_good_frames(script: Script, cuts: list[int]) -> None:
    """Metadata that is msgpack, or starts like it, under lengths that are right, or not."""
    kind = script.pick([*KINDS, 0, 9])
    fields = [script.number(256), *("x" for _ in range(script.pick([0, 0, 4]))), tree_from(script)]
    body = msgspec.msgpack.encode(fields[: script.pick([1, 2, 6, 6])])
    if script.number(2):
        body = body[: script.number(len(body))] + script.randbytes(script.number(40))
    if script.number(4):
        table = script.pick([0, 0, 0, min(len(body), script.number(64))])
        payload = min(len(body) - table, script.number(32)) if table else 0
        lengths = (len(body) - table - payload, table, payload)
    else:
        lengths = (script.pick(EDGES), script.pick(EDGES), script.pick(WIDE))
    judge(head(kind, *lengths) + body + FRAMES[1], cuts)


WORDS = [1, 2, 3, 0, 4, 8, 1 << 31, 1 << 62, (1 << 63) - 1, -1, -(1 << 63)]


@fuzz("tables")
@given(scripts, cutting)
def test_tables_of_plausible_fields(script: Script, cuts: list[int]) -> None:
    """Tables that hold together but for a lie or two, or none."""
    liar = script.number(2)

    def lies(chance: int) -> bool:
        return bool(liar) and not script.number(chance)

    sizes: list[int] = []
    count = 1 + script.number(3)
    entries = b""
    for _ in range(count):
        layout = script.number(7) if lies(6) else headers.STRIDED
        code = script.number(44) if lies(6) else script.pick([11, 14, 9])  # float32, complex64, float16
        flags = script.number(256) if lies(6) else script.pick([0, 0, headers.GRAD])
        words = WORDS if lies(6) else WORDS[:4]
        shape = [script.pick(words) for _ in range(script.number(4))]
        strides = [] if script.number(3) else [script.pick(words) for _ in shape]
        if strides:
            flags |= headers.STRIDES
        dtype = headers.DTYPES[code] if code < len(headers.DTYPES) else None
        nbytes = (spans.span(shape, strides) if strides else math.prod(shape)) * (dtype.itemsize if dtype else 1)
        offset = script.pick([1, 8, 1 << 32, (1 << 64) - 1]) if lies(6) else 0
        device = 2 if lies(10) else headers.META if not script.number(8) else headers.CPU
        buffer = headers.NO_BUFFER
        if lies(10):
            buffer = script.number(3)
        elif nbytes and device == headers.CPU:
            buffer = script.number(len(sizes) + 1)
            sizes += [0] * (buffer == len(sizes))
            sizes[buffer] = min(max(sizes[buffer], offset + nbytes), (1 << 64) - 1)
        fixed = (layout, code, flags, device, len(shape), buffer, offset)
        entries += struct.pack(f"<BBBBBIQ{len(shape + strides)}q", *fixed, *shape, *strides)
    if lies(8):
        count = script.pick([0, 1, 2, 3, (1 << 32) - 1])
    if sizes and lies(8):
        sizes[0] = script.pick([0, 1, 8, 24, 1 << 31, (1 << 64) - 1])
    table = struct.pack(f"<II{len(sizes)}Q", count, len(sizes), *sizes) + entries
    payload = sum(sizes) % (1 << 64)
    filler = bytes(min(payload, 300))
    judge(head(metadata=2, table=len(table), payload=payload) + b"\x91\x01" + table + filler, cuts)


def mutate(script: Script) -> bytes:
    """Some frames of the exchange, with a few bytes changed, lost, repeated or put in."""
    first = script.number(len(FRAMES))
    data = bytearray(b"".join(FRAMES[first : first + 1 + script.number(3)]))
    for _ in range(1 + script.number(2)):
        place = script.number(max(1, len(data)))
        count = 1 + script.number(8)
        change = script.number(11)
        if change == 0:
            del data[place:]
        elif change < 5 and data:
            data[place] ^= 1 << script.number(8)
        elif change < 7:
            data[place : place + count] = script.pick([b"\x00", b"\xff", b"\x7f", b"\x91"]) * count
        elif change == 7:
            del data[place : place + count]
        elif change == 8:
            data[place:place] = data[place : place + count]
        else:
            data[place:place] = script.randbytes(count)
    return bytes(data)


@fuzz("mutated")
@given(scripts, cutting)
def test_mutated_streams(script: Script, cuts: list[int]) -> None:
    judge(mutate(script), cuts)


LEAVES = [0, 1, 2, -1, 31, None, True, 2.5, math.nan, "x", b"ab", b"", 1 << 63, "", "cpu", "<f4", "float32", "strided"]
NAMES = ["operator:add", "builtins:ValueError", "torch:Size", "no.such:thing", "a:__b", "max", "enum:Enum", "add"]


def tree_from(script: Script, depth: int = 4) -> Any:
    """A tree of good tags, with anything for their parts."""
    kind = script.number(8)
    if depth == 0 or kind < 3:
        return script.pick(LEAVES)
    if kind == 3:
        return script.pick(NAMES)
    if kind == 4:
        return {script.pick(["a", "b", 1, None]): tree_from(script, depth - 1) for _ in range(script.number(3))}
    return [script.number(32), *(tree_from(script, depth - 1) for _ in range(script.number(5)))]


@fuzz("trees")
@given(scripts)
def test_trees_that_no_codec_made(script: Script) -> None:
    tensors = [torch.ones(2), torch.zeros(4, dtype=torch.uint8)]
    got = outcome(bytes(encode(Result(1, tree_from(script)), tensors)))
    assert got is not None
    unpack(got)


ATOMS = [None, True, -1, 1 << 70, -(1 << 64), 0.1, math.inf, math.nan, "", "\u20ac\U0001f600", b"", b"\xff" * 40, 2j]


def value_from(script: Script, depth: int = 4) -> Any:
    kind = script.number(6)
    if depth == 0 or kind < 3:
        return script.pick(ATOMS)
    parts = [value_from(script, depth - 1) for _ in range(script.number(5))]
    if kind == 3:
        return {f"key{index}": part for index, part in enumerate(parts)}
    return parts if kind == 4 else tuple(parts)


@fuzz("round")
@given(scripts, cutting)
def test_values_and_tensors_survive_any_cutting(script: Script, cuts: list[int]) -> None:
    value = value_from(script)
    shapes = [[script.number(5) for _ in range(script.number(4))] for _ in range(script.number(4))]
    tensors = [torch.arange(math.prod(shape)).reshape(shape) for shape in shapes]
    tree, packing = CODECS[0].pack((value, tensors))
    data = bytes(encode(Result(7, tree), packing.tensors)) + FRAMES[1]
    got = take_in_place(Decoder(), chunks(data, cuts))
    assert [envelope.message.id for envelope in got] == [7, 0]
    arrived, landed = CODECS[0].unpack(got[0].message.tree, got[0].tensors)
    assert same(arrived, value)
    for one, other in zip(landed, tensors, strict=True):
        check_tensor(one, other)


def test_there_are_enough_examples() -> None:
    assert sum(EXAMPLES.values()) >= 20_000


def test_msgspec_still_refuses_what_the_decoder_relies_on() -> None:
    """If a new msgspec raised other types, the tuple in `_read_head` would have to grow."""
    for body in BAD_BODIES.values():
        try:
            msgspec.msgpack.decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            pass
