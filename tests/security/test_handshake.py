"""The greeting: both sides joined over bytes, then every way in which one of them may lie."""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable

import msgspec
import pytest

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.security import handshake
from backhaul.security.handshake import (
    CHALLENGE_SIZE,
    HELLO_HEAD_SIZE,
    MAGIC,
    MAX_MESSAGE,
    NONCE,
    PROOF,
    WELCOME_HEAD_SIZE,
    ClientHandshake,
    Hello,
    ServerHandshake,
    Welcome,
)

KEY = bytes(range(32))
OTHER = bytes(32)
HELLO = Hello("group", 1, "worker1", 0)
WELCOME = Welcome(0, "worker0")

Change = Callable[[bytes], bytes]


def keep(data: bytes) -> bytes:
    return data


def receive_hello(server: ServerHandshake, data: bytes) -> Hello:
    rest = server.receive_head(data[:HELLO_HEAD_SIZE])
    # A length that was changed upwards takes in what comes next.
    return server.receive_hello(data[HELLO_HEAD_SIZE : HELLO_HEAD_SIZE + rest].ljust(rest, b"\0"))


def receive_welcome(client: ClientHandshake, data: bytes) -> Welcome:
    rest = client.receive_head(data[:WELCOME_HEAD_SIZE])
    return client.receive_welcome(data[WELCOME_HEAD_SIZE : WELCOME_HEAD_SIZE + rest].ljust(rest, b"\0"))


def join(
    server_key: bytes = KEY,
    client_key: bytes = KEY,
    *,
    challenge: Change = keep,
    hello: Change = keep,
    answer: Change = keep,
    welcome: Welcome = WELCOME,
) -> tuple[Hello, Welcome, list[bytes]]:
    """A whole greeting, with what a man in the middle changes; returns all that was said, too."""
    server, client = ServerHandshake(server_key), ClientHandshake(client_key, HELLO)
    said = [challenge(server.challenge)]
    said.append(hello(client.receive_challenge(said[0])))
    got = receive_hello(server, said[1])
    said.append(answer(server.answer(welcome)))
    return got, receive_welcome(client, said[2]), said


def flip(place: int) -> Change:
    def change(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[place] ^= 1
        return bytes(changed)

    return change


# A good greeting.


@pytest.mark.parametrize("key", [KEY, b"", secrets.token_bytes(100)], ids=["secret", "unix", "long"])
def test_both_sides_learn_who_the_other_is(key: bytes) -> None:
    hello, welcome, said = join(key, key)
    assert (hello, welcome) == (HELLO, WELCOME)
    assert len(said[0]) == CHALLENGE_SIZE


def test_the_bytes_are_those_of_the_table() -> None:
    _, _, (challenge, hello, answer) = join()
    assert challenge[:4] == hello[:4] == b"BHL1"
    assert len(challenge) == 4 + 32
    addresses = msgspec.msgpack.encode(HELLO.addresses)
    message = b"\x9c\xa5group\x01\xa7worker1\x00" + addresses + b"\xa0\x01\xa3tls\xc2\x01\xa0\x00"
    assert hello[4 + 32 + 32 :] == struct.pack("<H", len(message)) + message
    message = b"\x98\x00\xa7worker0\xa0\xa0\xa3tls\xc2\x01\xa0"
    assert answer[32:] == struct.pack("<H", len(message)) + message
    assert (NONCE, PROOF) == (32, 32)


def test_no_two_greetings_are_alike() -> None:
    first, second = join()[2], join()[2]
    for one, other in zip(first, second, strict=True):
        assert one != other


def test_the_secret_is_never_sent() -> None:
    secret = secrets.token_bytes(32)
    said = b"".join(join(secret, secret)[2])
    server = ServerHandshake(secret)
    client = ClientHandshake(OTHER, HELLO)
    with pytest.raises(AuthenticationError) as refusal:
        receive_hello(server, client.receive_challenge(server.challenge))
    said += server.answer(Welcome(-1, "", "the secrets differ"), trusted=False)
    said += str(refusal.value).encode()
    for start in range(len(secret) - 3):
        assert secret[start : start + 4] not in said
    assert secret.hex().encode() not in said


# A wrong secret.


@pytest.mark.parametrize(
    ("server", "client"), [(KEY, OTHER), (KEY, b""), (b"", KEY), (KEY, KEY[:-1]), (KEY, KEY + KEY)]
)
def test_a_client_with_another_secret_is_refused(server: bytes, client: bytes) -> None:
    with pytest.raises(AuthenticationError, match="does not know this group's secret"):
        join(server, client)


def test_a_server_with_another_secret_is_refused() -> None:
    """Even if it takes our hello without being able to check it."""
    server, client = ServerHandshake(OTHER), ClientHandshake(KEY, HELLO)
    data = client.receive_challenge(server.challenge)
    server.receive_head(data[:HELLO_HEAD_SIZE])
    with pytest.raises(AuthenticationError, match="what listens there does not know"):
        receive_welcome(client, server.answer(WELCOME))


def test_a_server_that_proves_nothing_is_refused() -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, HELLO)
    receive_hello(server, client.receive_challenge(server.challenge))
    with pytest.raises(AuthenticationError, match="what listens there does not know"):
        receive_welcome(client, server.answer(WELCOME, trusted=False))


