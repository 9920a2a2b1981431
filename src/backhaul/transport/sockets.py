"""Connected sockets: how they are made and set up. They stay in blocking mode; calls that must not wait use flags."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import resource
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from backhaul.transport.base import ChannelClosed, Way

# Plain integers: combining the enumeration's members costs a microsecond each time.
NO_WAIT = int(socket.MSG_DONTWAIT)
SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
# Without MSG_EOR, TCP adds written bytes to its last packet, up to 64 KiB, and ignores the limit of unsent bytes.
SEND_SLICE_FLAGS = SEND_FLAGS | int(socket.MSG_EOR)

UNIX: Any = getattr(socket, "AF_UNIX", None)
"""The family of unix sockets, or None where there are none."""

_SOCKET_BUFFER = 4 << 20
_QUEUE_PAUSE = 0.005

# A silent loss of the network is noticed after ``keepalive`` seconds of silence. Even if one packet in five is lost, it
# is very unlikely that eight in a row are.
_KEEPALIVE_IDLE = 2
_KEEPALIVE_INTERVAL = 1
_MARGIN = 1.0  # what was sent is given up that much earlier, since it is looked at now and then only
# What gets lost is sent again soon. The pause is 50 ms beyond a round trip instead of 200 ms: systems hold
# acknowledgements back for 40 ms. It is a second at most, and does not double with each loss while few packets are on
# the way. Systems that do not know an option keep their own pauses.
_TCP_THIN_LINEAR_TIMEOUTS = 16
_TCP_RTO_MAX_MS = 44
_TCP_RTO_MIN_US = 45
_RETRIES = ((_TCP_THIN_LINEAR_TIMEOUTS, 1), (_TCP_RTO_MAX_MS, 1000), (_TCP_RTO_MIN_US, 50_000))

# BBR sends a few packets at a time, at the rate that it has measured, and a timer of the kernel starts each few. On a
# path of microseconds these timers cost as much as the copies, and the path is idle until they run. A socket that has
# once used BBR keeps its timers. So connections begin with another control, and those over a long path go back to BBR.
# So does a connection whose path becomes long or loses packets later: BBR is far better then. Busy hosts delay
# acknowledgements for milliseconds, and packets that overtake each other look lost, so these limits are higher.
# A system's control that is not BBR stays.
_TIMED = b"bbr"  # also the beginning of the names of its later versions
_UNTIMED = (b"cubic", b"reno")  # a user without privileges may often use only the second
_SHORT_PATH = 1000  # microseconds
_LONG_PATH = 10_000
_LOSSY = 0.05  # the part of the packets that were sent again
_FEW_LOSSES = 2  # one packet may seem lost on a good path
_FEW_PACKETS = 20
_LOOK_SECONDS = 0.1  # between two looks at the path, while small frames leave
_LONGEST_NAME = 16

_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_SIOCOUTQ = 0x5411
# From struct tcp_info: the size of a packet, the unacknowledged packets, the acknowledged bytes, and the unsent bytes.
_TCP_INFO = struct.Struct("16xI4xI92xQ16xI")
# The acknowledged bytes, and the shortest round trip in microseconds.
_TCP_RATE = struct.Struct("120xQ20xI")

# The mean round trip in microseconds, the packets that were sent again, and all packets with data.
_TCP_LOSS = struct.Struct("68xI28xI52xI")

# On a slow link, the queued bytes take this many seconds beyond a round trip.
_QUEUE_SECONDS = 0.15
_WINDOW = 0.1  # seconds over which the rate of a link is measured
_LEAST_BUFFER = 8 << 10
_LEAST_SLICE = 4 << 10
_SLICES = 4
_SLACK = 1.25  # a buffer whose size is wrong by less than this factor stays


def tune(sock: socket.socket, keepalive: float) -> None:
    """Set up a connected socket. A TCP connection breaks after ``keepalive`` seconds of silence."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    if sock.family == UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, math.ceil(keepalive) - _KEEPALIVE_IDLE))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int((keepalive - _MARGIN) * 1000))
    for option, value in _RETRIES:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    choose_control(sock)


