"""Pipes: a connection after its greeting as a stream of bytes, with TLS or without. `strands` run on them."""

from __future__ import annotations

import socket
import ssl
from abc import ABC, abstractmethod

from backhaul.errors import ProtocolError
from backhaul.security.tls import RECORD, Tunnel
from backhaul.transport.base import ChannelClosed
from backhaul.transport.sockets import NO_WAIT, SEND_FLAGS, closed, tune

_CHUNK = 256 * 1024
_ENCRYPTED = 4 * RECORD


class Pipe(ABC):
    """A connection after its greeting, as a stream of bytes. No method waits. Not thread-safe."""

    def __init__(self, sock: socket.socket, keepalive: float) -> None:
        self.socket = sock
        tune(sock, keepalive)

    @abstractmethod
    def write(self, data: memoryview) -> int:
        """Take some of the bytes. Returns how many; 0 if there is no room."""

    @abstractmethod
    def read(self, place: memoryview) -> int:
        """Read some bytes into ``place``. Returns how many; 0 if none have come. Raises `ChannelClosed` at the end."""

    def flush(self) -> bool:
        """Continue to send the bytes that `write` took. Returns True if all are sent."""
        return True


class PlainPipe(Pipe):
    """A pipe without encryption. ``rest`` are bytes that came together with the end of the greeting."""

    def __init__(self, sock: socket.socket, keepalive: float, rest: bytes) -> None:
        super().__init__(sock, keepalive)
        self._rest = memoryview(rest)

    def write(self, data: memoryview) -> int:
        return _send(self.socket, data[:_CHUNK])

    def read(self, place: memoryview) -> int:
        if self._rest:
            count = min(len(place), len(self._rest))
            place[:count] = self._rest[:count]
            self._rest = self._rest[count:]
            return count
        return _receive(self.socket, place)


class TlsPipe(Pipe):
    """A pipe with TLS."""

    def __init__(self, sock: socket.socket, keepalive: float, tunnel: Tunnel) -> None:
        super().__init__(sock, keepalive)
        self._tunnel = tunnel
        self._chunk = memoryview(bytearray(_CHUNK))
        self._unsent = memoryview(b"")

    def write(self, data: memoryview) -> int:
        if not self.flush():
            return 0
        taken = 0
        try:
            while taken < min(len(data), _ENCRYPTED):
                taken += self._tunnel.stream.write(data[taken : taken + RECORD])
        except ssl.SSLError as error:
            raise ChannelClosed(str(error.reason or error)) from error
        self._unsent = memoryview(self._tunnel.outgoing.read())
        self.flush()
        return taken

    def flush(self) -> bool:
        while self._unsent:
            sent = _send(self.socket, self._unsent)
            if not sent:
                return False
            self._unsent = self._unsent[sent:]
        return True

    def read(self, place: memoryview) -> int:
        filled = 0
        while filled < len(place):
            try:
                count: int = self._tunnel.stream.read(len(place) - filled, place[filled:])  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                if filled or not (fed := _receive(self.socket, self._chunk)):
                    return filled
                self._tunnel.incoming.write(self._chunk[:fed])
                continue
            except ssl.SSLError as error:
                raise ProtocolError(f"bytes that are not what the peer encrypted: {error.reason or error}") from error
            if not count:
                raise ChannelClosed("the connection ended")
            filled += count
        return filled


def _send(sock: socket.socket, data: memoryview) -> int:
    try:
        return sock.send(data, SEND_FLAGS)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise closed(error) from error


def _receive(sock: socket.socket, place: memoryview) -> int:
    try:
        count = sock.recv_into(place, 0, NO_WAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        raise closed(error) from error
    if not count:
        raise ChannelClosed("the connection ended")
    return count
