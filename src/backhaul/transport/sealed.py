"""Channels over TCP whose bytes are sealed: encrypted with keys that were agreed on inside of TLS (`security.sealing`).

A record is decrypted when all of it is here, straight into the memory of its tensor where that is known. Sending and
receiving have keys and counters of their own, so one thread may write while another reads.
"""

from __future__ import annotations

import socket

from backhaul.errors import ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.sealing import LENGTH, MOST, TAG, Opener, Sealer
from backhaul.transport.encrypted import EncryptedChannel
from backhaul.transport.room import check_room
from backhaul.transport.sockets import NO_WAIT, SEND_FLAGS, closed
from backhaul.transport.strands import Strands
from backhaul.wire.decoder import Decoder
from backhaul.wire.frames import Frame

_LARGEST = LENGTH + MOST + TAG
_START = 16 * 1024
_MANY = 64 * 1024  # bytes to read at once, unless they belong to one record: what is left over is moved


class SealedChannel(EncryptedChannel):
    """Frames over a connection in sealed records. ``rest`` came together with the end of the greeting."""

    path = "sealed"

    def __init__(
        self,
        sock: socket.socket,
        options: RpcOptions,
        keys: tuple[Sealer, Opener],
        rest: bytes,
        strands: Strands | None = None,
    ) -> None:
        decoder = Decoder(
            options.message_limit,
            None,
            options.head_limit,
            drains=options.limits is None,
            check_room=check_room,
            apart=strands,
        )
        super().__init__(sock, options, decoder, strands)
        sealer, self._opener = keys
        self._seal = sealer.seal
        self._plain = []
        self._unsent = memoryview(b"")
        self._sealed = memoryview(bytearray(_START))  # records on their way out
        self._came = memoryview(bytearray(max(_START, len(rest))))  # records on their way in
        self._end = len(rest)  # of what has come
        self._wanted = LENGTH  # bytes that have to be there before a record, or its length, can be read
        self._scratch = memoryview(b"")
        self._problem: ProtocolError | None = None  # with what has come
        self._came[: self._end] = rest
        self._open()

    def write(self, frame: Frame) -> bool:
        pieces = frame.pieces
        self.sent += frame.size
        if len(pieces) > 1 or frame.size > _START - LENGTH - TAG:
            return self._begin_plain(frame)
        record = self._sealed[: self._seal(memoryview(pieces[0]), self._sealed)]
        try:
            sent = self._socket.send(record, SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise closed(error) from error
        if sent == len(record):
            return True
        self._unsent = record[sent:]
        return self.flush()

    def _encrypt(self) -> memoryview:
        piece = self._plain.pop()
        if len(piece) > MOST:
            self._plain.append(piece[MOST:])
            piece = piece[:MOST]
        if LENGTH + len(piece) + TAG > len(self._sealed):
            self._sealed = memoryview(bytearray(_LARGEST))
        return self._sealed[: self._seal(piece, self._sealed)]

    def read(self, timeout: float | None) -> bool:
        # Up to the end of a large record, and the length of the next: nothing of that one has to be moved then.
        end = self._wanted + LENGTH if self._wanted > _MANY else min(_MANY, len(self._came))
        try:
            if timeout != 0 and not self._readable.wait(timeout):
                return False
            count = self._socket.recv_into(self._came[self._end : end], 0, NO_WAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            raise (self._problem or closed(error)) from error
        if not count:
            raise self._problem or self._ended()
        self.received += count
        self._end += count
        return self._open()

    def _open(self) -> bool:
        """Take all records that are complete. True if there was one: part of a record is no sign of life.

        What came before a bad one is good: the next read raises.
        """
        start, came = 0, self._came
        found = False
        try:
            while self._end - start >= self._wanted:
                if self._wanted == LENGTH:
                    self._wanted = LENGTH + self._opener.size(came[start:]) + TAG
                    continue
                self._take(came[start : start + self._wanted])
                start += self._wanted
                self._wanted = LENGTH
                found = True
        except ProtocolError as error:
            self._problem = error
            self.shutdown()  # which the thread that reads next notices
            return found
        self._keep_from(start)
        return found

    def _take(self, record: memoryview) -> None:
        size = len(record) - LENGTH - TAG
        decoder = self._decoder
        place = decoder.writable()
        if len(place) >= size:
            self._opener.open(record, place[:size])
            decoder.wrote(size)
            return
        if len(self._scratch) < size:
            self._scratch = memoryview(bytearray(MOST if size > _START else _START))
        data = self._scratch[:size]
        self._opener.open(record, data)
        while data:
            place = decoder.writable()
            count = min(len(place), len(data))
            place[:count] = data[:count]
            decoder.wrote(count)
            data = data[count:]

    def _keep_from(self, start: int) -> None:
        """Keep what is not read yet, with room for the rest of its record."""
        came, left = self._came, self._end - start
        needed = max(self._wanted + LENGTH, _MANY if self._end == len(came) else 0)
        if needed > len(came):
            self._came = memoryview(bytearray(_MANY if needed <= _MANY else _LARGEST + LENGTH))
        self._came[:left] = came[start : self._end]
        self._end = left
