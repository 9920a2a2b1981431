"""Every single-bit flip of an exchange, and random frames: the decoder returns messages, waits for more, or raises
ProtocolError."""

from __future__ import annotations

import math
import os
import random
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_exchange import (
    CODECS,
    EXCHANGE,
    FRAMES,
    STREAM,
    check_all,
    check_tensor,
    chunks,
    head,
    outcome,
    resident,
    take_in_place,
    unpack,
)

from backhaul.errors import ProtocolError
from backhaul.wire import headers, spans
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import encode
from backhaul.wire.messages import KINDS, Result

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_single_bit_flip_of_the_exchange() -> None:
    """The decoder returns messages, waits for more, or raises ProtocolError. Unpacking gives values, ProtocolError or
    MisuseError."""
    assert len(outcome(STREAM) or ()) == len(EXCHANGE)  # warm caches before memory is looked at
    before = resident()
    refused = 0
    start = 0
    for place, frame in enumerate(FRAMES):
        # Messages before the flip are decoded as usual. Bytes after it may be read as part of the damaged message.
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


# Hypothesis. One draw makes an example: many small draws take longer than what they test.


# 20,000 and more in all: see test_there_are_at_least_20_000_examples. `make slow` runs all, `make test` a third.
EXAMPLES = {"random": 5_000, "framed": 4_000, "tables": 4_000, "mutated": 6_000, "trees": 2_000, "round": 1_500}
SHARE = float(os.environ.get("BACKHAUL_EXAMPLES", 1 / 3))


def fuzz(kind: str) -> settings:
    return settings(
        max_examples=int(EXAMPLES[kind] * SHARE),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


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
    """Check that the outcome is the same, and within bounds, in one piece or in many, and by both ways of feeding."""
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
    """Metadata that is msgpack, or starts like it, under right or wrong lengths."""
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
    """Tables that are consistent, except for one or two lies, or none."""
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
    """Some frames of the exchange, with a few bytes changed, lost, repeated or inserted."""
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


def test_there_are_at_least_20_000_examples() -> None:
    assert sum(EXAMPLES.values()) >= 20_000
