"""The short way for one small tensor writes and reads the same bytes as the general way."""

from __future__ import annotations

import ctypes
import random
import struct

import pytest
import torch
from recorded_exchange import head
from tensor_trips import DTYPES, check, coo, filled, land

from backhaul.errors import ProtocolError, UnsendableError
from backhaul.wire import headers, landing, tensors
from backhaul.wire.decoder import Decoder
from backhaul.wire.frames import encode
from backhaul.wire.landing import Landing, LandingTogether, land_plain, landing_of
from backhaul.wire.messages import Gradients, Pass, Ping
from backhaul.wire.tensors import INLINE, Packed, pack_small, pack_tensors

base = torch.arange(60.0)

KINDS = {
    "scalar": torch.tensor(3.5),
    "one": torch.ones(1),
    "vector": torch.arange(5),
    "matrix": torch.randn(3, 4),
    "many dimensions": torch.ones([1] * 60 + [2]),
    "leaf": torch.ones(3, requires_grad=True),
    "computed": torch.ones(3, requires_grad=True) * 2,
    "parameter": torch.nn.Parameter(torch.ones(2, 2)),
    "frozen": torch.nn.Parameter(torch.ones(2, 2), requires_grad=False),
    "part of a storage": base[10:20],
    "contiguous view": base.reshape(6, 10)[2:4],
    "conj": torch.tensor([1 + 2j]).conj(),
    "neg": torch.tensor([1 + 2j]).conj().imag,
    "largest": torch.zeros(INLINE, dtype=torch.uint8),
    "size one strides": torch.empty_strided((1, 3), (17, 1)).fill_(2),
}

OTHERS = {
    "transposed": base.reshape(6, 10).t(),
    "gaps": base[::2],
    "expanded": torch.ones(1).expand(4),
    "too large": torch.zeros(INLINE + 1, dtype=torch.uint8),
    "empty": torch.zeros(0, 3),
    "meta": torch.empty(3, device="meta"),
    "sparse": coo([[0, 1]], torch.ones(2), (3,)),
}


def general(tensor: torch.Tensor) -> Packed:
    """Pack by the general way, which also takes several tensors."""
    return tensors._pack([tensor])


def data_of(packed: Packed) -> bytes:
    return b"".join([packed.table, *packed.buffers])


def land_all_short(table: bytes, data: bytes) -> list[torch.Tensor] | None:
    buffer = ctypes.create_string_buffer(data, len(data))
    return land_plain(table, ctypes.addressof(buffer), len(data))


def land_short(table: bytes, data: bytes) -> torch.Tensor | None:
    landed = land_all_short(table, data)
    if landed is None:
        return None
    (tensor,) = landed
    return tensor


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_and_the_general_way_make_the_same_bytes(kind: str) -> None:
    tensor = KINDS[kind]
    small = pack_small(tensor)
    assert small is not None
    table, data = small
    packed = general(tensor)
    assert table == packed.table
    assert table + data == data_of(packed) == data_of(pack_tensors([tensor]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3)], ids=str)
def test_every_dtype_by_both_ways(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, dtype)
    small = pack_small(tensor)
    assert small is not None
    table, data = small
    packed = general(tensor)
    assert table + data == data_of(packed)
    (expected,) = land(packed)
    got = land_short(table, data)
    if dtype is torch.complex32:  # only the general way hides torch's warning
        assert got is None
        return
    assert got is not None
    check(got, expected)
    check(got, tensor)


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_and_the_general_way_receive_the_same_tensor(kind: str) -> None:
    tensor = KINDS[kind]
    packed = general(tensor)
    (expected,) = land(packed)
    got = land_short(packed.table, b"".join(packed.buffers))
    if got is None:  # a Parameter, or a tensor with a bit set: the general way handles it
        assert type(tensor) is not torch.Tensor or tensor.is_conj() or tensor.is_neg()
        return
    check_same(got, expected)


