"""Connections over a short path do not use BBR. Those over a long path use the system's congestion control."""

from __future__ import annotations

import errno
import math
import os
import socket
import struct
import time
from typing import Any, cast

import pytest
from transport_group import SOON, Group, receive

from backhaul.transport.sockets import SendBuffer, begin_untimed, choose_control, connect_tcp
from backhaul.wire.frames import encode
from backhaul.wire.messages import Ping


class FakeSocket:
    """A TCP socket with a congestion control and a shortest round trip, in microseconds."""

    family = socket.AF_INET

    def __init__(
        self,
        control: bytes,
        round_trip: int = 0,
        permitted: tuple[bytes, ...] = (b"cubic", b"reno"),
        now: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """``now``: the mean round trip, the packets that were sent again, and all packets."""
        self.now = now
        self.control = control
        self._round_trip = round_trip
        self._permitted = permitted

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert level == socket.IPPROTO_TCP
        if option == socket.TCP_CONGESTION:
            return self.control.ljust(size, b"\0")
        assert option == socket.TCP_INFO
        mean, again, packets = self.now
        return struct.pack("<68xI28xI44xI4xI", mean, again, self._round_trip, packets)[:size]

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if value not in self._permitted:
            raise PermissionError(errno.EPERM, "not permitted")
        self.control = value


def begun(fake: FakeSocket) -> bytes:
    begin_untimed(cast(Any, fake))
    return fake.control


def chosen(fake: FakeSocket) -> bytes:
    choose_control(cast(Any, fake))
    return fake.control


@pytest.mark.parametrize(
    ("system", "permitted", "used"),
    [
        (b"bbr", (b"cubic", b"reno"), b"cubic"),
        (b"bbr3", (b"cubic", b"reno"), b"cubic"),
        (b"bbr", (b"reno",), b"reno"),
        (b"bbr", (), b"bbr"),
        (b"dctcp", (b"cubic", b"reno"), b"dctcp"),
        (b"reno", (b"cubic", b"reno"), b"reno"),
    ],
)
def test_a_connection_does_not_begin_with_bbr_if_the_system_permits_another(
    system: bytes, permitted: tuple[bytes, ...], used: bytes
) -> None:
    assert begun(FakeSocket(system, permitted=permitted)) == used


def systems_control() -> bytes:
    with socket.socket() as new:
        return new.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


@pytest.mark.parametrize("began", [b"cubic", b"reno"])
def test_a_long_path_goes_back_to_the_systems_control(began: bytes) -> None:
    default = systems_control()
    for round_trip in (1000, 200_000, 0xFFFFFFFF):  # the last: none was measured
        assert chosen(FakeSocket(began, round_trip, permitted=(default,))) == default


def test_a_short_path_keeps_the_control_that_it_began_with() -> None:
    for round_trip in (0, 30, 999):
        assert chosen(FakeSocket(b"reno", round_trip, permitted=(b"bbr", b"cubic"))) == b"reno"


@pytest.mark.parametrize(
    ("now", "bad"),
    [
        ((30, 0, 10_000), False),
        ((9_999, 500, 10_000), False),
        ((10_000, 0, 10_000), True),
        ((30, 501, 10_000), True),
        ((30, 1, 3), False),  # too few to tell
        ((30, 2, 20), True),
    ],
)
def test_a_path_that_becomes_long_or_lossy_goes_back_to_the_systems_control(
    now: tuple[int, int, int], bad: bool
) -> None:
    fake = FakeSocket(b"reno", 30, permitted=(systems_control(),), now=now)
    SendBuffer(cast(Any, fake)).fit(1.0, waited=True)
    assert fake.control == (systems_control() if bad else b"reno")


def test_another_control_is_not_reconsidered() -> None:
    fake = FakeSocket(b"vegas", 30, permitted=(systems_control(),), now=(200_000, 9, 10))
    SendBuffer(cast(Any, fake)).fit(1.0, waited=True)
    assert fake.control == b"vegas"


def test_only_a_slice_that_waited_makes_the_buffer_reconsider() -> None:
    fake = FakeSocket(b"reno", 30, permitted=(systems_control(),), now=(200_000, 0, 10))
    buffer = SendBuffer(cast(Any, fake))
    buffer.fit(1.0, waited=False)
    assert fake.control == b"reno"
    buffer.fit(1.1, waited=True)
    assert fake.control == systems_control()


@pytest.mark.parametrize(("again", "bad"), [(0, False), (5, False), (6, True)])
def test_small_frames_notice_losses_and_no_long_round_trips(again: int, bad: bool) -> None:
    fake = FakeSocket(b"reno", 30, permitted=(systems_control(),), now=(200_000, again, 100))
    send_small(SendBuffer(cast(Any, fake)))
    assert fake.control == (systems_control() if bad else b"reno")


def send_small(buffer: SendBuffer) -> None:
    """Send a small frame some time after the last one."""
    buffer._looked = -math.inf
    buffer.note_small()


def test_small_frames_that_follow_each_other_do_not_look_each_time() -> None:
    fake = FakeSocket(b"reno", 30, permitted=(systems_control(),), now=(30, 0, 100))
    buffer = SendBuffer(cast(Any, fake))
    send_small(buffer)
    fake.now = (30, 50, 100)
    buffer._looked = time.monotonic() + 10.0
    buffer.note_small()
    assert fake.control == b"reno"
    send_small(buffer)
    assert fake.control == systems_control()


def test_losses_count_since_the_last_look() -> None:
    fake = FakeSocket(b"reno", 30, permitted=(systems_control(),), now=(30, 0, 10_000))
    buffer = SendBuffer(cast(Any, fake))
    for packets, again, control in (
        (10_000, 0, b"reno"),
        (10_003, 1, b"reno"),  # too few to tell
        (10_006, 2, systems_control()),
    ):
        fake.now = (30, again, packets)
        send_small(buffer)
        assert fake.control == control


@pytest.mark.parametrize("kind", ["tcp", "plain"])
def test_channels_look_when_they_send_small_frames(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[None] = []
    monkeypatch.setattr(SendBuffer, "note_small", lambda self: counted.append(None))
    group = Group(kind)
    try:
        transport, door = group.door()
        here, there = group.connect(transport), door.channel()
        assert here.write(encode(Ping(1)))
        assert receive(there).message == Ping(1)
        assert len(counted) == 1
        there.close()
    finally:
        group.close()


def test_another_control_stays_on_every_path() -> None:
    assert chosen(FakeSocket(b"vegas", 200_000, permitted=(systems_control(),))) == b"vegas"


def test_a_socket_without_such_options_is_left_alone() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        begin_untimed(one)
        choose_control(one)
        one.sendall(b"x")
        assert other.recv(1) == b"x"


def test_connections_of_this_host_use_no_bbr_at_either_end() -> None:
    with socket.socket() as listener:
        begin_untimed(listener)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        here = connect_tcp(*listener.getsockname(), time.monotonic() + SOON)
        there, _ = listener.accept()
    with here, there:
        for end in (here, there):
            choose_control(end)
            control = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert not control.startswith(b"bbr"), control


@pytest.mark.parametrize("kind", ["tcp", "plain"])
def test_channels_of_this_host_use_no_bbr_at_either_end(kind: str) -> None:
    group = Group(kind)
    try:
        transport, door = group.door()
        for channel in (group.connect(transport), door.channel()):
            with socket.socket(fileno=os.dup(channel.fileno())) as end:
                control = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            channel.close()
            assert not control.startswith(b"bbr"), control
    finally:
        group.close()
