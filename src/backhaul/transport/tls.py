"""Channels over TCP with TLS, and the greeting of all TCP connections.

OpenSSL works on memory here, not on the socket: `Tunnel` turns bytes into records and back, and the socket moves many
records at a time. So no call of OpenSSL waits. One lock around each call is enough to let one thread write while
another reads, which OpenSSL itself does not allow.

A read takes all bytes that the socket has, up to a chunk, and decrypts all complete records. So no arrived data stays
hidden in OpenSSL: the descriptor is readable exactly when there is something to read.

A member of a federation may be hostile. A request for new keys has 27 bytes and takes OpenSSL microseconds, and one
call of OpenSSL handles all requests that have come. So OpenSSL gets a few records at a time (`Records`), and a
connection ends if its records bring less data than their lengths promise.

Workers do not announce the end of a connection in TLS, only with a `Goodbye` of their own. So an end without a
`Goodbye` looks like a crash, and counts as one.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading

from backhaul.errors import AuthenticationError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.tls import RECORD, Credentials, Records, Tunnel, first_record
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.transport.greeting import Line, Steps
from backhaul.transport.pipe import Pipe, PlainPipe, TlsPipe
from backhaul.transport.plain import TcpChannel
from backhaul.transport.room import check_room
from backhaul.transport.segments import Budget
from backhaul.transport.sliced import SlicedChannel
from backhaul.transport.sockets import NO_WAIT, SEND_FLAGS, closed
from backhaul.transport.strands import Strands
from backhaul.wire.decoder import Decoder
from backhaul.wire.frames import Frame

_CHUNK = 16 * RECORD
# The bytes that are encrypted at a time. Records are copied twice before the kernel has them, so they should stay in
# the cache.
_SEND_CHUNK = 4 * RECORD
_FIRST_CHUNK = RECORD
_SMALL = 4096
_GREETING_CHUNK = 4096
_OVERHEAD = 22  # bytes of a record besides its data: header, type, authentication tag
# The most bytes in records that bring no data: a request for new keys has 5. No worker sends such records.
_MAX_SILENT = 160
# The most bytes of a handshake. OpenSSL accepts 100 KiB of certificates.
_LONGEST_HANDSHAKE = 256 * 1024


class TlsLine(Line):
    """A TCP connection with TLS. The peer's certificate names the workers that it may be."""

    def __init__(self, sock: socket.socket, credentials: Credentials, *, server: bool) -> None:
        super().__init__(sock)
        self._credentials = credentials
        self._server = server
        self._tunnel: Tunnel | None = None
        self._left = _LONGEST_HANDSHAKE

    def open(self) -> Steps[frozenset[str] | None]:
        first = bytearray()
        if self._server:
            # A peer costs no memory for TLS before it has sent a whole first record.
            while not first_record(first, server=True):
                first += yield from self._receive("a handshake that does not end")
        self._tunnel = tunnel = self._credentials.tunnel(server=self._server)
        tunnel.feed(first)
        while True:
            try:
                done = tunnel.shake()
            except (AuthenticationError, ProtocolError):
                yield from self._explain(tunnel)
                raise
            yield from self.send(tunnel.take())
            if done:
                return tunnel.names
            data = yield from self._receive("a handshake that does not end")
            if not first:
                first_record(data, server=False)
                first += data[:1]
            tunnel.feed(data)

    def _explain(self, tunnel: Tunnel) -> Steps[None]:
        """Tell the peer why it is refused. It does not matter whether the peer reads it."""
        with contextlib.suppress(ChannelClosed):
            yield from self.send(tunnel.take())

    def say(self, data: bytes) -> Steps[None]:
        yield from self.send(self._opened().write(data))

    def hear(self, count: int) -> Steps[bytes]:
        tunnel = self._opened()
        data = bytearray()
        self._left = 2 * (count + _GREETING_CHUNK)
        while len(data) < count:
            piece = tunnel.read(count - len(data))
            if piece:
                data += piece
            else:
                tunnel.feed((yield from self._receive("a greeting in TLS records that bring no data")))
        return bytes(data)

    def _receive(self, breach: str) -> Steps[bytes]:
        """Some bytes. Raises `ProtocolError` with ``breach`` if this part of the greeting has become too long."""
        if self._left <= 0:
            raise ProtocolError(breach)
        data = yield from self.receive(_GREETING_CHUNK)
        self._left -= len(data)
        return data

    def channel(self, options: RpcOptions, budget: Budget, fabric: str, strands: Strands | None = None) -> Channel:
        if fabric == "plain":
            return TcpChannel(self.socket, options, budget, self._leave(), strands)
        return TlsChannel(self.socket, self._opened(), options, strands)

    def pipe(self, options: RpcOptions, fabric: str) -> Pipe:
        """The pipe for this connection, if it is a strand of another channel."""
        if fabric == "plain":
            return PlainPipe(self.socket, options.keepalive, self._leave())
        return TlsPipe(self.socket, options.keepalive, self._opened())

    def _leave(self) -> bytes:
        """End the encryption at the same byte as the peer does. Returns the bytes after the peer's last record.

        A client sends nothing before it has the welcome, so a server must not have such bytes.
        """
        tunnel = self._opened()
        rest = tunnel.incoming.read()
        if tunnel.stream.pending() or (rest and self._server):
            raise ProtocolError("a greeting that goes on where it should have ended")
        return rest

    def _opened(self) -> Tunnel:
        if self._tunnel is None:
            raise ChannelClosed("TLS has not begun on this connection")
        return self._tunnel


