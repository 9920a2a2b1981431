"""Shared by all attacks: the attacked worker, a good peer, and an intruder's connections.

The attacked worker and the good peer are processes. The intruder is the test. It has joined their group as a third
member, so that it gets as far as its credentials allow; and as a fourth member, which cannot be reached when it is
called back. An audit hook in the attacked process records events that must not happen there during an attack.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from backhaul import rpc, worker
from backhaul.agent.membership import Membership
from backhaul.errors import BackhaulError
from backhaul.ids import Addresses
from backhaul.rendezvous import Place, meet
from backhaul.security import handshake
from backhaul.security.handshake import HEAD_SIZE, Hello, Welcome
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.transport.stream import StreamTransport
from backhaul.wire.decoder import Decoder, Envelope
from backhaul.wire.frames import encode
from backhaul.wire.messages import Result
from crew import Hand
from greetings import admit

SOON = 1.0
"""Seconds. After any attack a good peer gets an answer in this time, and most attackers are refused in it."""

PATIENCE = 30.0
MiB = 1 << 20
FORBIDDEN = frozenset(
    {
        "pickle.find_class",
        "exec",
        "compile",
        "os.system",
        "subprocess.Popen",
        "ctypes.dlopen",
        "os.exec",
        "os.posix_spawn",
    }
)
SIZE = 4
VICTIM, PEER, INTRUDER, GHOST = range(SIZE)


# In the attacked process.


class Witness(logging.Handler):
    """Records audit events of this process while it is told to watch, and the log."""

    watching: ClassVar[bool] = False
    events: ClassVar[list[str]] = []
    lines: ClassVar[list[str]] = []
    written: ClassVar[threading.Condition] = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.written:
            self.lines.append(self.format(record))
            self.written.notify_all()

    @classmethod
    def hook(cls, event: str, args: tuple[Any, ...]) -> None:
        # The main thread takes orders from the test, as pickles. Other threads handle what peers send.
        if event in FORBIDDEN and cls.watching and threading.current_thread() is not threading.main_thread():
            cls.events.append(f"{event} {args!r:.200}")


def set_up() -> None:
    """Runs first in the attacked process. A hook cannot be removed, but this process ends with the tests."""
    witness = Witness()
    witness.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    logging.getLogger("backhaul").addHandler(witness)
    logging.getLogger("backhaul").setLevel(logging.INFO)
    sys.addaudithook(Witness.hook)


def set_up_cluster() -> None:
    """In a cluster the attacked worker may pickle exceptions, so the modules for that are loaded first."""
    importlib.import_module("backhaul.wire.pickles")
    set_up()


def watch() -> int:
    """Start to watch. Returns the memory that this process uses."""
    Witness.events.clear()
    Witness.lines.clear()
    # The log limits repeated lines. Earlier attacks must not suppress lines of this one.
    worker.current().agent._reception.door._refusals.summary()
    worker.current().agent.penalties.forgive()
    worker.current().agent.permissions.refusals.forgive()
    Witness.watching = True
    return resident()


def report() -> tuple[list[str], int]:
    """The events since `watch`, and the memory that this process uses now."""
    Witness.watching = False
    return list(Witness.events), resident()


def logged() -> list[str]:
    return list(Witness.lines)


def await_logged(words: str, seconds: float) -> bool:
    with Witness.written:
        return Witness.written.wait_for(lambda: words in "\n".join(Witness.lines), seconds)


def resident() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_watched(function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Run a function on a watched thread. Returns its result, and the events."""
    found: list[Any] = []
    watch()
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0] if found else "it raised", report()[0]


def counts() -> dict[str, int]:
    """The attacked worker's counts of references."""
    return worker.current().references.counts()


# In the good peer.


def ask() -> float:
    """Call the attacked worker. Returns the seconds that it took."""
    began = time.monotonic()
    assert rpc.rpc_sync("worker0", max, args=(3, 4), timeout=PATIENCE) == 4
    return time.monotonic() - began


