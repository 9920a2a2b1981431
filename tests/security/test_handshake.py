"""The greeting: what both sides send, and every way in which one of them may be wrong."""

from __future__ import annotations

import struct

import msgspec
import pytest

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.security.handshake import (
    HEAD_SIZE,
    LEAVING,
    MAGIC,
    MAX_MESSAGE,
    Hello,
    LeavingError,
    Welcome,
    decode_hello,
    decode_welcome,
    encode,
    length_of_hello,
    length_of_welcome,
)

HELLO = Hello("group", 1, "worker1", 0)
WELCOME = Welcome(0, "worker0")


def read_hello(data: bytes) -> Hello:
    assert len(data) - HEAD_SIZE == length_of_hello(data[:HEAD_SIZE])
    return decode_hello(data[HEAD_SIZE:])


def read_welcome(data: bytes) -> Welcome:
    assert len(data) - HEAD_SIZE == length_of_welcome(data[:HEAD_SIZE])
    return decode_welcome(data[HEAD_SIZE:])


def test_both_sides_learn_who_the_other_is() -> None:
    assert read_hello(encode(HELLO)) == HELLO
    assert read_welcome(encode(WELCOME)) == WELCOME


def test_the_bytes_are_those_of_the_table() -> None:
    addresses = msgspec.msgpack.encode(HELLO.addresses)
    message = b"\x9c\xa5group\x01\xa7worker1\x00" + addresses + b"\xa0\x01\xa3tls\xc2\x01\xa0\x00"
    assert encode(HELLO) == b"BHL2" + struct.pack("<H", len(message)) + message
    message = b"\x98\x00\xa7worker0\xa0\xa0\xa3tls\xc2\x01\xa0"
    assert encode(WELCOME) == b"BHL2" + struct.pack("<H", len(message)) + message


# Not our protocol at all.


def test_a_server_s_error_quotes_plain_text() -> None:
    with pytest.raises(ProtocolError, match="does not speak Backhaul: it starts with b'GET '"):
        length_of_hello(b"GET / HTTP/1.1\r\n"[:HEAD_SIZE])


def test_a_client_s_error_quotes_plain_text() -> None:
    with pytest.raises(ProtocolError, match="not a Backhaul worker: it says b'SSH-'"):
        length_of_welcome(b"SSH-2.0-OpenSSH_9.2p1"[:HEAD_SIZE])


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 65535])
def test_an_oversized_greeting_is_refused_by_its_length(length: int) -> None:
    head = MAGIC + struct.pack("<H", length)
    with pytest.raises(ProtocolError, match=f"a greeting of {length} bytes; {MAX_MESSAGE} is the limit"):
        length_of_hello(head)
    with pytest.raises(ProtocolError, match=f"an answer of {length} bytes; {MAX_MESSAGE} is the limit"):
        length_of_welcome(head)


def test_the_longest_greeting_is_within_the_limit() -> None:
    hello = Hello("f" * 32, 1 << 31, "\U0001f600" * 128, 1 << 31)
    assert len(msgspec.msgpack.encode(hello)) < MAX_MESSAGE
    assert read_hello(encode(hello)) == hello


GARBAGE = {
    "not msgpack": b"\xc1",
    "empty": b"",
    "a map": b"\x80",
    "wrong types": b"\x94\x01\x02\x03\x04",
    "too few": b"\x91\xa1g",
    "cut short": b"\x94\xa5gr",
    "more after it": msgspec.msgpack.encode(HELLO) + b"\x00",
    "bad UTF-8": b"\x94\xa2\xff\xfe\x01\xa1w\x00",
    "nested without end": b"\x95\xa1g\x01\xa1w\x00" + b"\x91" * 4000,
    "a number beyond 64 bits": b"\x94\xa1g\xcb" + b"\x7f" * 8 + b"\xa1w\x00",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_garbled_greeting_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError, match="a greeting that cannot be read"):
        decode_hello(GARBAGE[name])


GARBLED_ANSWERS = {
    **GARBAGE,
    "more after it": msgspec.msgpack.encode(WELCOME) + b"\x00",
    "bad UTF-8": b"\x93\x00\xa2\xff\xfe\xa0",
    "nested without end": b"\x94\x00\xa1w\xa0" + b"\x91" * 4000,
}


@pytest.mark.parametrize("name", GARBLED_ANSWERS)
def test_a_garbled_answer_is_a_protocol_error(name: str) -> None:
    with pytest.raises(ProtocolError, match="an answer that cannot be read"):
        decode_welcome(GARBLED_ANSWERS[name])


def test_the_client_is_told_why_it_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="refused the connection: it belongs to another group"):
        read_welcome(encode(Welcome(0, "worker0", "it belongs to another group")))
    with pytest.raises(LeavingError):
        read_welcome(encode(Welcome(0, "worker0", LEAVING)))
