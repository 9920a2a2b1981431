"""Channels over unix and TCP sockets.

Sockets stay in blocking mode; what must not wait says so with ``MSG_DONTWAIT``. Who waits for bytes does so in
`readable`.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from backhaul.errors import AuthenticationError, OptionError, ProtocolError
from backhaul.options import RpcOptions
from backhaul.security import handshake
from backhaul.security.credentials import require_same_user
from backhaul.security.handshake import ClientHandshake, Hello, ServerHandshake, Welcome
from backhaul.transport import segments
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport, Visitor
from backhaul.transport.readable import Readable
from backhaul.transport.segments import Borrowing, Budget, Lending
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import Frame

RUNTIME_DIR_VARIABLE = "BACKHAUL_RUNTIME_DIR"
"""A private directory that a launcher made for its workers' sockets, and removes."""

LOOPBACK = "127.0.0.1"
_MAX_UNIX_PATH = 100  # the kernel's limit is 108 with the terminating zero
_SOCKET_BUFFER = 4 << 20
# Plain integers: combining the enumeration's members costs a microsecond each time.
_NO_WAIT = int(socket.MSG_DONTWAIT)
_NO_WAIT_FOR_DESCRIPTORS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_TRUNCATED = int(socket.MSG_CTRUNC)
_DESCRIPTOR_ROOM = socket.CMSG_SPACE(segments.MAX_PASSED * array.array("i").itemsize)
_MAX_PIECES = 512  # below IOV_MAX, which is 1024
_BACKLOG = 128
_QUEUE_PAUSE = 0.005

# A silent loss of the network is noticed after about IDLE + COUNT * INTERVAL seconds of
# silence, or when written data is not acknowledged for USER_TIMEOUT.
_KEEPALIVE_IDLE = 2
_KEEPALIVE_INTERVAL = 1
_KEEPALIVE_COUNT = 4
_USER_TIMEOUT_MS = 6000


