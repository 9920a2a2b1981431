"""The transport between processes: unix sockets on one host (`plain`), and TCP between hosts, greeted with TLS (`tls`).

After the greeting TCP stays encrypted, unless both workers have ``fabric="plain"``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from backhaul.directories import PrivateDirectory
from backhaul.errors import OptionError
from backhaul.ids import GUEST
from backhaul.options import HOST_VARIABLE, RpcOptions
from backhaul.security.credentials import can_tell
from backhaul.security.handshake import Hello, Welcome
from backhaul.security.tls import ClusterCredentials, Credentials, OwnCredentials
from backhaul.transport import processes, sockets
from backhaul.transport.base import Addresses, Channel, ChannelClosed, Listener, Transport, Visitor, Want
from backhaul.transport.greeting import Line, Steps, drive, receive_visitor, visit
from backhaul.transport.hosts import Site, choose_site, is_loopback
from backhaul.transport.pipe import Pipe
from backhaul.transport.plain import StreamChannel, UnixLine
from backhaul.transport.segments import Budget
from backhaul.transport.sockets import begin_untimed, connect_tcp, connect_unix
from backhaul.transport.strands import Strands
from backhaul.transport.tls import TlsLine

RUNTIME_DIR_VARIABLE = "BACKHAUL_RUNTIME_DIR"
"""A private directory that a launcher made for its workers' sockets, and removes."""

_MAX_UNIX_PATH = 100  # the kernel's limit is 108 with the terminating zero
_BACKLOG = 1024

_KEY_ADVICE = (
    "make a key with `backhaul keygen cluster.key`, copy that file to every host, and name it with `backhaul run "
    "--key-file`, BACKHAUL_KEY_FILE or RpcOptions(key_file=...); or bring certificates with RpcOptions(tls=TLS(...))"
)
_HOSTS_ADVICE = (
    "Workers on different hosts need a common key (BACKHAUL_KEY_FILE or RpcOptions(key_file=...)), and each must "
    f"listen on an address that the others reach ({HOST_VARIABLE} or RpcOptions(host=...))"
)
_SAME_HOST_ADVICE = "Workers on one host need the same RpcOptions(transport=...)"


def host_id() -> str:
    """The id of this machine. Workers with the same id can reach each other over unix sockets."""
    boot = processes.boot_id()
    return f"{boot}/{socket.gethostname()}" if boot else socket.gethostname()


def is_listening(addresses: Addresses, deadline: float) -> bool:
    """Whether a process listens there, as far as this process can see.

    A stopped process counts as listening, since the kernel accepts connections for it. A host that does not answer does
    not count.
    """
    return bool(look_for(addresses, deadline))


def look_for(addresses: Addresses, deadline: float) -> bool | None:
    """Like `is_listening`, but None for a host that does not answer: the process may be there."""
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
        return True if here else None  # on this host, the queue of connections is full
    return True


class Looms:
    """The channels that peers have opened and may widen with strands, by token. Thread-safe."""

    def __init__(self) -> None:
        self._all: dict[str, tuple[Hello, Strands]] = {}

    def answer(self, hello: Hello, welcome: Welcome, most: int) -> Welcome:
        """The welcome, with the number of allowed connections. Refuses a strand if its worker has no such channel."""
        if hello.token:
            known = self._all.get(hello.token)
            if known is None or not _same_worker(known[0], hello):
                return msgspec.structs.replace(welcome, refused="the connection that it belongs to does not exist")
            return welcome
        count = min(hello.connections, most)
        if count < 2:
            return welcome
        return msgspec.structs.replace(welcome, connections=count, token=secrets.token_hex(16))

    def strands(self, hello: Hello, welcome: Welcome | None) -> Strands | None:
        """The strands of a channel that was just greeted; None if it may not have any."""
        if welcome is None or not welcome.token:
            return None
        strands = Strands(welcome.connections - 1)
        self._all[welcome.token] = hello, strands
        strands.on_closed = partial(self._forget, welcome.token)
        return strands

    def attach(self, hello: Hello, pipe: Pipe) -> None:
        _, strands = self._all.get(hello.token, (hello, None))
        if strands is None or not strands.attach(hello.strand, pipe):
            raise ChannelClosed("the connection that it belongs to has ended")

    def _forget(self, token: str) -> None:
        self._all.pop(token, None)


