"""Channels over an unencrypted socket: unix sockets, and TCP on a fabric that the user declares trusted.

Sockets stay in blocking mode. Calls that must not wait use ``MSG_DONTWAIT``. A thread waits for bytes in `readable`.
"""

from __future__ import annotations

import array
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence

from backhaul.devices.segments import MAX_NEW, DeviceLending, Placed
from backhaul.errors import ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.credentials import require_same_user
from backhaul.transport import segments, sockets
from backhaul.transport.base import Channel, Way
from backhaul.transport.filling import fills_for_long
from backhaul.transport.greeting import Line, Steps
from backhaul.transport.room import check_room
from backhaul.transport.segments import Borrowing, Budget, Lending
from backhaul.transport.sliced import SlicedChannel
from backhaul.transport.sockets import (
    NO_WAIT,
    SEND_FLAGS,
    closed,
    no_descriptors,
    unread_of,
)
from backhaul.transport.strands import Strands
from backhaul.wire.decoder import Decoder
from backhaul.wire.frames import Frame
from backhaul.wire.lanes import MOST_SLICE
from backhaul.wire.records import Records, seal

# Plain integers: combining the enumeration's members costs a microsecond each time.
_NO_WAIT_FOR_DESCRIPTORS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
_DESCRIPTOR_ROOM = socket.CMSG_SPACE((segments.MAX_PASSED + 2 * MAX_NEW) * array.array("i").itemsize)
_MAX_PIECES = 512  # below IOV_MAX, which is 1024

_making = threading.Lock()  # held while a channel gets its lending of device memory


