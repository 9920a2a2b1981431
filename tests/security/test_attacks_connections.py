"""Connections from strangers: garbage, silence, one byte per second, another user's process."""

from __future__ import annotations

import os
import random
import select
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from intruder import Besieged, MiB, is_cut
from pickle_payloads import payloads

from backhaul.errors import AuthenticationError
from backhaul.options import RpcOptions
from backhaul.security.handshake import MAGIC, Hello
from backhaul.security.tls import ClusterCredentials
from backhaul.transport.base import Addresses
from backhaul.transport.stream import StreamTransport, host_id

LIMIT = 5.0
"""Seconds that a greeting may take."""

NOBODY = 65534


def client_hello(secret: bytes) -> bytes:
    """The first bytes of a TLS connection as a worker makes it."""
    tunnel = ClusterCredentials(secret, "worker2").tunnel(server=False)
    tunnel.shake()
    return tunnel.take()


# Garbage.


def garbage(count: int, secret: bytes) -> list[bytes]:
    choose = random.Random(8)
    hello = client_hello(secret)
    pickles = payloads()
    makers: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: choose.randbytes(choose.randrange(1, 2000)),
        lambda: b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        lambda: MAGIC + choose.randbytes(64) + b"\xff\xff" + choose.randbytes(100),
        lambda: MAGIC + choose.randbytes(64) + b"\x20\x00" + choose.randbytes(32),
        lambda: choose.choice(pickles),
        lambda: hello[: choose.randrange(len(hello))],
        lambda: hello[:60] + choose.randbytes(len(hello) - 60),
        lambda: b"\x16\x03\x01\xff\xff" + choose.randbytes(300),
        lambda: b"\x16\x03\x01\x40\x00" + choose.randbytes(4000),
        lambda: b"\x15\x03\x03\x00\x02\x02\x28",
        lambda: b"BH\x01\x01" + b"\xff" * 16,
    ]
    return [choose.choice(makers)() for _ in range(count)]


def pour(besieged: Besieged, secret: bytes, count: int, at_once: int) -> None:
    """Open many connections, some dozens at a time, each with its own garbage."""
    open_ones: list[socket.socket] = []
    for place, data in enumerate(garbage(count, secret)):
        sock = besieged.tcp() if place % 2 else besieged.unix()
        sock.setblocking(False)
        try:
            sock.send(data)
        except OSError:  # the connection is cut already
            pass
        open_ones.append(sock)
        if len(open_ones) > at_once:
            open_ones.pop(0).close()
    for sock in open_ones:
        sock.close()


def test_10_000_garbage_connections(besieged: Besieged, secret: bytes) -> None:
    with besieged.attack(memory=32 * MiB):
        pour(besieged, secret, 10_000, at_once=200)
        # A busy worker may have accepted the other connections only after they were closed.
        sock = besieged.unix()
        sock.sendall(b"\0" * 200)
        assert is_cut(sock)
        besieged.assert_logged("plain text where TLS is spoken")
        besieged.assert_logged("does not speak Backhaul")
        log = besieged.log()
    assert len(log.splitlines()) < 200, "a line for each is a way to fill the disk"


def test_garbage_is_cut_off_at_once(besieged: Besieged) -> None:
    with besieged.attack():
        for data in (b"GET / HTTP/1.1\r\n\r\n" * 10, b"\x80\x04" * 100, MAGIC + b"\xff" * 66, b"\0" * 200):
            for sock in (besieged.unix(), besieged.tcp()):
                sock.sendall(data)
                assert is_cut(sock), data[:10]


# Slow ones.

SECOND_HALF = b"\x14\x03\x03\x00\x01\x01\x17\x03\x03\x00\x40" + bytes(64)
"""The next bytes of a client in the handshake: a record that TLS 1.3 ignores, and the start of an encrypted one."""


class Slow(threading.Thread):
    """Connections that send one byte per second of a possible greeting, and the times at which they were cut."""

    def __init__(self, sockets: list[socket.socket], words: list[bytes]) -> None:
        super().__init__()
        self.began = [time.monotonic()] * len(sockets)
        self.lasted: dict[int, float] = {}
        self._sockets = sockets
        self._words = words

    def run(self) -> None:
        poll = select.poll()
        places = {}
        for place, sock in enumerate(self._sockets):
            sock.setblocking(False)
            poll.register(sock, select.POLLIN)
            places[sock.fileno()] = place
        said = 0
        while len(self.lasted) < len(self._sockets) and time.monotonic() < self.began[0] + 3 * LIMIT:
            self._say(said)
            said += 1
            second = time.monotonic() + 1
            while (left := second - time.monotonic()) > 0 and len(self.lasted) < len(self._sockets):
                for descriptor, _ in poll.poll(left * 1000):
                    place = places[descriptor]
                    try:
                        over = not self._sockets[place].recv(4096)
                    except OSError:
                        over = True
                    if over:
                        poll.unregister(descriptor)
                        self.lasted[place] = time.monotonic() - self.began[place]

    def _say(self, place: int) -> None:
        for number, sock in enumerate(self._sockets):
            if number not in self.lasted:
                try:
                    sock.send(self._words[number][place : place + 1])
                except OSError:  # the connection is cut, which the poll shows
                    pass