def begin_untimed(sock: socket.socket) -> None:
    """If the system's congestion control is BBR, let a TCP socket begin with one that has no timers.

    Call it before the socket listens or connects, and `choose_control` once it is connected.
    """
    with contextlib.suppress(OSError):
        if _control_of(sock).startswith(_TIMED):
            _use_first(sock, _UNTIMED)


def choose_control(sock: socket.socket) -> None:
    """On a long path, go back to the system's congestion control."""
    try:
        _, microseconds = _TCP_RATE.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_RATE.size))
        if microseconds < _SHORT_PATH or _control_of(sock) not in _UNTIMED:
            return
        _use_systems(sock)
    except (OSError, struct.error):
        pass  # a system without this information, or without descriptors: the connection works with either control


def is_bad(round_trip: int, again: int, packets: int) -> bool:
    """Whether a path is long, or loses packets. ``round_trip`` is in microseconds."""
    return round_trip >= _LONG_PATH or (again >= _FEW_LOSSES and again > packets * _LOSSY)


def _use_systems(sock: socket.socket) -> None:
    with socket.socket(sock.family, socket.SOCK_STREAM) as new:
        _use_first(sock, (_control_of(new),))


def _control_of(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LONGEST_NAME).rstrip(b"\0")


def _use_first(sock: socket.socket, names: Sequence[bytes]) -> None:
    """Use the first of these congestion controls that the system has and permits."""
    for name in names:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def keep_unsent(sock: socket.socket, size: int) -> None:
    """Make a TCP socket count as full at ``size`` unsent bytes, so that the next write waits for no more than these."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, size)


def fitting(rate: float, round_trip: float) -> int:
    """The buffer size that keeps a link of ``rate`` bytes per second busy without a long queue before it."""
    return min(_SOCKET_BUFFER, max(_LEAST_BUFFER, int(rate * (round_trip + _QUEUE_SECONDS))))


class SendBuffer:
    """The send buffer of a TCP socket, with a size that fits the link, so that the next message leaves soon.

    With a large buffer, TCP fills the queues before a slow link until they overflow. Then a small message waits until
    the lost packets are sent again.

    The rate is measured here. While this buffer is the limit, the system only reports the largest recent rate.
    """

    __slots__ = ("_arrived", "_decided", "_looked", "_packets", "_since", "_size", "_socket", "slice")

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._size = _SOCKET_BUFFER
        self._since = 0.0  # the time at which `_arrived` was read; 0 if nothing is measured
        self._arrived = 0
        self._decided = False  # whether the congestion control stays
        self._looked = 0.0  # the time of the last look at the path
        self._packets = (0, 0)  # at the last look: those that were sent again, and all
        self.slice = _SOCKET_BUFFER // _SLICES
        """The most bytes to write at once: the system checks its limits only before it takes the bytes of a write."""

    def note_small(self) -> None:
        """Look at the path now and then while small frames leave.

        Only losses count here: systems hold the acknowledgement of a small frame back, so a short path looks long.
        """
        if not self._decided and (now := time.monotonic()) > self._looked + _LOOK_SECONDS:
            self._looked = now
            self._reconsider(small=True)

    def _reconsider(self, *, small: bool = False) -> None:
        """Go back to the system's congestion control if the path has become long, or has begun to lose packets."""
        try:
            if _control_of(self._socket) in _UNTIMED:
                info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_LOSS.size)
                round_trip, again, packets = _TCP_LOSS.unpack(info)
                before, self._packets = self._packets, (again, packets)
                if not is_bad(0 if small else round_trip, again - before[0], packets - before[1]):
                    if packets - before[1] < _FEW_PACKETS:
                        self._packets = before  # look at these packets again, together with the next
                    return
                _use_systems(self._socket)
        except (OSError, struct.error):
            pass  # as in `choose_control`
        self._decided = True

    def begin(self) -> None:
        """Start to measure again, because there was a pause before the large frame that begins."""
        self._since = 0.0

    def fit(self, now: float, waited: bool) -> None:
        """Adapt the size to the link. ``waited``: the last slice could not be written at once."""
        if not waited and self._size == _SOCKET_BUFFER:
            return  # a fast link
        if waited and not self._decided:
            self._reconsider()
        if self._since and now - self._since < _WINDOW:
            return
        try:
            data = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_RATE.size)
            arrived, microseconds = _TCP_RATE.unpack(data)
        except (OSError, struct.error):
            return  # a system without this information
        since, before = self._since, self._arrived
        self._since, self._arrived = now, arrived
        if since:
            self._set(fitting((arrived - before) / (now - since), microseconds / 1e6))

    def _set(self, size: int) -> None:
        if size == self._size or 1 / _SLACK < size / self._size < _SLACK:
            return
        # The system doubles the value, for its overhead of each packet; large packets have little overhead.
        value = size if size == _SOCKET_BUFFER else size // 2
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, value)
        self._size = size
        self.slice = max(_LEAST_SLICE, size // _SLICES)


def way_of(sock: socket.socket) -> Way:
    """The progress of the bytes written to a TCP socket, as the peer's system has acknowledged them."""
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        size, packets, arrived, unsent = _TCP_INFO.unpack(data)
    except (OSError, struct.error):
        return Way()
    return Way(arrived, size * packets + unsent)


def unread_of(sock: socket.socket) -> int:
    """About how many of the bytes written to a unix socket the peer has not read."""
    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)), "little")
    except (OSError, ValueError):
        return 0