def _same_worker(one: Hello, other: Hello) -> bool:
    return (one.group, one.id, one.name, one.incarnation) == (other.group, other.id, other.name, other.incarnation)


class StreamVisitor(Visitor):
    def __init__(self, line: Line, whence: str, options: RpcOptions, budget: Budget, looms: Looms) -> None:
        self.whence = whence
        self._line = line
        self._options = options
        self._budget = budget
        self._looms = looms
        self._welcome: Welcome | None = None
        self._steps: Steps[Hello] | None = None

    def fileno(self) -> int:
        return self._line.socket.fileno()

    def step(self, judge: Callable[[Hello], Welcome]) -> Want | tuple[Channel, Hello] | None:
        if self._steps is None:
            self._steps = receive_visitor(self._line, judge, self._options.fabric, self._now_trusted, self._widen)
        try:
            return next(self._steps)
        except StopIteration as end:
            hello: Hello = end.value
        except BaseException:
            self._line.socket.close()
            raise
        try:
            if hello.token:
                self._looms.attach(hello, self._line.pipe(self._options, hello.fabric))
                return None
            strands = self._looms.strands(hello, self._welcome)
            try:
                return self._line.channel(self._options, self._budget, hello.fabric, strands), hello
            except BaseException:
                if strands is not None:
                    strands.close()
                raise
        except BaseException:
            self._line.socket.close()
            raise

    def turn_away(self) -> None:
        self._line.socket.close()

    def _now_trusted(self) -> None:
        self.trusted = True

    def _widen(self, hello: Hello, welcome: Welcome) -> Welcome:
        wide = isinstance(self._line, TlsLine) and hello.id != GUEST
        self._welcome = self._looms.answer(hello, welcome, self._options.most_connections if wide else 1)
        return self._welcome


class StreamListener(Listener):
    """Accepts connections on one socket. ``make_line`` makes the line for the greeting on each."""

    def __init__(
        self,
        sock: socket.socket,
        make_line: Callable[[socket.socket], Line],
        options: RpcOptions,
        budget: Budget,
        looms: Looms,
    ) -> None:
        sock.setblocking(False)
        self._looms = looms
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
                raise  # a visitor waits, and cannot be accepted until descriptors or memory are free
            return None  # no visitor, or it is gone again
        whence = f"{address[0]}, port {address[1]}" if isinstance(address, tuple) else ""
        return StreamVisitor(self._make_line(sock), whence, self._options, self._budget, self._looms)

    def close(self) -> None:
        self._socket.close()


