"""The door: many greetings on one thread, bounded in number and time, and the log lines about them."""

from __future__ import annotations

import logging
import os
import queue
import re
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from backhaul.agent import door as door_module
from backhaul.agent.door import Door, Refusals
from backhaul.errors import AuthenticationError, RpcTimeoutError
from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello, Welcome
from backhaul.security.tls import ClusterCredentials
from backhaul.testing import InProcessCluster
from backhaul.transport.base import Channel, ChannelClosed
from backhaul.transport.memory import MemoryTransport, Network
from backhaul.transport.stream import StreamTransport

SECRET = bytes(range(32))
HELLO = Hello("group", 1, "worker1", 0)
SOON = 10.0


def welcome_all(hello: Hello) -> Welcome:
    return Welcome(0, "worker0")


class Doorway:
    """A door with a listener, and a thread that watches it as a worker's does."""

    def __init__(self, kind: str, judge: Callable[[Hello], Welcome] = welcome_all, **how: Any) -> None:
        self._network = Network()
        self._kind = kind
        self.let_in: queue.Queue[tuple[Channel, Hello]] = queue.Queue()
        self.transport = self._transport("worker0")
        (self.listener,) = self.transport.listen()
        self.door = Door("backhaul-test-door", judge, lambda *admitted: self.let_in.put(admitted), **how)
        self._bell = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _transport(self, name: str) -> StreamTransport | MemoryTransport:
        if self._kind == "memory":
            return MemoryTransport(self._network)
        made = StreamTransport(RpcOptions(transport=self._kind, secret=SECRET))
        made.introduce(name)
        return made

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(self.listener.fileno(), select.POLLIN)
        while self._bell not in [descriptor for descriptor, _ in poll.poll()]:
            self.door.visit(self.listener)

    def raw(self) -> socket.socket:
        """A stranger's connection."""
        addresses = self.transport.addresses
        if addresses.tcp is None:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(None)
            sock.connect(addresses.unix)
        else:
            sock = socket.create_connection(addresses.tcp)
        sock.settimeout(SOON)
        return sock

    def good(self) -> float:
        """Connect as a peer; the seconds that it took."""
        began = time.monotonic()
        channel, welcome = self._transport("worker1").connect(self.transport.addresses, HELLO, began + SOON)
        seconds = time.monotonic() - began
        assert welcome.name == "worker0"
        far, hello = self.let_in.get(timeout=SOON)
        assert hello == HELLO
        channel.close()
        far.close()
        return seconds

    def known(self) -> int:
        """The number of authenticated connections that have not been admitted yet."""
        return sum(guest.visitor.trusted for guest in list(self.door._guests.values()))

    def stop_watching(self) -> None:
        if self._thread.is_alive():
            os.eventfd_write(self._bell, 1)
            self._thread.join()

    def close(self) -> None:
        self.stop_watching()
        os.close(self._bell)
        self.door.close()
        self.transport.close()


@pytest.fixture
def doorways() -> Iterator[Callable[..., Doorway]]:
    with ExitStack() as stack:

        def make(kind: str = "tcp", *args: Any, **how: Any) -> Doorway:
            made = Doorway(kind, *args, **how)
            stack.callback(made.close)
            return made

        yield make


