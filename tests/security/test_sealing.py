"""Sealed records: what comes out is what went in, and nothing else comes out at all."""

from __future__ import annotations

import hashlib
import hmac
import os

import pytest
from cryptography.hazmat.primitives.ciphers import aead
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from backhaul.errors import OptionError, ProtocolError
from backhaul.security import sealing
from backhaul.security.sealing import LENGTH, MOST, SHARE, TAG, Opener, Sealer, agree

CLIENT, SERVER = bytes(range(SHARE)), bytes(range(100, 100 + SHARE))


def record(sealer: Sealer, data: bytes) -> bytearray:
    made = bytearray(LENGTH + len(data) + TAG)
    assert sealer.seal(memoryview(data), memoryview(made)) == len(made)
    return made


def opened(opener: Opener, made: bytes | bytearray) -> bytes:
    view = memoryview(made)
    place = bytearray(opener.size(view))
    opener.open(view, memoryview(place))
    return bytes(place)


def ends() -> tuple[Sealer, Opener]:
    """A client that seals, a server that opens."""
    return agree(CLIENT, SERVER, is_server=False)[0], agree(CLIENT, SERVER, is_server=True)[1]


@pytest.mark.parametrize("is_server", [False, True])
def test_both_ways(is_server: bool) -> None:
    sealer, _ = agree(CLIENT, SERVER, is_server=is_server)
    _, opener = agree(CLIENT, SERVER, is_server=not is_server)
    for size in (1, 15, 16, 17, 100_000, MOST):
        data = os.urandom(size)
        made = record(sealer, data)
        assert data[:16] not in made or size < 16
        assert opened(opener, made) == data


def test_a_record_is_what_the_page_says() -> None:
    """Read with nothing of `sealing`: the keys by HKDF, the number as the nonce, the length authenticated."""

    def hkdf(secret: bytes, info: bytes) -> bytes:
        extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
        return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()

    key = hkdf(CLIENT + SERVER, b"backhaul, sealed, from client to server")
    sealer, _ = ends()
    for number in range(3):
        made = record(sealer, b"tensor")
        assert made[:LENGTH] == (6).to_bytes(4, "little")
        plain = AESGCM(key).decrypt(number.to_bytes(12, "little"), bytes(made[LENGTH:]), bytes(made[:LENGTH]))
        assert plain == b"tensor"


def test_each_direction_and_each_connection_has_its_own_key() -> None:
    near, _ = agree(CLIENT, SERVER, is_server=False)
    far, _ = agree(CLIENT, SERVER, is_server=True)
    other, _ = agree(CLIENT, os.urandom(SHARE), is_server=False)
    assert len({bytes(record(each, bytes(64))) for each in (near, far, other)}) == 3


def test_any_bit_that_is_wrong_is_noticed() -> None:
    sealer, _ = ends()
    made = record(sealer, b"seven bytes")
    for bit in range(8 * LENGTH, 8 * len(made)):
        _, opener = ends()
        made[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="not what the peer encrypted"):
            opened(opener, made)
        made[bit // 8] ^= 1 << bit % 8
    assert opened(ends()[1], made) == b"seven bytes"


def test_a_length_that_is_wrong_is_noticed() -> None:
    sealer, opener = ends()
    made = record(sealer, b"seven bytes") + bytes(100)
    made[0] += 1
    with pytest.raises(ProtocolError, match="not what the peer encrypted"):
        opened(opener, made[: LENGTH + 12 + TAG])


@pytest.mark.parametrize(("good", "bad"), [((0,), 0), ((), 1), ((0,), 2)], ids=["repeated", "moved", "left out"])
def test_records_out_of_their_order_are_noticed(good: tuple[int, ...], bad: int) -> None:
    sealer, opener = ends()
    made = [record(sealer, bytes([number])) for number in range(3)]
    for number in good:
        assert opened(opener, made[number]) == bytes([number])
    with pytest.raises(ProtocolError, match="not what the peer encrypted"):
        opened(opener, made[bad])


def test_a_record_is_not_good_for_the_other_direction() -> None:
    """A peer's own words, sent back to it."""
    sealer, opener = agree(CLIENT, SERVER, is_server=False)
    with pytest.raises(ProtocolError, match="not what the peer encrypted"):
        opened(opener, record(sealer, b"hello"))


@pytest.mark.parametrize("size", [0, MOST + 1, 2**32 - 1])
def test_lengths_that_no_record_has_are_refused_before_anything_is_kept_for_them(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"a sealed record of {size} bytes"):
        Opener.size(memoryview(size.to_bytes(4, "little")))


@pytest.mark.parametrize("shares", [(b"", SERVER), (CLIENT, b""), (CLIENT[:-1], SERVER), (CLIENT, SERVER + b"x")])
def test_there_is_no_key_without_both_shares(shares: tuple[bytes, bytes]) -> None:
    with pytest.raises(ProtocolError, match="without 32 bytes for their keys"):
        agree(*shares, is_server=True)


def test_an_old_cryptography_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sealing.require()

    class Old:
        pass

    monkeypatch.setattr(aead, "AESGCM", Old)
    with pytest.raises(OptionError, match="pip install --upgrade cryptography"):
        sealing.require()