class StreamTransport(Transport):
    """Unix sockets between processes of one host; and TCP with TLS, if there is a secret or there are certificates."""

    def __init__(self, options: RpcOptions) -> None:
        self._options = options
        self._budget = Budget(options.segment_pool_bytes)
        self._looms = Looms()
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
        return self._options.transport != "tcp" and self._options.policy.is_one_user

    @property
    def _has_tcp(self) -> bool:
        return self._options.transport != "unix" and (self._options.tls is not None or self._secret is not None)

    def listen(self) -> Sequence[Listener]:
        wanted = self._options.transport
        if wanted == "unix" and (self._options.host or self._options.port):
            raise OptionError("transport 'unix' has no host and no port: omit them, or use 'auto' or 'tcp'")
        if wanted == "unix" and not self._has_unix:
            raise OptionError("this system has no unix sockets that tell whose process is at the other end: use 'auto'")
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
                    f"only workers of the group can call: {_KEY_ADVICE}"
                )
        unix = self._listen_unix() if self._has_unix else None
        tcp = self._listen_tcp(self._site) if self._has_tcp and self._site is not None else None
        # In a federation, peers learn only what they need about this machine.
        process = processes.own_name() if self._options.policy.shows else ""
        self._addresses = Addresses(host=self._host, unix=unix, tcp=tcp, process=process)
        return self._listeners

    def _unix_line(self, sock: socket.socket) -> Line:
        return UnixLine(sock, checks=self._options.checksum)

    def introduce(self, name: str) -> None:
        if self._options.tls is not None:
            self._credentials = OwnCredentials(self._options.tls, name)
        elif self._secret is not None:
            self._credentials = ClusterCredentials(self._secret, name)
            # Otherwise most workers need no certificate, since they use unix sockets, and should not wait for one.
            if self._has_tcp and (not self._has_unix or (self._site is not None and not self._site.is_loopback)):
                self._credentials.prepare()

    @property
    def addresses(self) -> Addresses:
        return self._addresses

    def connect(self, addresses: Addresses, hello: Hello, deadline: float) -> tuple[Channel, Welcome]:
        if hello.id != GUEST:
            most = self._options.most_connections
            hello = msgspec.structs.replace(hello, fabric=self._options.fabric, connections=most)
        line = self._reach(addresses, deadline)
        try:
            welcome = drive(visit(line, hello), line.socket, deadline)
            strands = None
            if isinstance(line, TlsLine) and 1 < welcome.connections <= hello.connections:
                strands = Strands(welcome.connections - 1, partial(self._open_strand, addresses, hello, welcome.token))
            return line.channel(self._options, self._budget, hello.fabric, strands), welcome
        except BaseException:
            line.socket.close()
            raise

    def _open_strand(self, addresses: Addresses, hello: Hello, token: str, number: int) -> Pipe:
        """Open a further connection of a channel. Raises what `connect` raises."""
        deadline = time.monotonic() + self._options.connect_timeout
        line = self._reach(addresses, deadline)
        try:
            drive(visit(line, msgspec.structs.replace(hello, token=token, strand=number)), line.socket, deadline)
            return line.pipe(self._options, hello.fabric)
        except BaseException:
            line.socket.close()
            raise

    def is_listening(self, addresses: Addresses, deadline: float) -> bool:
        return is_listening(addresses, deadline)

    def is_over(self, addresses: Addresses) -> bool:
        """Whether its process has ended, or has closed its unix socket. A TCP error does not count: the network may
        have caused it."""
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
        self._listeners.append(StreamListener(sock, self._unix_line, self._options, self._budget, self._looms))
        return path

    def _listen_tcp(self, site: Site) -> tuple[str, int]:
        sock = socket.socket(site.family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            begin_untimed(sock)
            if site.family == socket.AF_INET6:
                # Accept IPv4 too, whatever the system's default is.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind(site.address)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            raise OptionError(
                f"cannot listen on {site.address[0]}, port {site.address[1] or 'any'}: {error.strerror}; the host must "
                "be an address of this machine, and no other process may use the port"
            ) from error
        except BaseException:
            sock.close()
            raise
        self._listeners.append(StreamListener(sock, self._visited, self._options, self._budget, self._looms))
        return site.announced, sock.getsockname()[1]

    def _visited(self, sock: socket.socket) -> Line:
        return TlsLine(sock, self._shown(), server=True)

    def _shown(self) -> Credentials:
        if self._credentials is None:
            raise ChannelClosed("this worker does not know its name yet: introduce() was not called")
        return self._credentials

    def _reach(self, addresses: Addresses, deadline: float) -> Line:
        """A line over a connected socket. Raises `ChannelClosed` if the worker cannot be reached."""
        if self._has_unix and addresses.unix is not None and addresses.host == self._host:
            return self._unix_line(connect_unix(addresses.unix, deadline))
        if self._has_tcp and addresses.tcp is not None:
            return TlsLine(self._connect_tcp(addresses, *addresses.tcp, deadline), self._shown(), server=False)
        raise ChannelClosed(
            f"no way to reach it: it offers unix={addresses.unix!r} on host {addresses.host!r}, "
            f"tcp={addresses.tcp!r}; this worker is on host {self._host!r}, uses transport "
            f"{self._options.transport!r} and has {'a' if self._has_tcp else 'no'} secret for TCP. "
            f"{_SAME_HOST_ADVICE if addresses.host == self._host else _HOSTS_ADVICE}"
        )

    def _connect_tcp(self, addresses: Addresses, host: str, port: int, deadline: float) -> socket.socket:
        try:
            return connect_tcp(host, port, deadline)
        except ChannelClosed as error:
            if addresses.host == self._host or not is_loopback(host):
                raise
            raise ChannelClosed(
                f"{error}. That worker is on another host but listens on loopback. {_HOSTS_ADVICE}"
            ) from error


def _require_private(directory: str) -> None:
    status = os.stat(directory)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise OptionError(
            f"the directory {directory} for sockets must belong to this user and be closed to others "
            f"(mode 0700); unset {RUNTIME_DIR_VARIABLE} or `chmod 700` it"
        )


__all__ = ["RUNTIME_DIR_VARIABLE", "StreamChannel", "StreamListener", "StreamTransport", "host_id", "is_listening"]
