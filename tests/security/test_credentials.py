"""Whose process is at the other end of a unix socket: the kernel's answer, for good and bad peers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backhaul.errors import AuthenticationError, OptionError
from backhaul.options import RpcOptions
from backhaul.security.credentials import peer_credentials, require_same_user
from backhaul.security.handshake import Hello, Welcome
from backhaul.transport.base import Addresses, ChannelClosed
from backhaul.transport.stream import RUNTIME_DIR_VARIABLE, StreamListener, StreamTransport
from greetings import admit

NOBODY = 65534
HELLO = Hello("group", 1, "worker1", 0)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else too")


def test_a_socketpair_has_our_own_credentials() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert peer_credentials(left) == (os.getpid(), os.geteuid(), os.getegid())
        require_same_user(left)
        require_same_user(right)


def test_the_pid_is_that_of_the_connecting_process(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with stranger(tmp_path / "s", uid=None) as process:
            sock, _ = server.accept()
            with sock:
                assert peer_credentials(sock).pid == process.pid
                require_same_user(sock)


def test_a_socket_that_is_not_unix_has_no_user_to_trust() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        pytest.raises(AuthenticationError),
    ):
        require_same_user(client)


# A peer of another user.

# It changes its user after all imports, because another user may not be able to read the interpreter's files.
BECOME = """
import os, socket, sys
if sys.argv[2] != "None":
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
"""

CONNECT = """
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
except OSError as error:
    print(type(error).__name__, flush=True)
    sys.exit()
print("connected", flush=True)
try:
    # A well-formed start of a greeting: a server that reads it would wait for the rest.
    sock.sendall(b"BHL2")
    print("got", len(sock.recv(4096)), flush=True)
except OSError as error:
    print("got 0", flush=True)
sys.stdin.read()
"""


@contextmanager
def stranger(path: Path, uid: int | None = NOBODY, code: str = CONNECT) -> Iterator[subprocess.Popen[str]]:
    """A process of another user, without torch, that connects and speaks."""
    command = [sys.executable, "-I", "-c", BECOME + code, str(path), str(uid)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def listening() -> Iterator[tuple[StreamTransport, StreamListener]]:
    transport = StreamTransport(RpcOptions(transport="unix"))
    try:
        (listener,) = transport.listen()
        assert isinstance(listener, StreamListener)
        yield transport, listener
    finally:
        transport.close()


def wait_for_visitor(listener: StreamListener) -> None:
    listener._socket.setblocking(True)


def never(hello: Hello) -> Welcome:
    raise AssertionError(f"judged before the user was known: {hello}")


def serve_one(listener: StreamListener) -> None:
    visitor = listener.accept()
    assert visitor is not None
    channel, hello = admit(visitor, lambda hello: Welcome(0, "worker0"), time.monotonic() + 5)
    assert hello == HELLO
    channel.close()


@as_root
def test_another_user_does_not_even_get_into_the_directory() -> None:
    with listening() as (transport, _):
        path = Path(transport.addresses.unix or "")
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with stranger(path) as process:
            assert line(process) == "PermissionError"


@as_root
def test_the_kernel_s_report_alone_refuses_another_user() -> None:
    """The directory and the socket are open to all, so only SO_PEERCRED protects the worker."""
    with listening() as (transport, listener):
        path = Path(transport.addresses.unix or "")
        path.parent.chmod(0o755)
        path.chmod(0o777)
        wait_for_visitor(listener)
        with stranger(path) as process:
            assert line(process) == "connected"
            visitor = listener.accept()
            assert visitor is not None
            with pytest.raises(AuthenticationError, match=rf"\(pid {process.pid}\) is of user {NOBODY}, not 0"):
                admit(visitor, never, time.monotonic() + 5)
            assert line(process) == "got 0"  # not even a refusal

            began = time.monotonic()
            server = threading.Thread(target=serve_one, args=(listener,))
            server.start()
            channel, welcome = transport.connect(transport.addresses, HELLO, time.monotonic() + 5)
            server.join()
            assert time.monotonic() - began < 1.0
            assert welcome == Welcome(0, "worker0")
            channel.close()


SQUAT = """
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("listening", flush=True)
peer, _ = sock.accept()
try:
    peer.sendall(b"BHL2")
    print("got", len(peer.recv(4096)), flush=True)
except OSError as error:
    print("got 0", flush=True)
"""


@as_root
def test_a_server_of_another_user_gets_no_hello() -> None:
    """A process that took over a socket's path learns nothing, not even the group's name."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o777)
        path = Path(directory, "squatted")
        with stranger(path, code=SQUAT) as process:
            assert line(process) == "listening"
            transport = StreamTransport(RpcOptions(transport="unix"))
            there = Addresses(host=transport.addresses.host, unix=str(path))
            with pytest.raises(AuthenticationError, match=f"is of user {NOBODY}, not 0"):
                transport.connect(there, HELLO, time.monotonic() + 5)
            assert line(process) == "got 0"


@as_root
def test_a_directory_that_is_open_to_others_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(tmp_path))
    for mode, uid in ((0o755, 0), (0o701, 0), (0o700, NOBODY)):
        tmp_path.chmod(mode)
        os.chown(tmp_path, uid, -1)
        transport = StreamTransport(RpcOptions())
        with pytest.raises(OptionError, match="mode 0700"):
            transport.listen()
        transport.close()
    os.chown(tmp_path, 0, -1)
    tmp_path.chmod(0o700)
    transport = StreamTransport(RpcOptions())
    try:
        transport.listen()
        assert Path(transport.addresses.unix or "").parent == tmp_path
    finally:
        transport.close()
    assert tmp_path.exists()  # the launcher made it, and the launcher removes it
    assert list(tmp_path.iterdir()) == []


def test_a_removed_directory_cannot_be_reached() -> None:
    with listening() as (transport, _):
        there = transport.addresses
    with pytest.raises(ChannelClosed):
        transport.connect(there, HELLO, time.monotonic() + 5)