def host_id() -> str:
    """Names this machine as far as unix sockets reach."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + "/" + socket.gethostname()
    return socket.gethostname()


class StreamChannel(Channel):
    """Frames over a connected socket. Over a unix socket, large tensors in segments."""

    hears_bells = True

    def __init__(self, sock: socket.socket, options: RpcOptions, budget: Budget) -> None:
        self._socket = sock
        shares = sock.family == socket.AF_UNIX and segments.are_possible()
        self._borrowing = Borrowing() if shares else None
        self._lending = Lending(budget) if shares and budget.size else None
        self._decoder = Decoder(options.max_message_bytes, self._borrowing)
        self.next = self._decoder.next  # type: ignore[method-assign]
        self._unsent: list[memoryview] = []
        self._keep: object = None
        self._passing: list[int] = []  # descriptors that go with the first byte that is unsent
        self._readable = Readable(sock, options.busy_poll)
        _tune(sock)

    def fileno(self) -> int:
        return self._socket.fileno()

    def write(self, frame: Frame) -> bool:
        pieces = frame.pieces
        if len(pieces) > 1:
            return self._write_large(frame)
        try:
            sent = self._socket.send(pieces[0], _SEND_FLAGS)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise _closed(error) from error
        if sent == frame.size:
            return True
        self._unsent = [memoryview(pieces[0])[sent:]]
        return self.flush()

    def _write_large(self, frame: Frame) -> bool:
        if frame.keep and self._lending is not None:
            frame, self._passing = self._lending.place(frame)
        self._unsent = [memoryview(piece) for piece in frame.pieces]
        self._keep = frame.keep
        return self.flush()

    def flush(self) -> bool:
        while self._unsent:
            beside: Sequence[tuple[int, int, array.array[int]]] = ()
            if self._passing:
                beside = ((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._passing)),)
            try:
                sent = self._socket.sendmsg(self._unsent[:_MAX_PIECES], beside, _SEND_FLAGS)
            except BlockingIOError:
                return False
            except OSError as error:
                raise _closed(error) from error
            self._passing = []
            self._unsent = _drop(self._unsent, sent)
        self._keep = None
        return True

    def wait(self, *, read: bool, write: bool, timeout: float | None) -> bool:
        poll = select.poll()
        try:
            poll.register(self._socket, (select.POLLIN if read else 0) | (select.POLLOUT if write else 0))
        except (OSError, ValueError) as error:
            raise ChannelClosed("closed here") from error
        return bool(poll.poll(None if timeout is None else timeout * 1000))

    def read(self, timeout: float | None, bell: int | None = None) -> bool:
        try:
            if timeout != 0 and not self._readable.wait(timeout, bell):
                return False
            if self._borrowing is None:
                count = self._socket.recv_into(self._decoder.writable(), 0, _NO_WAIT)
            else:
                count, beside, flags, _ = self._socket.recvmsg_into(
                    (self._decoder.writable(),), _DESCRIPTOR_ROOM, _NO_WAIT_FOR_DESCRIPTORS
                )
                if beside or flags & _TRUNCATED:
                    self._borrow(self._borrowing, beside, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise _closed(error) from error
        if not count:
            raise ChannelClosed("the connection ended")
        self._decoder.wrote(count)
        return True

    def _borrow(self, borrowing: Borrowing, beside: Sequence[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in beside:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                borrowing.add(descriptors)
        if flags & _TRUNCATED:
            raise ProtocolError("more descriptors than a message may have, or than this process can open")

    def next(self) -> Envelope | None:  # replaced in __init__, to save a call
        return self._decoder.next()

    def shutdown(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._unsent = []
        self._keep = None
        self._passing = []
        if self._lending is not None:
            self._lending.close()
        self._socket.close()


class StreamVisitor(Visitor):
    def __init__(self, sock: socket.socket, key: bytes, options: RpcOptions, budget: Budget) -> None:
        self._socket = sock
        self._key = key
        self._options = options
        self._budget = budget

    def admit(self, judge: Callable[[Hello], Welcome], deadline: float) -> tuple[Channel, Hello]:
        sock = self._socket
        server = ServerHandshake(self._key)
        try:
            if sock.family == socket.AF_UNIX:
                require_same_user(sock)
            _send(sock, server.challenge, deadline)
            rest = server.receive_head(_receive(sock, handshake.HELLO_HEAD_SIZE, deadline))
            message = _receive(sock, rest, deadline)
            try:
                hello = server.receive_hello(message)
            except AuthenticationError:
                refusal = Welcome(
                    -1, "", "the secrets differ; start all workers from one launcher or give all the same"
                )
                _send(sock, server.answer(refusal, trusted=False), deadline)
                raise
            welcome = judge(hello)
            _send(sock, server.answer(welcome), deadline)
            if welcome.refused:
                raise AuthenticationError(f"refused worker {hello.name!r}: {welcome.refused}")
            sock.settimeout(None)
            return StreamChannel(sock, self._options, self._budget), hello
        except BaseException:
            sock.close()
            raise

    def turn_away(self) -> None:
        self._socket.close()


class StreamListener(Listener):
    def __init__(self, sock: socket.socket, key: bytes, options: RpcOptions, budget: Budget) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._key = key
        self._options = options
        self._budget = budget

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Visitor | None:
        try:
            sock, _ = self._socket.accept()
        except OSError:  # nobody there, or gone again, or out of descriptors for the moment
            return None
        return StreamVisitor(sock, self._key, self._options, self._budget)

    def close(self) -> None:
        self._socket.close()


class StreamTransport(Transport):
    """Unix sockets between the processes of one host; TCP on loopback when there is a secret."""

    def __init__(self, options: RpcOptions) -> None:
        self._options = options
        self._budget = Budget(options.segment_pool_bytes)
        self._secret = options.secret_or_inherited()
        self._host = host_id()
        self._addresses = Addresses(host=self._host)
        self._listeners: list[StreamListener] = []
        self._directory: str | None = None
        self._path: str | None = None

    def listen(self) -> Sequence[Listener]:
        wanted = self._options.transport
        if wanted == "tcp" and self._secret is None:
            raise OptionError(
                "transport 'tcp' needs a secret that all workers share: start them with `backhaul run`, or "
                "give RpcOptions(secret=...) the same 32 random bytes everywhere"
            )
        unix = self._listen_unix() if wanted != "tcp" else None
        tcp = self._listen_tcp(self._secret) if wanted != "unix" and self._secret is not None else None
        self._addresses = Addresses(host=self._host, unix=unix, tcp=tcp)
        return self._listeners

    @property
    def addresses(self) -> Addresses:
        return self._addresses

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        sock, key = self._reach(addresses, deadline)
        try:
            client = ClientHandshake(key, hello)
            _send(sock, client.receive_challenge(_receive(sock, handshake.CHALLENGE_SIZE, deadline)), deadline)
            rest = client.receive_head(_receive(sock, handshake.WELCOME_HEAD_SIZE, deadline))
            welcome = client.receive_welcome(_receive(sock, rest, deadline))
            sock.settimeout(None)
            return StreamChannel(sock, self._options, self._budget), welcome
        except BaseException:
            sock.close()
            raise

    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        try:
            sock, _ = self._reach(addresses, deadline)
        except ChannelClosed:
            return False
        except (AuthenticationError, TimeoutError):
            return True
        sock.close()
        return True

    def trim(self) -> float:
        return self._budget.trim()

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
            with contextlib.suppress(OSError):
                os.rmdir(self._directory)

    def abandon(self) -> None:
        for listener in self._listeners:
            listener.close()

    def _listen_unix(self) -> str:
        directory = os.environ.get(RUNTIME_DIR_VARIABLE)
        if directory is None or len(directory) > _MAX_UNIX_PATH - 32:
            base = tempfile.gettempdir()
            directory = tempfile.mkdtemp(prefix="backhaul-", dir=base if len(base) < 60 else "/tmp")
            self._directory = directory
        _require_private(directory)
        path = os.path.join(directory, f"{os.getpid()}-{os.urandom(4).hex()}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(path)
            self._path = path
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        self._listeners.append(StreamListener(sock, b"", self._options, self._budget))
        return path

    def _listen_tcp(self, secret: bytes) -> tuple[str, int]:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.bind((LOOPBACK, 0))
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        self._listeners.append(StreamListener(sock, secret, self._options, self._budget))
        host, port = sock.getsockname()
        return host, port

    def _reach(self, addresses: Addresses, deadline: float) -> tuple[socket.socket, bytes]:
        """A connected socket, and the key for its handshake."""
        wanted = self._options.transport
        if wanted != "tcp" and addresses.unix is not None and addresses.host == self._host:
            sock = _connect(socket.AF_UNIX, addresses.unix, deadline)
            try:
                require_same_user(sock)
            except BaseException:
                sock.close()
                raise
            return sock, b""
        if wanted != "unix" and addresses.tcp is not None and self._secret is not None:
            return _connect(socket.AF_INET, addresses.tcp, deadline), self._secret
        raise ChannelClosed(
            f"no way to reach it: it offers unix={addresses.unix!r} on host {addresses.host!r}, "
            f"tcp={addresses.tcp!r}; this worker is on host {self._host!r}, uses transport {wanted!r} and "
            f"has {'a' if self._secret else 'no'} secret"
        )


def _require_private(directory: str) -> None:
    status = os.stat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OptionError(
            f"the directory {directory} for sockets must belong to this user and be closed to others "
            f"(mode 0700); unset {RUNTIME_DIR_VARIABLE} or `chmod 700` it"
        )


def _tune(sock: socket.socket) -> None:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def _connect(family: int, address: str | tuple[str, int], deadline: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        while True:
            try:
                sock.settimeout(_remaining(deadline))
                sock.connect(address)
                return sock
            except BlockingIOError:
                # A unix socket whose queue of connections is full; a TCP one would make us wait.
                time.sleep(_QUEUE_PAUSE)
    except TimeoutError:
        sock.close()
        raise
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"nobody answers at {address}: {error}") from error
    except BaseException:
        sock.close()
        raise


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    try:
        sock.settimeout(_remaining(deadline))
        sock.sendall(data)
    except TimeoutError:
        raise
    except OSError as error:
        raise _closed(error) from error


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        try:
            sock.settimeout(_remaining(deadline))
            piece = sock.recv(count - len(data))
        except TimeoutError:
            raise
        except OSError as error:
            raise _closed(error) from error
        if not piece:
            raise ChannelClosed("the connection ended during the greeting")
        data += piece
    return bytes(data)


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the greeting took too long")
    return left


def _closed(error: OSError) -> ChannelClosed:
    return ChannelClosed(str(error))


def _drop(pieces: list[memoryview], count: int) -> list[memoryview]:
    """What is left of ``pieces`` after their first ``count`` bytes."""
    for index, piece in enumerate(pieces):
        if count < piece.nbytes:
            return [piece[count:], *pieces[index + 1 :]]
        count -= piece.nbytes
    return []