def check_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.stride() == expected.stride()
    assert (got.dtype, got.shape, got.requires_grad) == (expected.dtype, expected.shape, expected.requires_grad)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_are_left_to_the_general_way(kind: str) -> None:
    tensor = OTHERS[kind]
    assert pack_small(tensor) is None
    assert bytes(encode(Ping(1), [tensor])).endswith(data_of(general(tensor)))


@pytest.mark.parametrize("kind", [*KINDS, *OTHERS])
def test_small_and_other_tensors_survive_a_frame(kind: str) -> None:
    tensor = {**KINDS, **OTHERS}[kind]
    (envelope,) = Decoder().receive_data(bytes(encode(Ping(1), [tensor])))
    (got,) = envelope.tensors
    assert type(got) is type(tensor)
    assert got.requires_grad == tensor.requires_grad
    if not tensor.is_meta:
        assert torch.equal(got.detach().to_dense(), tensor.detach().to_dense())


def test_a_storage_that_was_shrunk_is_not_read() -> None:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsendableError, match="was freed or shrunk"):
        pack_small(tensor)
    with pytest.raises(UnsendableError, match="was freed or shrunk"):
        general(tensor)
    tail = torch.ones(100)[50:]
    tail.untyped_storage().resize_(220)
    with pytest.raises(UnsendableError, match="was freed or shrunk"):
        pack_small(tail)


def test_a_received_tensor_has_its_own_memory() -> None:
    data = bytearray(bytes(encode(Ping(1), [torch.ones(4)])))
    decoder = Decoder()
    (envelope,) = decoder.receive_data(data)
    decoder.receive_data(bytes(encode(Ping(2), [torch.zeros(4)])))
    assert envelope.tensors[0].tolist() == [1, 1, 1, 1]
    envelope.tensors[0].resize_(1000)


def test_a_reader_in_inference_mode_takes_the_general_way() -> None:
    data = bytes(encode(Ping(1), [torch.ones(4, requires_grad=True)]))
    with torch.inference_mode():
        (envelope,) = Decoder().receive_data(data)
    assert not envelope.tensors[0].is_inference()
    assert envelope.tensors[0].requires_grad


@pytest.mark.parametrize("inference", [False, True])
def test_a_table_of_no_tensors(inference: bool) -> None:
    with torch.inference_mode(inference):
        (envelope,) = Decoder().receive_data(frame_of(bytes(8), b""))
    assert envelope.tensors == []


def test_every_single_bit_flip_by_both_ways() -> None:
    """The general way accepts whatever the short way accepts, with the same result."""
    sent = torch.arange(6.0).reshape(2, 3).requires_grad_()
    packed = general(sent)
    data = b"".join(packed.buffers)
    taken = 0
    for bit in range(8 * len(packed.table)):
        flipped = bytearray(packed.table)
        flipped[bit // 8] ^= 1 << bit % 8
        table = bytes(flipped)
        try:
            got = land_short(table, data)
        except ProtocolError:
            with pytest.raises(ProtocolError):
                headers._parse(table, len(data))
            continue
        if got is None:
            continue
        taken += 1
        parsed = headers._parse(table, len(data))
        assert parsed.sizes == [len(data)]
        assert parsed.headers[0].dtype is got.dtype
        assert tuple(parsed.headers[0].sizes) == tuple(got.shape)
        assert bool(parsed.headers[0].flags & headers.GRAD) == got.requires_grad
    assert 0 < taken < 40


def clones(seed: int) -> list[torch.Tensor]:
    """Some plain tensors, each with a storage of its own."""
    chosen = random.Random(seed).choices(list(KINDS), k=2 + seed % 7)
    found = []
    for kind in chosen:
        tensor = KINDS[kind]
        if tensor.is_conj() or tensor.is_neg():
            bare = torch.tensor([seed + 2j]).conj()
            found.append(bare if tensor.is_conj() else bare.imag)
        elif type(tensor) is torch.nn.Parameter:
            found.append(torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad))
        else:
            found.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_several_tensors_by_both_ways(seed: int) -> None:
    sent = clones(seed)
    packed = tensors._pack(sent)
    for _ in range(2):  # the second time, the table is remembered
        assert tensors._pack_plain(sent) == packed
    got = land_all_short(packed.table, b"".join(packed.buffers))
    assert (got is None) == any(tensor.is_conj() or tensor.is_neg() for tensor in sent)
    if got is not None:
        for one, other, tensor in zip(got, land(packed), sent, strict=True):
            assert type(one) is type(other) is type(tensor)
            check_same(one, other)
            one.untyped_storage().resize_(1000)  # it has its own memory


