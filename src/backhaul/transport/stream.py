"""Channels over unix sockets, and the transport that has these and, between hosts, TCP with TLS (`tls`).

Sockets stay in blocking mode; what must not wait says so with ``MSG_DONTWAIT``. A thread that waits for bytes does so
in `readable`.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from backhaul.devices.segments import MAX_NEW, DeviceLending, Placed
from backhaul.directories import PrivateDirectory
from backhaul.errors import OptionError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.credentials import can_tell, require_same_user
from backhaul.security.handshake import Hello, Welcome
from backhaul.security.tls import ClusterCredentials, Credentials, OwnCredentials
from backhaul.transport import processes, segments, sockets
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport, Visitor, Want, Way
from backhaul.transport.greeting import Line, Steps, drive, receive_visitor, visit
from backhaul.transport.hosts import Site, choose_site
from backhaul.transport.readable import Readable
from backhaul.transport.room import check_room
from backhaul.transport.segments import Borrowing, Budget, Lending
from backhaul.transport.sockets import (
    NO_WAIT,
    SEND_FLAGS,
    await_ready,
    closed,
    connect_tcp,
    connect_unix,
    no_descriptors,
    tune,
    unread_of,
)
from backhaul.transport.tls import TlsLine
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import Frame
from backhaul.wire.lanes import MOST_SLICE, Pace, Slices
from backhaul.wire.records import Records, seal

RUNTIME_DIR_VARIABLE = "BACKHAUL_RUNTIME_DIR"
"""A private directory that a launcher made for its workers' sockets, and removes."""

_MAX_UNIX_PATH = 100  # the kernel's limit is 108 with the terminating zero
# Plain integers: combining the enumeration's members costs a microsecond each time.
_NO_WAIT_FOR_DESCRIPTORS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_TRUNCATED = int(socket.MSG_CTRUNC)
_DESCRIPTOR_ROOM = socket.CMSG_SPACE((segments.MAX_PASSED + 2 * MAX_NEW) * array.array("i").itemsize)
_MAX_PIECES = 512  # below IOV_MAX, which is 1024
_BACKLOG = 1024

_KEY_ADVICE = (
    "make a key with `backhaul keygen cluster.key`, copy that file to every host, and name it with `backhaul run "
    "--key-file`, BACKHAUL_KEY_FILE or RpcOptions(key_file=...); or bring certificates with RpcOptions(tls=TLS(...))"
)


def host_id() -> str:
    """Names this machine as far as unix sockets reach."""
    boot = processes.boot_id()
    return f"{boot}/{socket.gethostname()}" if boot else socket.gethostname()


def is_listening(addresses: Addresses, deadline: float) -> bool:
    """Whether a process listens there, as far as can be seen from here.

    A process that is stopped listens, since the kernel takes connections for it. A host that does not answer does not.
    """
    return bool(look_for(addresses, deadline))


def look_for(addresses: Addresses, deadline: float) -> bool | None:
    """The same, with None for a host that does not answer: the process may be there."""
    here = addresses.unix is not None and addresses.host == host_id()
    try:
        if addresses.unix is not None and here:
            connect_unix(addresses.unix, deadline).close()
        elif addresses.tcp is not None:
            connect_tcp(*addresses.tcp, deadline).close()
        else:
            return False
    except ChannelClosed as error:
        refused = here or isinstance(error.__cause__, ConnectionRefusedError)
        return False if refused else None
    except TimeoutError:
        return True if here else None  # its queue of connections is full
    return True