def is_over(sock: socket.socket) -> bool:
    """Wait until the other side closes."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def half_way(doorway: Doorway, sock: socket.socket) -> None:
    """An authenticated peer that does not send its hello."""
    before = doorway.known()
    tunnel = ClusterCredentials(SECRET, "worker1").tunnel(server=False)
    while not tunnel.shake():
        sock.sendall(tunnel.take())
        tunnel.feed(sock.recv(65536))
    sock.sendall(tunnel.take())
    deadline = time.monotonic() + SOON
    while doorway.known() == before:  # the door signals no event for this
        assert time.monotonic() < deadline
        time.sleep(0.001)


# Which visitors are admitted.


@pytest.mark.parametrize("kind", ["memory", "unix", "tcp"])
def test_peers_get_in(doorways: Callable[..., Doorway], kind: str) -> None:
    doorway = doorways(kind)
    for _ in range(3):
        assert doorway.good() < 2


def test_an_idle_door_has_no_thread(doorways: Callable[..., Doorway], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "_LINGER", 0.05)
    doorway = doorways()
    assert doorway.door._thread is None
    for _ in range(3):
        doorway.good()
        thread = doorway.door._thread
        if thread is not None:
            thread.join(SOON)
            assert not thread.is_alive()
        assert doorway.door._thread is None
        assert doorway.door._bell == -1


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_silent_visitor_is_cut_off_and_delays_no_other(doorways: Callable[..., Doorway], kind: str) -> None:
    doorway = doorways(kind, patience=1.0)
    began = time.monotonic()
    strangers = [doorway.raw() for _ in range(100)]
    assert max(doorway.good() for _ in range(3)) < 0.8
    for stranger in strangers:
        assert is_over(stranger)
        stranger.close()
    assert 0.9 < time.monotonic() - began < 4


def test_a_visitor_that_sends_byte_by_byte_gets_no_extra_time(doorways: Callable[..., Doorway]) -> None:
    """The bytes are those of a real first record, so each of them could complete it."""
    tunnel = ClusterCredentials(SECRET, "worker1").tunnel(server=False)
    tunnel.shake()
    opening = tunnel.take()
    doorway = doorways(patience=1.0)
    began = time.monotonic()
    strangers = [doorway.raw() for _ in range(50)]
    slowest = 0.0
    for place in range(len(opening)):
        for stranger in strangers:
            try:
                stranger.send(opening[place : place + 1])
            except OSError:
                continue
        slowest = max(slowest, doorway.good()) if place < 3 else slowest
        if time.monotonic() - began > 1.2:
            break
    for stranger in strangers:
        assert is_over(stranger)
        stranger.close()
    assert time.monotonic() - began < 4
    assert slowest < 0.8


def test_a_full_door_cuts_off_the_oldest_stranger(doorways: Callable[..., Doorway]) -> None:
    doorway = doorways(most=8)
    with ExitStack() as stack:
        known = stack.enter_context(doorway.raw())
        half_way(doorway, known)
        strangers = [stack.enter_context(doorway.raw()) for _ in range(12)]
        doorway.good()
        # There was room for 7 beside the one that is known; the good one took one more.
        for stranger in strangers[:5]:
            assert is_over(stranger)
        for sock in (known, *strangers[6:]):
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)


def test_a_door_full_of_known_peers_turns_newcomers_away(doorways: Callable[..., Doorway]) -> None:
    doorway = doorways(most=2, patience=1.5)
    with ExitStack() as stack:
        known = [stack.enter_context(doorway.raw()) for _ in range(2)]
        for sock in known:
            half_way(doorway, sock)
        stranger = stack.enter_context(doorway.raw())
        assert is_over(stranger)
        assert all(map(is_over, known))  # at the end of their time
    doorway.good()


def test_a_refusal_reaches_the_peer(doorways: Callable[..., Doorway]) -> None:
    doorway = doorways("tcp", lambda hello: Welcome(0, "worker0", "it is shutting down"))
    with pytest.raises(AuthenticationError, match="it is shutting down"):
        doorway.good()


def test_a_judge_that_fails_does_not_end_the_door(
    doorways: Callable[..., Doorway], caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([ValueError("what now?")])

    def judge(hello: Hello) -> Welcome:
        for failure in failures:
            raise failure
        return welcome_all(hello)

    doorway = doorways("tcp", judge)
    with pytest.raises(ChannelClosed):
        doorway.good()
    doorway.good()
    assert "a greeting failed here: what now?" in caplog.text


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_closing_turns_everybody_away(doorways: Callable[..., Doorway], kind: str) -> None:
    doorway = doorways(kind)
    with doorway.raw() as stranger:
        doorway.good()  # so the stranger has been seen
        doorway.door.close()
        doorway.door.close()
        assert is_over(stranger)
    with doorway.raw() as late:
        assert is_over(late)


def test_a_process_without_free_descriptors_cuts_off_half_of_the_strangers(doorways: Callable[..., Doorway]) -> None:
    """The freed descriptors let others connect."""
    doorway = doorways(patience=60.0)
    with ExitStack() as stack:
        strangers = [stack.enter_context(doorway.raw()) for _ in range(10)]
        doorway.good()  # so those have been seen
        doorway.stop_watching()
        stack.enter_context(doorway.raw())  # one more is at the listener
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        while (filler := os.open(os.devnull, os.O_RDONLY)) < highest:
            stack.callback(os.close, filler)
        os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, (filler, before[1]))
        try:
            doorway.door.visit(doorway.listener)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for stranger in strangers[:5]:
            assert is_over(stranger)


# What is logged.


def test_each_reason_is_logged_a_few_times_and_then_counted() -> None:
    refusals = Refusals()
    assert refusals.summary() is None
    assert refusals.is_news("a")
    assert refusals.summary() is None
    assert refusals.is_news("a")
    assert refusals.is_news("b")
    assert [refusals.is_news(each) for each in "aaab"] == [False] * 4
    assert refusals.summary() == "4 more connections were not let in; 3 times: a; 1 times: b"
    assert refusals.summary() is None


def word(number: int) -> str:
    return "".join("abcdefghij"[int(digit)] for digit in str(number))


def test_endless_different_reasons_take_bounded_memory() -> None:
    refusals = Refusals()
    news = [refusals.is_news(word(10000 + number) * 1000) for number in range(1000)]
    assert sum(news) == 32
    assert sum(map(len, refusals._known)) <= 32 * 300
    assert refusals.summary() == "968 more connections were not let in; 968 times for other reasons"
    for number in range(20):
        for _ in range(number + 2):
            refusals.is_news(word(number))
    summary = refusals.summary() or ""
    assert "210 more connections" in summary
    assert "20 times: bj; 19 times: bi; 18 times: bh; 17 times: bg; 16 times: bf; 120 times for other" in summary


def test_bytes_that_a_visitor_chose_do_not_make_a_new_reason() -> None:
    refusals = Refusals()
    said = [b"\x00'", b'"', b"GET '", bytes(40), b"", b"\\"]
    news = [refusals.is_news(f"no TLS: it starts with {each!r}, {number} bytes") for number, each in enumerate(said)]
    assert news == [True] + [False] * (len(said) - 1)
    assert refusals.is_news("its certificate comes from another cluster")
    assert refusals.is_news("a name " + "'" + "x" * 1000)
    assert not refusals.is_news("a name " + "'" + "y" * 1000)
    assert (refusals.summary() or "").startswith(
        "6 more connections were not let in; 5 times: no TLS: it starts with …,"
    )


def test_a_thousand_strangers_are_logged_in_a_few_lines(
    doorways: Callable[..., Doorway], caplog: pytest.LogCaptureFixture
) -> None:
    doorway = doorways()
    openings = [b"GET / HTTP/1.1\r\n\r\n", b"BHL2" + bytes(100), b"", b"\x16\x03\x01\x7f\xff"]
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            with doorway.raw() as sock:
                try:
                    sock.sendall(openings[number % 4])
                    sock.shutdown(socket.SHUT_WR)
                    is_over(sock)
                except OSError:
                    pass  # it was cut off first
        assert doorway.good() < 2
        doorway.door.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) < 20
    text = "\n".join(lines)
    port = "a connection from 127.0.0.1, port "
    assert port in text
    assert "plain text where TLS is spoken: a connection that starts with b'GET '" in text
    assert re.search("49[5-9] times: plain text where TLS is spoken: a connection that starts with …", text)
    assert "the connection ended during the greeting" in text
    assert "starts with a record of 32767 bytes" in text
    assert "more connections were not let in; " in text


# In a worker.


def test_many_greetings_at_once_need_one_door_thread_per_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers greet each other at once."""
    with InProcessCluster(6, sockets=True) as workers:
        for one in workers:
            for other in workers:
                if one is not other:
                    assert one.rpc_sync(other.info.name, os.getpid) == os.getpid()
        names = [thread.name for thread in threading.enumerate() if thread.name.endswith("-door")]
        assert len(names) == len(set(names)) <= 6


def test_a_greeting_that_nobody_answers_is_a_timeout(doorways: Callable[..., Doorway]) -> None:
    doorway = doorways()
    doorway.stop_watching()
    with pytest.raises(TimeoutError) as late:
        doorway._transport("worker1").connect(doorway.transport.addresses, HELLO, time.monotonic() + 0.2)
    assert not isinstance(late.value, RpcTimeoutError)