large = torch.arange(2.0 * INLINE)
APART: dict[str, list[torch.Tensor]] = {
    "large": [torch.ones(3), large, torch.ones(2)],
    "part of a storage": [torch.ones(3), base[:7], large[INLINE:]],
}
TOGETHER: dict[str, list[torch.Tensor]] = {
    "twice": [base, torch.ones(1), base],
    "aliases": [base[:10], base[5:20]],
    "neighbours": [base[:10], base[10:20]],
    **{kind: [torch.ones(2), tensor] for kind, tensor in OTHERS.items() if kind != "too large"},
}


@pytest.mark.parametrize("kind", APART)
def test_large_buffers_among_several_are_not_copied(kind: str) -> None:
    packed = tensors._pack_plain(APART[kind])
    expected = tensors._pack(APART[kind])
    assert packed is not None
    assert packed[:2] == expected[:2]
    assert list(map(id, packed.keep)) == list(map(id, expected.keep))


@pytest.mark.parametrize("kind", TOGETHER)
def test_other_tensors_among_several_are_left_to_the_general_way(kind: str) -> None:
    assert tensors._pack_plain(TOGETHER[kind]) is None
    packed = tensors._pack(TOGETHER[kind])
    if kind != "gaps":  # they are not sent, so what arrives is plain
        assert land_all_short(packed.table, b"".join(packed.buffers)) is None


def test_one_of_several_storages_was_shrunk() -> None:
    shrunk = torch.ones(100)
    shrunk.untyped_storage().resize_(0)
    for pack in (tensors._pack_plain, tensors._pack):
        with pytest.raises(UnsendableError, match="was freed or shrunk"):
            pack([torch.ones(1), shrunk])