class TlsChannel(SlicedChannel):
    """Frames over a connection with TLS, after the handshake."""

    path = "tls"

    def __init__(
        self, sock: socket.socket, tunnel: Tunnel, options: RpcOptions, strands: Strands | None = None
    ) -> None:
        bounded, drains = not options.policy.believes, options.limits is None
        decoder = Decoder(
            options.message_limit,
            None,
            options.head_limit,
            bounded=bounded,
            drains=drains,
            check_room=check_room,
            apart=strands,
        )
        super().__init__(sock, options, decoder, strands)
        self._lock = threading.Lock()  # held around all use of these three:
        self._stream = tunnel.stream
        self._incoming = tunnel.incoming
        self._outgoing = tunnel.outgoing
        self._chunk = memoryview(bytearray(_FIRST_CHUNK))
        self._plain: list[memoryview] = []  # not encrypted yet, last piece first
        self._unsent = memoryview(b"")  # encrypted
        self._problem: ChannelClosed | ProtocolError | None = None  # an error in received bytes, for the next read
        self._records = Records() if bounded else None
        self._brought = 0  # the bytes of data in all records
        came = tunnel.incoming.read()  # came together with the end of the greeting, after OpenSSL's current record
        self._decrypt()
        self._feed(memoryview(came))

    def write(self, frame: Frame) -> bool:
        pieces = frame.pieces
        self.sent += frame.size
        if len(pieces) > 1 or frame.size > RECORD:
            if not self._begin(frame):
                self._plain = _joined(pieces)
            return self.flush()
        if self._buffer is not None:
            self._buffer.note_small()
        try:
            with self._lock:
                self._stream.write(pieces[0])
                data = self._outgoing.read()
            sent = self._socket.send(data, SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        except ssl.SSLError as error:
            raise ChannelClosed(_text(error)) from error
        except OSError as error:
            raise closed(error) from error
        if sent == len(data):
            return True
        self._unsent = memoryview(data)[sent:]
        return self.flush()

    def interject(self, frame: Frame) -> bool:
        self.sent += frame.size
        self._plain = _joined(frame.pieces)
        self._taken = 0
        self.between = False
        self.flush()
        return self.between

    def flush(self) -> bool:
        if self.between and self._slices is not None:
            if self.awaits:
                return False
            self._plain = self._take_slice(self._slices)
            self._plain.reverse()
        flags = self._flags
        while True:
            while self._unsent:
                try:
                    sent = self._socket.send(self._unsent, flags)
                except BlockingIOError:
                    return False
                except OSError as error:
                    raise closed(error) from error
                self._unsent = self._unsent[sent:]
            if not self._plain:
                return self._slice_left()
            self._unsent = memoryview(self._encrypt())

    def copy_unsent(self) -> None:
        self._plain = [memoryview(bytes(piece)) for piece in self._plain]
        super().copy_unsent()

    def _encrypt(self) -> bytes:
        """The next chunk to send, encrypted."""
        room = _SEND_CHUNK
        plain = self._plain
        try:
            with self._lock:
                write = self._stream.write
                while plain and room > 0:
                    piece = plain.pop()
                    size = len(piece)
                    start = 0
                    while start < size and room > 0:
                        count = write(piece[start : start + RECORD])
                        start += count
                        room -= count
                    if start < size:
                        plain.append(piece[start:])
                return self._outgoing.read()
        except ssl.SSLError as error:
            raise ChannelClosed(_text(error)) from error

    def read(self, timeout: float | None) -> bool:
        chunk = self._chunk
        try:
            if timeout != 0 and not self._readable.wait(timeout):
                return False
            count = self._socket.recv_into(chunk, 0, NO_WAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise (self._problem or closed(error)) from error
        if not count:
            raise self._problem or self._ended()
        self.received += count
        if count == len(chunk) < _CHUNK:
            self._chunk = memoryview(bytearray(_CHUNK))
        # A record whose length was damaged on its way swallows everything that follows. So a part of a record is not a
        # sign of life, and such a connection ends when pings go unanswered.
        return self._feed(chunk[:count]) > 0

    def _feed(self, data: memoryview) -> int:
        """Decrypt received bytes. Returns the number of bytes of data in them."""
        records = self._records
        if records is None:
            with self._lock:
                self._incoming.write(data)
            return self._decrypt()
        before = self._brought
        start, end = 0, len(data)
        while start < end and self._problem is None:
            stop = records.take(data, start)
            with self._lock:
                self._incoming.write(data[start:stop])
            self._brought += self._decrypt()
            if records.promised - self._brought > _MAX_SILENT and self._problem is None:
                self._problem = ProtocolError("TLS records that bring no data, such as requests for new keys")
                self.shutdown()
            start = stop
        return self._brought - before

    def _decrypt(self) -> int:
        """Decrypt all complete records. Returns the number of bytes of data in them.

        The data before a bad record is good, so this does not raise for a bad record: the next read does.
        """
        decoder = self._decoder
        stream = self._stream
        incoming = self._incoming
        brought = 0
        try:
            with self._lock:
                while incoming.pending or stream.pending():
                    place = decoder.writable()
                    count: int = stream.read(RECORD, place)  # type: ignore[assignment]
                    if not count:  # the peer has closed TLS
                        break
                    decoder.wrote(count)
                    brought += count
                    if count == RECORD and decoder.placed:
                        brought += self._decrypt_more(place[count:])
                else:
                    return brought
        except ssl.SSLWantReadError:
            return brought  # the rest of a record has not come yet
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                self._problem = ChannelClosed(f"the peer ended the connection: {_text(error)}")
            else:
                self._problem = ProtocolError(f"bytes that are not what the peer encrypted: {_text(error)}")
        self.shutdown()  # the next read notices this
        return brought

    def _decrypt_more(self, place: memoryview) -> int:
        """Decrypt the next records into the memory of a tensor, one after the other. Returns the number of bytes.

        The caller holds ``_lock``. OpenSSL returns one record at a time, so the cost for each record matters.
        """
        read, incoming, size = self._stream.read, self._incoming, len(place)
        filled = 0
        # This many bytes contain a whole record. The caller handles the rest.
        try:
            while filled < size and incoming.pending >= RECORD + _OVERHEAD:
                count: int = read(RECORD, place[filled:])  # type: ignore[assignment]
                if not count:  # the peer has closed TLS; the caller sees that too
                    break
                filled += count
        except ssl.SSLWantReadError:
            pass
        finally:
            if filled:
                self._decoder.wrote(filled)
        return filled

    def close(self) -> None:
        self._plain = []
        self._unsent = memoryview(b"")
        super().close()


def _joined(pieces: list[bytes | memoryview]) -> list[memoryview]:
    """The pieces, last one first, with small neighbours joined, since each piece becomes a separate record."""
    found: list[memoryview] = []
    small: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        if len(piece) <= _SMALL and size < RECORD:
            small.append(piece)
            size += len(piece)
            continue
        if small:
            found.append(memoryview(b"".join(small)))
        small, size = ([piece], len(piece)) if len(piece) <= _SMALL else ([], 0)
        if not small:
            found.append(memoryview(piece))
    if small:
        found.append(memoryview(b"".join(small)))
    found.reverse()
    return found


def _text(error: ssl.SSLError) -> str:
    return str(error.reason or error)