# Bytes changed on the way.


@pytest.mark.parametrize("place", range(4, CHALLENGE_SIZE))
def test_a_changed_server_nonce_is_noticed(place: int) -> None:
    with pytest.raises(AuthenticationError):
        join(challenge=flip(place))


def test_every_changed_byte_of_the_hello_is_noticed() -> None:
    size = len(join()[2][1])
    for place in range(size):
        length = HELLO_HEAD_SIZE - 2 <= place < HELLO_HEAD_SIZE
        with pytest.raises(ProtocolError if place < 4 else (AuthenticationError, ProtocolError)) as refusal:
            join(hello=flip(place))
        assert length or place < 4 or refusal.type is AuthenticationError


def test_every_changed_byte_of_the_answer_is_noticed() -> None:
    size = len(join()[2][2])
    for place in range(size):
        with pytest.raises((AuthenticationError, ProtocolError)):
            join(answer=flip(place))


def test_the_proof_of_one_side_is_no_use_to_the_other() -> None:
    """Reflection: what the client said is not what the server must prove."""

    def reflect(answer: bytes) -> bytes:
        proof = said[1][4 + NONCE : 4 + NONCE + PROOF]
        return proof + said[1][HELLO_HEAD_SIZE - 2 :]

    said = join()[2]
    with pytest.raises(AuthenticationError):
        join(answer=reflect)
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, HELLO)
    data = client.receive_challenge(server.challenge)
    proof, message = data[4 + NONCE : 4 + NONCE + PROOF], data[HELLO_HEAD_SIZE:]
    client.receive_head(proof + struct.pack("<H", len(message)))
    with pytest.raises(AuthenticationError):
        client.receive_welcome(message)


def test_a_recorded_hello_is_of_no_use_with_another_server() -> None:
    recorded = join()[2][1]
    with pytest.raises(AuthenticationError):
        receive_hello(ServerHandshake(KEY), recorded)


def test_a_recorded_answer_is_of_no_use_with_another_client() -> None:
    recorded = join()[2][2]
    client = ClientHandshake(KEY, HELLO)
    client.receive_challenge(ServerHandshake(KEY).challenge)
    with pytest.raises(AuthenticationError):
        receive_welcome(client, recorded)


# Not our protocol at all.