def test_a_message_with_several_tensors_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [torch.ones(3), torch.nn.Parameter(torch.zeros(2, 2)), torch.arange(4)]
    data = bytes(encode(Ping(1), sent))
    monkeypatch.delattr(Landing, "parse")
    (envelope,) = Decoder().receive_data(data)
    for one, other in zip(envelope.tensors, sent, strict=True):
        assert type(one) is type(other)
        check_same(one, other)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("size", [3, INLINE // 8])
def test_several_tensors_that_come_in_parts_are_collected(
    monkeypatch: pytest.MonkeyPatch, inference: bool, size: int
) -> None:
    sent = [torch.ones(size, requires_grad=True), torch.nn.Parameter(torch.zeros(2, 2)), torch.arange(size)]
    data = bytes(encode(Ping(1), [*sent]))
    following = bytes(encode(Ping(2)))
    decoder = Decoder()
    monkeypatch.delattr(Landing, "parse")
    with torch.inference_mode(inference):
        received = [
            each
            for start in range(0, len(data), 1 if size == 3 else 5000)
            for each in decoder.receive_data(data[start : start + (1 if size == 3 else 5000)])
        ]
        received += decoder.receive_data(following)
    assert [each.message.id for each in received] == [1, 2]
    for one, other in zip(received[0].tensors, sent, strict=True):
        assert type(one) is type(other)
        assert not one.is_inference()
        check_same(one, other)


def test_too_many_bytes_are_not_collected() -> None:
    small = [torch.zeros(INLINE, dtype=torch.uint8) for _ in range(4)]
    assert type(landing_of_frame(small)) is LandingTogether
    assert type(landing_of_frame([*small, torch.ones(1)])) is Landing
    assert type(landing_of_frame([torch.ones(1), torch.zeros(INLINE + 1, dtype=torch.uint8)])) is Landing
    assert type(landing_of_frame([base[:10], base[5:20]])) is Landing


def landing_of_frame(sent: list[torch.Tensor]) -> object:
    packed = pack_tensors(sent)
    return landing_of(packed.table, sum(map(len, packed.buffers)))


def test_no_memory_for_several_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*shape: int, **_: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    data = bytes(encode(Ping(1), [torch.ones(3), torch.ones(2)]))
    decoder = Decoder()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty)
        envelopes = [*decoder.receive_data(data[:50]), *decoder.receive_data(data[50:]), *decoder.receive_data(data)]
    assert len(envelopes) == 2
    for envelope in envelopes:
        with pytest.raises(MemoryError, match="has no room at the receiver: no memory for tensors of 20 bytes"):
            landing.land(envelope.tensors)
    (envelope,) = decoder.receive_data(data)
    assert envelope.tensors[0].tolist() == [1, 1, 1]


def test_every_single_bit_flip_in_a_table_of_several_by_both_ways() -> None:
    packed = tensors._pack([torch.arange(6.0).reshape(2, 3).requires_grad_(), torch.nn.Parameter(torch.ones(2))])
    data = b"".join(packed.buffers)
    taken = 0
    for bit in range(8 * len(packed.table)):
        flipped = bytearray(packed.table)
        flipped[bit // 8] ^= 1 << bit % 8
        table = bytes(flipped)
        got = land_all_short(table, data)
        if got is None:
            continue
        taken += 1
        general = Landing.parse(table, len(data))
        start = 0
        for index, size in enumerate(general.sizes):
            general.put(index, data[start : start + size])
            start += size
        for one, other in zip(got, general.tensors(), strict=True):
            assert type(one) is type(other)
            assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
            assert bytes(one.untyped_storage()) == bytes(other.untyped_storage())
    assert 0 < taken < 60


def test_a_size_that_overflows() -> None:
    table = struct.pack("<IIQBBBBBIQ3q", 1, 1, 8, 0, 1, 0, 0, 3, 0, 0, 1 << 62, 8, 1 << 62)
    with pytest.raises(ProtocolError):
        Decoder().receive_data(frame_of(table, bytes(8)))


def frame_of(table: bytes, payload: bytes) -> bytes:
    return head(4, 2, len(table), len(payload)) + b"\x91\x05" + table + payload


def test_an_unknown_dtype_is_refused() -> None:
    code = len(headers.DTYPES)
    table = struct.pack("<IIQBBBBBIQ1q", 1, 1, 8, 0, code, 0, 0, 1, 0, 0, 8)
    with pytest.raises(ProtocolError, match="which this torch does not know"):
        Decoder().receive_data(frame_of(table, bytes(8)))


@pytest.mark.parametrize("size", [1, 1024])
def test_gradients_that_are_one_tensor_arrive_apart(size: int) -> None:
    one = torch.rand(size)
    message = Gradients(Pass(1, 2, 3, False, False), (5, 6, 7), (0, 1, 2))
    (received,) = Decoder().receive_data(bytes(encode(message, [one, one, one.view(size)])))
    assert [torch.equal(each, one) for each in received.tensors] == [True] * 3
    received.tensors[0].zero_()
    assert torch.equal(received.tensors[1], one)
    assert torch.equal(received.tensors[2], one)


def test_a_large_gradient_of_several_tensors_travels_once() -> None:
    one = torch.ones(1025)
    frame = encode(Gradients(Pass(1, 2, 3, False, False), (5, 6), (0, 1)), [one, one])
    assert one.nbytes < frame.size < 2 * one.nbytes


def test_other_messages_keep_what_small_tensors_share() -> None:
    one = torch.ones(2)
    (received,) = Decoder().receive_data(bytes(encode(Ping(0), [one, one.view(2)])))
    received.tensors[0].zero_()
    assert received.tensors[1].tolist() == [0, 0]