# In the test.


class Besieged:
    """A worker under attack, a good peer, and the intruder's place in their group. ``options`` are for both workers."""

    def __init__(
        self,
        options: Callable[[int], dict[str, Any]] = lambda rank: {},
        setup: Callable[[], None] = set_up_cluster,
        ask: Callable[[], float] = ask,
    ) -> None:
        self._ask = ask
        self._sockets: list[socket.socket] = []
        self._directory = tempfile.TemporaryDirectory()
        where = Path(self._directory.name)
        init_method = f"file://{where / 'store'}"
        self._hands: list[Hand] = []
        self._home: Home | None = None
        try:
            for rank in (VICTIM, PEER):
                made = rpc.RpcOptions(init_method=init_method, **options(rank))
                place = {"name": f"worker{rank}", "rank": rank, "world_size": SIZE, "rpc_backend_options": made}
                self._hands.append(Hand(setup, place, where / f"stacks{rank}"))
            self.victim, self.peer = self._hands
            self._home = Home(rpc.RpcOptions(**options(INTRUDER)))
            nowhere = Addresses(host="", unix=str(where / "nobody"))
            with ThreadPoolExecutor(2) as joining:
                intruder = joining.submit(_join, init_method, INTRUDER, self._home.addresses)
                # A worker that finds only members that do not listen takes the group for a dead one of an earlier run.
                _await_record(init_method, INTRUDER)
                ghost = joining.submit(_join, init_method, GHOST, nowhere)
                membership = intruder.result()
                ghost.result()
            self.group = membership.group
            self.addresses = membership.find(VICTIM).addresses
            for hand in self._hands:
                hand.await_start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        assert self.victim.process.pid is not None
        return self.victim.process.pid

    def hello(self, rank: int = INTRUDER) -> Hello:
        return Hello(self.group, rank, f"worker{rank}", VICTIM)

    def unix(self) -> socket.socket:
        """A connection on which nothing was sent yet."""
        assert self.addresses.unix is not None
        return self._connect(socket.AF_UNIX, self.addresses.unix)

    def tcp(self) -> socket.socket:
        assert self.addresses.tcp is not None
        return self._connect(socket.AF_INET, self.addresses.tcp)

    def _connect(self, family: int, address: Any) -> socket.socket:
        """Connect. If the queue is full, which a unix socket reports at once, try again."""
        sock = socket.socket(family)
        self._sockets.append(sock)
        sock.settimeout(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                sock.connect(address)
                return sock
            except BlockingIOError:
                assert time.monotonic() < deadline, "nobody is let in"
                time.sleep(0.002)  # there is no event to wait for

    def line(self, rank: int = INTRUDER) -> Line:
        """A connection after the greeting, as a process of the same user that claims to be a member."""
        return Line(self.unix(), self.hello(rank))

    @contextlib.contextmanager
    def attack(self, memory: int = 32 * MiB) -> Iterator[None]:
        """A block in which the intruder attacks. Afterwards the attacked worker must be well."""
        self.peer.run(self._ask)  # so that one-time allocations are not counted
        before = self.victim.run(watch)
        try:
            yield
        finally:
            self.hang_up()
        took = self.peer.run(self._ask, timeout=PATIENCE + 10)
        events, after = self.victim.run(report)
        assert not events, events
        assert took < SOON, f"a good peer waited for {took:.2f} s"
        assert after - before <= memory, f"it has taken {(after - before) / MiB:.1f} MiB"

    def hang_up(self) -> None:
        """Close the intruder's connections."""
        for sock in self._sockets:
            sock.close()
        self._sockets.clear()

    def log(self) -> str:
        return "\n".join(self.victim.run(logged))

    def assert_logged(self, words: str) -> None:
        """Check that the attacked worker logs this text. It may do so a moment after it ends the connection."""
        assert self.victim.run(await_logged, words, 5.0), f"{words!r} is not in the log:\n{self.log()}"

    def close(self) -> None:
        for hand in self._hands:
            hand.close()
        if self._home is not None:
            self._home.close()
        self._directory.cleanup()


def _await_record(init_method: str, rank: int) -> None:
    """Return when a worker has written its address into the store of the first group."""
    store = dist.FileStore(init_method.removeprefix("file://"))
    deadline = time.monotonic() + 60
    while not store.check([f"backhaul/1/member/{rank}"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # there is no event to wait for


def _join(init_method: str, rank: int, addresses: Addresses) -> Membership:
    membership = Membership(meet(init_method, Place(f"worker{rank}", rank, SIZE), PATIENCE), SIZE)
    membership.join(f"worker{rank}", rank, addresses, time.monotonic() + 2 * PATIENCE)
    return membership


class Home(threading.Thread):
    """The intruder's listener. It admits every peer, and answers every request with None."""

    def __init__(self, options: rpc.RpcOptions, name: str = "worker2") -> None:
        super().__init__(daemon=True)
        self._transport = StreamTransport(options)
        self._listeners = self._transport.listen()
        self._transport.introduce(name)
        self._welcome = Welcome(INTRUDER, name)
        self._over, self._end = socket.socketpair()
        self.addresses = self._transport.addresses
        self.start()

    def run(self) -> None:
        poll = select.poll()
        listeners = {listener.fileno(): listener for listener in self._listeners}
        channels: dict[int, Channel] = {}
        for descriptor in (*listeners, self._over.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._over.fileno():
                    for channel in channels.values():
                        channel.close()
                    self._transport.close()
                    return
                if descriptor in listeners:
                    visitor = listeners[descriptor].accept()
                    if visitor is not None:
                        with contextlib.suppress(ChannelClosed, BackhaulError):
                            channel, _ = admit(visitor, lambda hello: self._welcome, time.monotonic() + 5)
                            channels[channel.fileno()] = channel
                            poll.register(channel.fileno(), select.POLLIN)
                elif not self._answer(channels[descriptor]):
                    poll.unregister(descriptor)
                    channels.pop(descriptor).close()

    def _answer(self, channel: Channel) -> bool:
        try:
            channel.read(0)
            while (envelope := channel.next()) is not None:
                if (number := getattr(envelope.message, "id", None)) is not None:
                    channel.write(encode(Result(number, None)))
        except ChannelClosed:
            return False
        return True

    def close(self) -> None:
        self._end.close()
        self.join()
        self._over.close()


class Line:
    """An admitted connection, on which the test sends arbitrary bytes."""

    def __init__(self, sock: socket.socket, hello: Hello) -> None:
        self.socket = sock
        self._decoder = Decoder()
        self._found: list[Envelope] = []
        self.send(handshake.encode(hello))
        rest = handshake.length_of_welcome(self.receive(HEAD_SIZE))
        self.welcome = handshake.decode_welcome(self.receive(rest))

    def send(self, data: bytes) -> None:
        """Send bytes. A cut connection shows only at the next read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def receive(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.socket.recv(count - len(data))
            assert piece, "the connection ended"
            data += piece
        return data

    def answer(self, within: float = PATIENCE) -> Any:
        """The next message; None if the connection has ended, or if nothing came in time."""
        deadline = time.monotonic() + within
        while not self._found:
            left = deadline - time.monotonic()
            if left <= 0 or not _is_readable(self.socket, left):
                return None
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._found = self._decoder.receive_data(data)
        return self._found.pop(0).message

    def close(self) -> None:
        self.socket.close()


def _is_readable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def is_cut(sock: socket.socket, within: float = SOON) -> bool:
    """Whether the other side ends the connection in time. Messages before that are ignored."""
    deadline = time.monotonic() + within
    try:
        while (left := deadline - time.monotonic()) > 0 and _is_readable(sock, left):
            if not sock.recv(1 << 16):
                return True
    except ConnectionError:
        return True
    return False
