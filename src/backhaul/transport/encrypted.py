"""What channels with encryption share: how frames leave, a chunk of what is encrypted after the other."""

from __future__ import annotations

from abc import abstractmethod

from backhaul.transport.sliced import SlicedChannel
from backhaul.transport.sockets import closed
from backhaul.wire.frames import Frame

_SMALL = 4096


class EncryptedChannel(SlicedChannel):
    """Encrypts frames, piece by piece, and sends what comes of it."""

    _joined_size = 16384  # small pieces become one up to this size
    _plain: list[memoryview]  # not encrypted yet, last piece first
    _unsent: memoryview  # encrypted

    @abstractmethod
    def _encrypt(self) -> memoryview:
        """The next chunk of ``_plain``, which has some, encrypted. Valid until the next call."""

    def _begin_plain(self, frame: Frame) -> bool:
        """Send a frame, in slices if it is large."""
        if not self._begin(frame):
            self._plain = joined(frame.pieces, self._joined_size)
        return self.flush()

    def interject(self, frame: Frame) -> bool:
        self.sent += frame.size
        self._plain = joined(frame.pieces, self._joined_size)
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
            self._unsent = self._encrypt()

    def copy_unsent(self) -> None:
        self._plain = [memoryview(bytes(piece)) for piece in self._plain]
        super().copy_unsent()

    def close(self) -> None:
        self._plain = []
        self._unsent = memoryview(b"")
        super().close()


def joined(pieces: list[bytes | memoryview], most: int) -> list[memoryview]:
    """The pieces, last one first, small neighbours as one: each makes a record of its own."""
    found: list[memoryview] = []
    small: list[bytes | memoryview] = []
    size = 0
    for piece in pieces:
        if len(piece) <= _SMALL and size < most:
            small.append(piece)
            size += len(piece)
            continue
        if size:
            found.append(memoryview(b"".join(small)))
        small, size = ([piece], len(piece)) if len(piece) <= _SMALL else ([], 0)
        if not small:
            found.append(memoryview(piece))
    if size:
        found.append(memoryview(b"".join(small)))
    found.reverse()
    return found
