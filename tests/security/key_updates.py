"""Requests for new keys of TLS 1.3 (RFC 8446, 4.6.3 and 7.2), which `ssl` cannot send."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

_HANDSHAKE, _APPLICATION_DATA, _KEY_UPDATE = 22, 23, 24


class KeyUpdates:
    """Writes records of a client on the socket of its connection, with the cipher TLS_AES_256_GCM_SHA384.

    ``keylog`` contains the secrets of the connection, and ``written`` is the number of records that it has sent since
    the handshake.
    """

    def __init__(self, sock: socket.socket, keylog: Path, written: int) -> None:
        self._socket = sock
        lines = [line.split() for line in keylog.read_text().splitlines()]
        self._secret = bytes.fromhex([line[2] for line in lines if line[0] == "CLIENT_TRAFFIC_SECRET_0"][-1])
        self._use()
        self._written = written

    def _expand(self, label: bytes, length: int) -> bytes:
        name = b"tls13 " + label
        info = struct.pack("!HB", length, len(name)) + name + b"\0"
        return HKDFExpand(hashes.SHA384(), length, info).derive(self._secret)

    def _use(self) -> None:
        self._cipher = AESGCM(self._expand(b"key", 32))
        self._iv = int.from_bytes(self._expand(b"iv", 12), "big")
        self._written = 0

    def records(self, count: int) -> bytes:
        """``count`` requests that the other side changes its keys too."""
        made = []
        for _ in range(count):
            made.append(self.record(struct.pack("!B3sB", _KEY_UPDATE, b"\0\0\1", 1), _HANDSHAKE))
            self._secret = self._expand(b"traffic upd", 48)
            self._use()
        return b"".join(made)

    def record(self, data: bytes, kind: int = _APPLICATION_DATA, padding: int = 0) -> bytes:
        """The next record, with these data."""
        plain = data + bytes((kind,)) + bytes(padding)
        head = struct.pack("!BHH", _APPLICATION_DATA, 0x0303, len(plain) + 16)
        nonce = (self._iv ^ self._written).to_bytes(12, "big")
        self._written += 1
        return head + self._cipher.encrypt(nonce, plain, head)

    def send(self, count: int) -> None:
        self._socket.sendall(self.records(count))