class StreamChannel(SlicedChannel):
    """Frames over a connected socket. Over a unix socket, large tensors go in segments."""

    path = "unix"

    def __init__(
        self, sock: socket.socket, options: RpcOptions, budget: Budget, strands: Strands | None = None
    ) -> None:
        shares = sock.family == sockets.UNIX and segments.are_possible()
        self._borrowing = Borrowing() if shares else None
        self._lending = Lending(budget) if shares and budget.size else None
        self._device_pool = options.device_pool_bytes if shares else 0
        self._device_lending: DeviceLending | None = None
        self._budget = budget
        drains = options.limits is None
        decoder = Decoder(
            options.message_limit,
            self._borrowing,
            options.head_limit,
            drains=drains,
            check_room=check_room,
            apart=strands,
        )
        super().__init__(sock, options, decoder, strands)
        self._sink: Decoder | Records = decoder  # takes received bytes
        self._unsent: list[memoryview] = []
        self._most_unread = options.max_unsent_bytes
        self._unread: deque[tuple[int, int]] = deque()  # for each frame in segments: where it ends, and its size there
        self._unread_size = 0
        self._passing: list[int] = []  # descriptors to send with the first unsent byte
        self._passed: list[int] = []  # those of device memory among them, which this object must close

    @property
    def device_lending(self) -> DeviceLending | None:  # type: ignore[override]
        """The lending of device memory. It is made when a thread first sends a tensor on a GPU."""
        if self._device_lending is None and self._device_pool:
            # Each lending numbers its segments, so there must be only one.
            with _making:
                if self._device_lending is None and self._device_pool:
                    self._device_lending = self._budget.lend_device_memory(self._device_pool)
        return self._device_lending

    def write(self, frame: Frame) -> bool:
        pieces, size = frame.pieces, frame.size
        if (
            size > MOST_SLICE
            or len(pieces) > 1
            or (self._device_lending is not None and self._device_lending.offers)
            or (frame.places and not self._leaves_alone(frame))
        ):
            return self._write_large(frame)
        self.sent += size
        if self._buffer is not None:
            self._buffer.note_small()
        try:
            sent = self._socket.send(pieces[0], SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise closed(error) from error
        if sent == size:
            return True
        self._unsent = [memoryview(pieces[0])[sent:]]
        return self.flush()

    def _leaves_alone(self, frame: Frame) -> bool:
        """Let the buffers of a frame leave if all are in segments that the peer has already mapped.

        Returns whether they left. Otherwise the frame needs descriptors with it, and nothing has changed.
        """
        placed: Placed
        for placed in frame.keep:
            if placed.descriptors:
                return False
        if self._passed:
            self._close_passed()
        for placed in frame.keep:
            placed.leave()
            self.on_devices += placed.size
        return True

    def _write_large(self, frame: Frame) -> bool:
        if self._lending is not None and fills_for_long(frame):
            return self._begin_whole(frame)  # its buffers are copied into segments
        self._close_passed()
        if frame.places:
            leaving = [each for each in frame.keep if type(each) is Placed]
            self._passed = [descriptor for each in leaving for descriptor in each.leave()]
            self.on_devices += sum(each.size for each in leaving)
        if self._device_lending is not None and not self._passed:
            self._passed = self._device_lending.offer()
        placed = 0
        if frame.keep and self._lending is not None and len(frame.pieces) > 1 and self._is_read():
            size = frame.size
            frame, self._passing = self._lending.place(frame)
            placed = size - frame.size
            self.shared += placed
        self._passing = self._passed + self._passing
        self.sent += frame.size
        if placed:
            self._unread.append((self.sent, placed))
            self._unread_size += placed
        if not self._begin(frame):
            self._unsent = self._seal([memoryview(piece) for piece in frame.pieces])
        return self.flush()

    def _seal(self, pieces: list[memoryview]) -> list[memoryview]:
        """The bytes to write for these pieces. `CheckedChannel` adds checksums."""
        return pieces

    def _is_read(self) -> bool:
        """Whether the peer reads the tensors in segments. If it does not, the next tensors go through the socket.

        Otherwise a peer that reads nothing could make this worker fill all of its segments: a message about a segment
        is so small that the socket takes hundreds of them.
        """
        if self._unread_size <= self._most_unread:
            return True
        taken = self.sent - unread_of(self._socket)
        while self._unread and self._unread[0][0] <= taken:
            self._unread_size -= self._unread.popleft()[1]
        return self._unread_size <= self._most_unread

    def interject(self, frame: Frame) -> bool:
        self.sent += frame.size
        self._unsent = self._seal([memoryview(piece) for piece in frame.pieces])
        self._taken = 0
        self.between = False
        self.flush()
        return self.between

    def _close_passed(self) -> None:
        for descriptor in self._passed:
            os.close(descriptor)
        self._passed = []

    def flush(self) -> bool:
        if self.between:
            if self.awaits:
                return False
            if (whole := self._take_whole()) is not None:
                return self._write_large(whole)
            if self._slices is not None:
                self._unsent = self._seal(self._take_slice(self._slices))
        flags = self._flags
        while self._unsent:
            beside: Sequence[tuple[int, int, array.array[int]]] = ()
            if self._passing:
                beside = ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._passing)),)
            try:
                sent = self._socket.sendmsg(self._unsent[:_MAX_PIECES], beside, flags)
            except BlockingIOError:
                return False
            except OSError as error:
                raise closed(error) from error
            self._passing = []
            self._unsent = _drop(self._unsent, sent)
        return self._slice_left()

    def copy_unsent(self) -> None:
        self._unsent = [memoryview(bytes(piece)) for piece in self._unsent]
        super().copy_unsent()

    def way(self) -> Way:
        unread = unread_of(self._socket)
        return Way(self.sent - sum(map(len, self._unsent)) - unread, unread)

    def read(self, timeout: float | None) -> bool:
        try:
            if timeout != 0 and not self._readable.wait(timeout):
                return False
            sink = self._sink
            if self._borrowing is None:
                count = self._socket.recv_into(sink.writable(), 0, NO_WAIT)
            else:
                count, beside, flags, _ = self._socket.recvmsg_into(
                    (sink.writable(),), _DESCRIPTOR_ROOM, _NO_WAIT_FOR_DESCRIPTORS
                )
                if beside or flags & _TRUNCATED:
                    self._borrow(self._borrowing, beside, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise closed(error) from error
        if not count:
            raise self._ended()
        self.received += count
        sink.wrote(count)
        return True

    def _borrow(self, borrowing: Borrowing, beside: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                borrowing.add(descriptors)
        if flags & _TRUNCATED:
            raise ProtocolError(f"more descriptors than a message may have, or {no_descriptors()}")

    def close(self) -> None:
        self._unsent = []
        self._passing = []
        self._close_passed()
        if self._lending is not None:
            self._lending.close()
        self._device_pool = 0
        if self._device_lending is not None:
            self._device_lending.close()
        if self._borrowing is not None:
            self._borrowing.close()
        super().close()


class TcpChannel(StreamChannel):
    """Frames over TCP without encryption, after an encrypted greeting. ``rest``: bytes that came with its last ones."""

    path = "tcp"

    def __init__(
        self, sock: socket.socket, options: RpcOptions, budget: Budget, rest: bytes, strands: Strands | None = None
    ) -> None:
        super().__init__(sock, options, budget, strands)
        if rest:
            self._sink.writable()[: len(rest)] = rest
            self._decoder.wrote(len(rest))

    def way(self) -> Way:
        return SlicedChannel.way(self)


class CheckedChannel(StreamChannel):
    """A `StreamChannel` with checksums: damaged bytes are never decoded. See `wire.records`.

    Data in segments does not travel, and has no checksum.
    """

    def __init__(self, sock: socket.socket, options: RpcOptions, budget: Budget) -> None:
        super().__init__(sock, options, budget)
        self._sink = records = Records(self._decoder)
        self.next = records.next  # type: ignore[method-assign]

    def write(self, frame: Frame) -> bool:
        offers = self._device_lending is not None and self._device_lending.offers
        if len(frame.pieces) > 1 or frame.places or frame.size > MOST_SLICE or offers:
            return self._write_large(frame)
        self.sent += frame.size
        self._unsent = self._seal([memoryview(frame.pieces[0])])
        return self.flush()

    def _seal(self, pieces: list[memoryview]) -> list[memoryview]:
        return seal(pieces)


class UnixLine(Line):
    """A unix socket. The kernel says which user's process is at the other end."""

    def __init__(self, sock: socket.socket, *, checks: bool = False) -> None:
        super().__init__(sock)
        self.checks = checks

    def open(self) -> Steps[frozenset[str] | None]:
        yield from ()
        require_same_user(self.socket)
        return None

    def say(self, data: bytes) -> Steps[None]:
        yield from self.send(data)

    def hear(self, count: int) -> Steps[bytes]:
        data = bytearray()
        while len(data) < count:
            data += yield from self.receive(count - len(data))
        return bytes(data)

    def channel(self, options: RpcOptions, budget: Budget, fabric: str, strands: Strands | None = None) -> Channel:
        return (CheckedChannel if self.checks else StreamChannel)(self.socket, options, budget)


def _drop(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``pieces`` after their first ``count`` bytes."""
    for index, piece in enumerate(pieces):
        if count < piece.nbytes:
            return [piece[count:], *pieces[index + 1 :]]
        count -= piece.nbytes
    return []
