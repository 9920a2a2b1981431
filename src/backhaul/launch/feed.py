"""Feed: bytes for a pipe whose reader may be slow or gone. Bytes that do not fit wait until there is room."""

from __future__ import annotations

import os
import selectors


class Feed:
    """Writes to a descriptor without blocking. Owns the descriptor. For one thread."""

    def __init__(self, fd: int, selector: selectors.BaseSelector) -> None:
        self.broken = False
        """Whether the reader is gone. Bytes sent after that are dropped."""
        self._fd = fd
        self._selector = selector
        self._waiting = bytearray()
        self._closing = False
        os.set_blocking(fd, False)

    def send(self, data: bytes) -> None:
        if self._fd < 0 or self.broken or self._closing:
            return
        had = bool(self._waiting)
        self._waiting += data
        if not had:
            self._write()
            if self._waiting:
                self._selector.register(self._fd, selectors.EVENT_WRITE, self._on_room)

    def close(self) -> None:
        """Close the pipe once all bytes sent so far are written."""
        self._closing = True
        if not self._waiting:
            self._release()

    def abandon(self) -> None:
        """Close the pipe now."""
        if self._waiting:
            self._selector.unregister(self._fd)
            self._waiting.clear()
        self._release()

    def _on_room(self) -> None:
        self._write()
        if not self._waiting:
            self._selector.unregister(self._fd)
            if self._closing:
                self._release()

    def _write(self) -> None:
        try:
            while self._waiting:
                del self._waiting[: os.write(self._fd, self._waiting)]
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            self.broken = True
            self._waiting.clear()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