def connect_again_and_again(besieged: Besieged, secret: bytes, stop: threading.Event) -> list[float]:
    """The time of each greeting of a good peer, over unix sockets and TCP."""
    took = []
    for transport in ("unix", "tcp"):
        made = StreamTransport(RpcOptions(secret=secret, transport=transport))
        made.introduce("worker1")
        addresses = Addresses(host=host_id(), unix=besieged.addresses.unix, tcp=besieged.addresses.tcp)
        hello = Hello(besieged.group, 1, "worker1", 0, besieged.addresses)
        until = time.monotonic() + (2.0 if transport == "unix" else 60.0)
        while not stop.is_set() and time.monotonic() < until:
            began = time.monotonic()
            channel, _ = made.connect(addresses, hello, began + 30)
            took.append(time.monotonic() - began)
            channel.close()
            stop.wait(0.02)
    return took


def test_500_slow_connections(besieged: Besieged, secret: bytes) -> None:
    """Each connection is cut when its time is up, and other peers do not notice the attack."""
    count = 500
    word = client_hello(secret)
    # Over a unix socket, over TCP, and over TCP after the first half of the handshake.
    ways = [(besieged.unix, b"", MAGIC * 40), *[(besieged.tcp, b"", word)] * 3, (besieged.tcp, word, SECOND_HALF)]
    with besieged.attack():
        sockets = []
        for place in range(count):
            connect, opening, _ = ways[place % len(ways)]
            sockets.append(connect())
            sockets[-1].sendall(opening)
        slow = Slow(sockets, [ways[place % len(ways)][2] for place in range(count)])
        over = threading.Event()
        took: list[float] = []
        good = threading.Thread(target=lambda: took.extend(connect_again_and_again(besieged, secret, over)))
        slow.start()
        good.start()
        slow.join()
        over.set()
        good.join()
    assert len(slow.lasted) == count, "some were not cut off"
    assert max(slow.lasted.values()) < LIMIT + 1
    assert sorted(slow.lasted.values())[count // 2] > LIMIT - 1, "it was not their time that was up"
    took.sort()
    assert len(took) > 100
    assert took[int(0.99 * len(took))] < 0.5, took[-5:]


# Other users.

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")

KNOCK = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.settimeout(10)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    sys.exit("may not even connect")
try:
    sock.sendall(bytes.fromhex(sys.argv[2]))
    said = sock.recv(100)
except ConnectionError:
    said = b""
print(len(said))
"""


def as_nobody(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    setpriv = shutil.which("setpriv")
    assert setpriv is not None, "the tests need setpriv, of util-linux"
    who = [setpriv, "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"]
    # The environment's interpreter may be in a directory that other users cannot read.
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
    return subprocess.run([*who, python, "-c", code, *args], capture_output=True, text=True, timeout=30, cwd="/")


@needs_root
def test_another_user_cannot_reach_the_socket(besieged: Besieged) -> None:
    assert besieged.addresses.unix is not None
    directory = Path(besieged.addresses.unix).parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    with besieged.attack():
        tried = as_nobody(KNOCK, besieged.addresses.unix, "00")
        assert "may not even connect" in tried.stderr


@needs_root
def test_another_user_that_reaches_the_socket_is_told_nothing(besieged: Besieged) -> None:
    """Opening the directory to others does not open the worker."""
    assert besieged.addresses.unix is not None
    path = Path(besieged.addresses.unix)
    path.parent.chmod(0o755)
    path.chmod(0o777)
    try:
        with besieged.attack():
            for data in (MAGIC + bytes(96), b"\x80\x04."):
                tried = as_nobody(KNOCK, str(path), data.hex())
                assert tried.stdout.strip() == "0", tried.stderr
            besieged.assert_logged(f"is of user {NOBODY}, not 0")
    finally:
        path.chmod(0o700)
        path.parent.chmod(0o700)


LISTEN = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o777)
sock.listen()
print("listening", flush=True)
made, _ = sock.accept()
print(len(made.recv(100)), flush=True)
"""


@needs_root
def test_a_worker_says_nothing_to_a_listener_of_another_user() -> None:
    """If the store leads to another user's process, that process learns nothing."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        path = os.path.join(directory, "socket")
        setpriv = shutil.which("setpriv")
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        command = [str(setpriv), "--reuid", str(NOBODY), "--clear-groups", python, "-c", LISTEN, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/") as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "listening\n"
                transport = StreamTransport(RpcOptions())
                transport.introduce("worker1")
                hello = Hello("group", 1, "worker1", 0)
                with pytest.raises(AuthenticationError, match=f"is of user {NOBODY}, not 0"):
                    transport.connect(Addresses(host=host_id(), unix=path), hello, time.monotonic() + 10)
                assert process.stdout.readline() == "0\n"
            finally:
                process.kill()