def connect_unix(path: str, deadline: float) -> socket.socket:
    return _connect(UNIX, path, deadline)


def connect_tcp(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to a numeric address. Peers announce numeric addresses, so no name server is asked."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, _, _, _, address = found[0]
    except (OSError, UnicodeError, OverflowError) as error:
        if lacks_descriptors(error):
            raise
        raise ChannelClosed(f"{host!r}, port {port}, is not an address: {error}") from None
    return _connect(family, address, deadline)


def await_ready(sock: socket.socket, *, read: bool, write: bool, timeout: float | None) -> bool:
    """Wait until the socket is ready for reading or writing, as asked, or has ended. Returns False at the timeout."""
    poll = select.poll()
    try:
        poll.register(sock, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
    except (OSError, ValueError) as error:
        raise ChannelClosed("closed here") from error
    return bool(poll.poll(None if timeout is None else timeout * 1000))


def remaining(deadline: float) -> float:
    """The seconds until the deadline of a greeting. Raises `TimeoutError` if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the greeting took too long")
    return left


def closed(error: OSError) -> ChannelClosed:
    return ChannelClosed(str(error))


def lacks_descriptors(error: BaseException) -> bool:
    """Whether the error says that this process, or the machine, has no descriptors left."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def no_descriptors() -> str:
    """The message for that case, with advice."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"this process has used up its {soft} descriptors: close files and sockets, or raise the limit (ulimit -n)"


def _connect(family: int, address: Any, deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    if family != UNIX:
        begin_untimed(sock)
    try:
        while True:
            try:
                sock.settimeout(remaining(deadline))
                sock.connect(address)
                sock.settimeout(None)
                return sock
            except BlockingIOError:
                # A unix socket raises this if the peer's queue of connections is full; TCP would wait.
                time.sleep(_QUEUE_PAUSE)
    except TimeoutError:
        sock.close()
        raise
    except (OSError, ValueError, OverflowError) as error:  # ValueError, OverflowError: an impossible path or port
        sock.close()
        raise ChannelClosed(f"nobody answers at {address}: {error}") from error
    except BaseException:
        sock.close()
        raise