class StreamChannel(Channel):
    """Frames over a connected socket. Over a unix socket, large tensors in segments."""

    path = "unix"

    def __init__(self, sock: socket.socket, options: RpcOptions, budget: Budget) -> None:
        self._socket = sock
        shares = sock.family == sockets.UNIX and segments.are_possible()
        self._borrowing = Borrowing() if shares else None
        self._lending = Lending(budget) if shares and budget.size else None
        self._device_pool = options.device_pool_bytes if shares else 0
        self._device_lending: DeviceLending | None = None
        self._budget = budget
        drains = options.limits is None
        self._decoder = Decoder(
            options.message_limit, self._borrowing, options.head_limit, drains=drains, check_room=check_room
        )
        self._sink: Decoder | Records = self._decoder  # takes what comes
        self.next = self._decoder.next  # type: ignore[method-assign]
        self._unsent: list[memoryview] = []
        self._slices: Slices | None = None  # what else there is of a large frame
        self._pace = Pace()
        self._began = 0.0  # when its slice began
        self._taken = 0  # how large that is
        self._keep: object = None
        self._most_unread = options.max_unsent_bytes
        self._unread: deque[tuple[int, int]] = deque()  # of frames in segments: where each ends, and how large it is
        self._unread_size = 0
        self._passing: list[int] = []  # descriptors that go with the first byte that is unsent
        self._passed: list[int] = []  # those of segments of device memory among them, which are this object's
        self._readable = Readable(sock, options.busy_poll)
        tune(sock, options.keepalive)

    @property
    def device_lending(self) -> DeviceLending | None:  # type: ignore[override]
        """Made when it is first asked for, by a thread that has a tensor on a GPU to send."""
        if self._device_lending is None and self._device_pool:
            self._device_lending = self._budget.lend_device_memory(self._device_pool)
        return self._device_lending

    def fileno(self) -> int:
        return self._socket.fileno()

    def write(self, frame: Frame) -> bool:
        pieces = frame.pieces
        if len(pieces) > 1 or frame.places or frame.size > MOST_SLICE:
            return self._write_large(frame)
        self.sent += frame.size
        try:
            sent = self._socket.send(pieces[0], SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise closed(error) from error
        if sent == frame.size:
            return True
        self._unsent = [memoryview(pieces[0])[sent:]]
        return self.flush()

    def _write_large(self, frame: Frame) -> bool:
        self._close_passed()
        if frame.places:
            self._passed = [each for placed in frame.keep if type(placed) is Placed for each in placed.leave()]
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
        self._keep = frame.keep
        if frame.size > self._pace.size:
            self._slices = Slices(frame.pieces)
            self.between = True
        else:
            self._unsent = self._seal([memoryview(piece) for piece in frame.pieces])
        return self.flush()

    def _seal(self, pieces: list[memoryview]) -> list[memoryview]:
        """What is written for these bytes."""
        return pieces

    def _is_read(self) -> bool:
        """Whether the peer reads what was put into segments. If it does not, the next tensors fill the socket instead.

        Otherwise a peer that reads nothing could make this worker fill all of its segments: a message about one is
        so small that the socket takes hundreds.
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
        if self.between and self._slices is not None:
            self.between = False
            self._began = time.monotonic()
            self._taken = min(self._pace.size, self._slices.left)
            self._unsent = self._seal(self._slices.take(self._pace.size))
        while self._unsent:
            beside: Sequence[tuple[int, int, array.array[int]]] = ()
            if self._passing:
                beside = ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._passing)),)
            try:
                sent = self._socket.sendmsg(self._unsent[:_MAX_PIECES], beside, SEND_FLAGS)
            except BlockingIOError:
                return False
            except OSError as error:
                raise closed(error) from error
            self._passing = []
            self._unsent = _drop(self._unsent, sent)
        if self._slices is not None:
            if self._taken:
                self._pace.took(self._taken, time.monotonic() - self._began)
            if self._slices.left:
                self.between = True
                return False
            self._slices = None
        self._keep = None
        return True

    def copy_unsent(self) -> None:
        self._unsent = [memoryview(bytes(piece)) for piece in self._unsent]
        if self._slices is not None:
            self._slices.copy()

    def way(self) -> Way:
        unread = unread_of(self._socket)
        return Way(self.sent - sum(map(len, self._unsent)) - unread, unread)

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        return await_ready(self._socket, read=read, write=write, timeout=timeout)

    def read(self, timeout: float | None) -> bool:
        try:
            if timeout != 0 and not self._readable.wait(timeout):
                return False
            if self._borrowing is None:
                count = self._socket.recv_into(self._sink.writable(), 0, NO_WAIT)
            else:
                count, beside, flags, _ = self._socket.recvmsg_into(
                    (self._sink.writable(),), _DESCRIPTOR_ROOM, _NO_WAIT_FOR_DESCRIPTORS
                )
                if beside or flags & _TRUNCATED:
                    self._borrow(self._borrowing, beside, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise closed(error) from error
        if not count:
            raise ChannelClosed("the connection ended")
        self.received += count
        self._sink.wrote(count)
        return True

    def _borrow(self, borrowing: Borrowing, beside: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                borrowing.add(descriptors)
        if flags & _TRUNCATED:
            raise ProtocolError(f"more descriptors than a message may have, or else {no_descriptors()}")

    def next(self) -> Envelope | None:  # replaced in __init__, to save a call
        return self._decoder.next()

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._unsent = []
        self._slices = None
        self._keep = None
        self._passing = []
        self._close_passed()
        if self._lending is not None:
            self._lending.close()
        self._device_pool = 0
        if self._device_lending is not None:
            self._device_lending.close()
        self._socket.close()


class CheckedChannel(StreamChannel):
    """The same, with checksums: nothing is decoded that is not what the peer has sent. See `wire.records`.

    What lies in segments has not travelled, and has none.
    """

    def __init__(self, sock: socket.socket, options: RpcOptions, budget: Budget) -> None:
        super().__init__(sock, options, budget)
        self._sink = records = Records(self._decoder)
        self.next = records.next  # type: ignore[method-assign]

    def write(self, frame: Frame) -> bool:
        if len(frame.pieces) > 1 or frame.places or frame.size > MOST_SLICE:
            return self._write_large(frame)
        self.sent += frame.size
        self._unsent = self._seal([memoryview(frame.pieces[0])])
        return self.flush()

    def _seal(self, pieces: list[memoryview]) -> list[memoryview]:
        return seal(pieces)


class UnixLine(Line):
    """The kernel says whose process is at the other end."""

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

    def channel(self, options: RpcOptions, budget: Budget) -> Channel:
        return (CheckedChannel if self.checks else StreamChannel)(self.socket, options, budget)


class StreamVisitor(Visitor):
    def __init__(self, line: Line, whence: str, options: RpcOptions, budget: Budget) -> None:
        self.whence = whence
        self._line = line
        self._options = options
        self._budget = budget
        self._steps: Steps[Hello] | None = None

    def fileno(self) -> int:
        return self._line.socket.fileno()

    def step(self, judge: Callable[[Hello], Welcome]) -> Want | tuple[Channel, Hello]:
        if self._steps is None:
            self._steps = receive_visitor(self._line, judge, self._now_trusted)
        try:
            return next(self._steps)
        except StopIteration as end:
            hello: Hello = end.value
        except BaseException:
            self._line.socket.close()
            raise
        return self._line.channel(self._options, self._budget), hello

    def turn_away(self) -> None:
        self._line.socket.close()

    def _now_trusted(self) -> None:
        self.trusted = True


class StreamListener(Listener):
    """``make_line`` says how greetings go on the sockets that it accepts."""

    def __init__(
        self, sock: socket.socket, make_line: Callable[[socket.socket], Line], options: RpcOptions, budget: Budget
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._make_line = make_line
        self._options = options
        self._budget = budget

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Visitor | None:
        try:
            sock, address = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise  # somebody waits there, and will not be seen until there is room
            return None  # nobody there, or gone again
        whence = f"{address[0]}, port {address[1]}" if isinstance(address, tuple) else ""
        return StreamVisitor(self._make_line(sock), whence, self._options, self._budget)

    def close(self) -> None:
        self._socket.close()


class StreamTransport(Transport):
    """Unix sockets between the processes of one host; TCP with TLS, if there is a secret or are certificates."""

    def __init__(self, options: RpcOptions) -> None:
        self._options = options
        self._budget = Budget(options.segment_pool_bytes)
        self._secret = None if options.tls else options.secret_or_inherited()
        self._credentials: Credentials | None = None
        self._site: Site | None = None
        self._host = host_id()
        self._addresses = Addresses(host=self._host)
        self._listeners: list[StreamListener] = []
        self._directory: PrivateDirectory | None = None
        self._path: str | None = None

    @property
    def _has_unix(self) -> bool:
        if sockets.UNIX is None or not can_tell():
            return False
        return self._options.transport != "tcp" and self._options.trust != "federation"

    @property
    def _has_tcp(self) -> bool:
        return self._options.transport != "unix" and (self._options.tls is not None or self._secret is not None)

    def listen(self) -> Sequence[Listener]:
        wanted = self._options.transport
        if wanted == "unix" and (self._options.host or self._options.port):
            raise OptionError("transport 'unix' has no host and no port: leave them out, or take 'auto' or 'tcp'")
        if wanted == "unix" and not self._has_unix:
            raise OptionError(
                "this system has no unix sockets that tell whose process is at the other end: take 'auto'"
            )
        if not self._has_unix and not self._has_tcp:
            raise OptionError(
                "transport 'tcp' needs a secret that all workers share: start them with `backhaul run`, or "
                f"give RpcOptions(secret=...) the same 32 random bytes everywhere. For several hosts, {_KEY_ADVICE}"
            )
        if wanted != "unix":
            self._site = choose_site(self._options)
            if not self._has_tcp and not self._site.is_loopback:
                raise OptionError(
                    f"listening on {self._site.announced}, beyond this machine, needs a key or certificates, so that "
                    f"nobody else can call: {_KEY_ADVICE}"
                )
        unix = self._listen_unix() if self._has_unix else None
        tcp = self._listen_tcp(self._site) if self._has_tcp and self._site is not None else None
        # In a federation the peers learn nothing about this machine that they do not need.
        process = "" if self._options.trust == "federation" else processes.own_name()
        self._addresses = Addresses(host=self._host, unix=unix, tcp=tcp, process=process)
        return self._listeners

    def _unix_line(self, sock: socket.socket) -> Line:
        return UnixLine(sock, checks=self._options.checksum)

    def introduce(self, name: str) -> None:
        if self._options.tls is not None:
            self._credentials = OwnCredentials(self._options.tls, name)
        elif self._secret is not None:
            self._credentials = ClusterCredentials(self._secret, name)
            # Otherwise most workers have nobody to show a certificate to, and need not wait for one.
            if self._has_tcp and (not self._has_unix or (self._site is not None and not self._site.is_loopback)):
                self._credentials.prepare()

    @property
    def addresses(self) -> Addresses:
        return self._addresses

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        line = self._reach(addresses, deadline)
        try:
            welcome = drive(visit(line, hello), line.socket, deadline)
            return line.channel(self._options, self._budget), welcome
        except BaseException:
            line.socket.close()
            raise

    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        return is_listening(addresses, deadline)

    def is_over(self, addresses: Addresses) -> bool:
        """Its process has ended, or it has closed its unix socket. What TCP says may come from the network."""
        if processes.is_over(addresses.process):
            return True
        if not self._has_unix or addresses.unix is None or addresses.host != self._host:
            return False
        with socket.socket(sockets.UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(addresses.unix)
            except (ConnectionRefusedError, FileNotFoundError):
                return True
            except (OSError, ValueError):
                return False
        return False

    def trim(self) -> float:
        return self._budget.trim()

    def memory(self) -> dict[str, int]:
        return self._budget.memory()

    def when_used(self, callback: Callable[[], None]) -> None:
        self._budget.on_use = callback

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        if self._directory is not None:
            self._directory.remove()

    def abandon(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._directory is not None:
            self._directory.abandon()

    def _listen_unix(self) -> str:
        directory = os.environ.get(RUNTIME_DIR_VARIABLE)
        if directory is None or len(directory) > _MAX_UNIX_PATH - 32:
            self._directory = PrivateDirectory()
            directory = self._directory.path
        _require_private(directory)
        path = os.path.join(directory, f"{os.getpid()}-{os.urandom(4).hex()}")
        sock = socket.socket(sockets.UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            self._path = path
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        self._listeners.append(StreamListener(sock, self._unix_line, self._options, self._budget))
        return path

    def _listen_tcp(self, site: Site) -> tuple[str, int]:
        sock = socket.socket(site.family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if site.family == socket.AF_INET6:
                # All of IPv6 is all of IPv4, too, whatever the system's default is.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(site.address)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            raise OptionError(
                f"cannot listen on {site.address[0]}, port {site.address[1] or 'any'}: {error.strerror}; the host must "
                "be an address of this machine, and the port one that nobody else uses"
            ) from error
        except BaseException:
            sock.close()
            raise
        self._listeners.append(StreamListener(sock, self._visited, self._options, self._budget))
        return site.announced, sock.getsockname()[1]

    def _visited(self, sock: socket.socket) -> Line:
        return TlsLine(sock, self._shown(), server=True)

    def _shown(self) -> Credentials:
        if self._credentials is None:
            raise ChannelClosed("this worker has not been introduced yet")
        return self._credentials

    def _reach(self, addresses: Addresses, deadline: float) -> Line:
        """A connected socket, and how to greet on it."""
        if self._has_unix and addresses.unix is not None and addresses.host == self._host:
            return self._unix_line(connect_unix(addresses.unix, deadline))
        if self._has_tcp and addresses.tcp is not None:
            return TlsLine(connect_tcp(*addresses.tcp, deadline), self._shown(), server=False)
        raise ChannelClosed(
            f"no way to reach it: it offers unix={addresses.unix!r} on host {addresses.host!r}, "
            f"tcp={addresses.tcp!r}; this worker is on host {self._host!r}, uses transport "
            f"{self._options.transport!r} and has {'a' if self._has_tcp else 'no'} secret for TCP"
        )


def _require_private(directory: str) -> None:
    status = os.stat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OptionError(
            f"the directory {directory} for sockets must belong to this user and be closed to others "
            f"(mode 0700); unset {RUNTIME_DIR_VARIABLE} or `chmod 700` it"
        )


def _drop(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``pieces`` after their first ``count`` bytes."""
    for index, piece in enumerate(pieces):
        if count < piece.nbytes:
            return [piece[count:], *pieces[index + 1 :]]
        count -= piece.nbytes
    return []