def test_a_server_says_what_plain_text_is() -> None:
    request = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: curl\r\nAccept: */*\r\n\r\n".ljust(HELLO_HEAD_SIZE)
    with pytest.raises(ProtocolError, match="does not speak Backhaul: it starts with b'GET '"):
        ServerHandshake(KEY).receive_head(request[:HELLO_HEAD_SIZE])


def test_a_client_says_what_plain_text_is() -> None:
    banner = b"SSH-2.0-OpenSSH_9.2p1".ljust(CHALLENGE_SIZE)
    with pytest.raises(ProtocolError, match="no Backhaul worker: it says b'SSH-'"):
        ClientHandshake(KEY, HELLO).receive_challenge(banner)


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 65535])
def test_an_oversized_greeting_is_refused_by_its_length(length: int) -> None:
    head = MAGIC + bytes(NONCE + PROOF) + struct.pack("<H", length)
    with pytest.raises(ProtocolError, match=f"a greeting of {length} bytes; {MAX_MESSAGE} is the limit"):
        ServerHandshake(KEY).receive_head(head)
    with pytest.raises(ProtocolError, match=f"an answer of {length} bytes; {MAX_MESSAGE} is the limit"):
        ClientHandshake(KEY, HELLO).receive_head(bytes(PROOF) + struct.pack("<H", length))


def test_the_longest_greeting_is_within_the_limit() -> None:
    hello = Hello("f" * 32, 1 << 31, "\U0001f600" * 128, 1 << 31)
    assert len(msgspec.msgpack.encode(hello)) < MAX_MESSAGE
    server, client = ServerHandshake(KEY), ClientHandshake(KEY, hello)
    assert receive_hello(server, client.receive_challenge(server.challenge)) == hello


# Nothing is decoded before the proof.

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


def claim(message: bytes, proof: bytes) -> bytes:
    return MAGIC + bytes(NONCE) + proof + struct.pack("<H", len(message)) + message


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_with_a_wrong_proof_is_a_wrong_proof(name: str) -> None:
    with pytest.raises(AuthenticationError, match="secret"):
        receive_hello(ServerHandshake(KEY), claim(GARBAGE[name], secrets.token_bytes(PROOF)))
    with pytest.raises(AuthenticationError, match="secret"):
        receive_hello(ServerHandshake(KEY), claim(GARBAGE[name], bytes(PROOF)))


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_with_a_good_proof_is_a_protocol_error(name: str) -> None:
    server, message = ServerHandshake(KEY), GARBAGE[name]
    proof = handshake._proof(KEY, b"client", server.challenge[4:], bytes(NONCE), message)
    with pytest.raises(ProtocolError, match="a greeting that cannot be read"):
        receive_hello(server, claim(message, proof))


GARBLED_ANSWERS = {
    **GARBAGE,
    "more after it": msgspec.msgpack.encode(WELCOME) + b"\x00",
    "bad UTF-8": b"\x93\x00\xa2\xff\xfe\xa0",
    "nested without end": b"\x94\x00\xa1w\xa0" + b"\x91" * 4000,
}


@pytest.mark.parametrize("name", GARBLED_ANSWERS)
@pytest.mark.parametrize("trusted", [True, False], ids=["proved", "a hint"])
def test_a_garbled_answer_is_a_protocol_error(name: str, trusted: bool) -> None:
    server, client, message = ServerHandshake(KEY), ClientHandshake(KEY, HELLO), GARBLED_ANSWERS[name]
    nonce = client.receive_challenge(server.challenge)[4 : 4 + NONCE]
    proof = handshake._proof(KEY, b"server", server.challenge[4:], nonce, message) if trusted else bytes(PROOF)
    with pytest.raises(ProtocolError, match="an answer that cannot be read"):
        receive_welcome(client, proof + struct.pack("<H", len(message)) + message)


@pytest.mark.parametrize("name", GARBAGE)
def test_a_garbled_answer_with_a_wrong_proof_is_not_decoded(name: str) -> None:
    client, message = ClientHandshake(KEY, HELLO), GARBAGE[name]
    client.receive_challenge(ServerHandshake(KEY).challenge)
    with pytest.raises(AuthenticationError, match="secret"):
        receive_welcome(client, secrets.token_bytes(PROOF) + struct.pack("<H", len(message)) + message)


# Refusals.


def test_the_client_is_told_why_it_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="refused the connection: it belongs to another group"):
        join(welcome=Welcome(0, "worker0", "it belongs to another group"))


def test_a_client_with_a_wrong_secret_is_told_so_without_proof() -> None:
    server, client = ServerHandshake(KEY), ClientHandshake(OTHER, HELLO)
    with pytest.raises(AuthenticationError):
        receive_hello(server, client.receive_challenge(server.challenge))
    answer = server.answer(Welcome(-1, "", "the secrets differ"), trusted=False)
    assert answer[:PROOF] == bytes(PROOF)
    with pytest.raises(AuthenticationError, match="refused the connection: the secrets differ"):
        receive_welcome(client, answer)
