"""Sealing: a stream of bytes as encrypted records, with keys that two workers have agreed on inside of TLS. No I/O.

TLS tells each worker who the peer is, and carries 32 random bytes from each side, which stay in memory. From both
together (HKDF with SHA-256) comes one key for each direction. A connection has its own two keys, and they end with it.

A record, where the length is little-endian::

    offset  size  field
    0       4     N: length of the data, 1 to 256 KiB
    4       N     the data, encrypted with AES-256-GCM
    4+N     16    the tag, of the data and of the length

The nonce of a record is its number on the connection, in its direction: 12 bytes, little-endian, from 0 on. It does not
travel. So no nonce comes twice with one key, and a record that is changed, left out, repeated or moved has a wrong tag
where it is read. A record that was cut off never becomes complete, as with TLS.

Python's `ssl` takes and gives 16 KiB at a time and copies them twice. It also uses the OpenSSL of the system, which may
be years older than that of `cryptography`. Hence this.
"""

from __future__ import annotations

import secrets

from backhaul.errors import OptionError, ProtocolError

LENGTH = 4
TAG = 16
MOST = 256 * 1024
"""A record has at most this many bytes of data."""
SHARE = 32
"""So many random bytes come from each side."""
_KEY = 32
_NONCE = 12
_CLIENT, _SERVER = b"backhaul, sealed, from client to server", b"backhaul, sealed, from server to client"


def is_possible() -> bool:
    """Whether the installed `cryptography` encrypts into memory that it is given: 47 and later do."""
    from cryptography.hazmat.primitives.ciphers import aead  # here, and not above: it takes 0.1 s

    return hasattr(aead.AESGCM, "encrypt_into") and hasattr(aead.AESGCM, "decrypt_into")


def require() -> None:
    """Raise `OptionError` if the installed `cryptography` is too old."""
    if not is_possible():
        raise OptionError('fabric="sealed" needs a newer version of cryptography: pip install --upgrade cryptography')


def share() -> bytes:
    """What one side contributes to the keys of a connection."""
    return secrets.token_bytes(SHARE)


class Sealer:
    """Makes records. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._encrypt = AESGCM(key).encrypt_into
        self._number = 0

    def seal(self, data: memoryview, place: memoryview) -> int:
        """Write a record with 1 to `MOST` bytes of data to ``place``; returns its length."""
        size = len(data)
        end = LENGTH + size + TAG
        place[:LENGTH] = size.to_bytes(LENGTH, "little")
        nonce = self._number.to_bytes(_NONCE, "little")
        self._number += 1
        self._encrypt(nonce, data, place[:LENGTH], place[LENGTH:end])
        return end


class Opener:
    """Reads records. Not thread-safe."""

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._decrypt = AESGCM(key).decrypt_into
        self._wrong: type[Exception] = InvalidTag
        self._number = 0

    @staticmethod
    def size(head: memoryview) -> int:
        """The length of the data of a record that begins with these bytes. Raises `ProtocolError`."""
        size = int.from_bytes(head[:LENGTH], "little")
        if not 0 < size <= MOST:
            raise ProtocolError(f"a sealed record of {size} bytes, which may have 1 to {MOST}")
        return size

    def open(self, record: memoryview, place: memoryview) -> None:
        """Decrypt a whole record into ``place``, which has the size of its data.

        Raises `ProtocolError` if it is not the next one that the peer has sealed. What is in ``place`` then means
        nothing.
        """
        nonce = self._number.to_bytes(_NONCE, "little")
        self._number += 1
        try:
            self._decrypt(nonce, record[LENGTH:], record[:LENGTH], place)
        except self._wrong:
            raise ProtocolError("bytes that are not what the peer encrypted: a sealed record has a wrong tag") from None


def agree(client: bytes, server: bytes, *, is_server: bool) -> tuple[Sealer, Opener]:
    """What one side seals and opens with, from the shares of both. Raises `ProtocolError` if these are none."""
    if len(client) != SHARE or len(server) != SHARE:
        raise ProtocolError(f"a greeting for sealed connections without {SHARE} bytes for their keys")
    ours, theirs = (_SERVER, _CLIENT) if is_server else (_CLIENT, _SERVER)
    return Sealer(_derive(client + server, ours)), Opener(_derive(client + server, theirs))


def _derive(shares: bytes, purpose: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=_KEY, salt=None, info=purpose).derive(shares)
