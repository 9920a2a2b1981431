"""Peers that pass descriptors that are not segments, or name segments that they have not passed."""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator, Sequence

import pytest
import torch
from segment_links import Link, MiB, descriptors, memfd, numbered, placed_frame
from transport_group import SOON, receive, soon

from backhaul.devices.segments import MAX_NEW
from backhaul.errors import ProtocolError
from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello
from backhaul.testing import InProcessCluster
from backhaul.transport import segments
from backhaul.transport.base import ChannelClosed
from backhaul.transport.segments import MAX_PASSED, Budget
from backhaul.transport.stream import StreamChannel, StreamTransport
from backhaul.wire.frames import HEADER, encode
from backhaul.wire.landing import land
from backhaul.wire.messages import Ping

CONTROL = mmap.PAGESIZE
ROOM = MiB + CONTROL
PING = bytes(encode(Ping(1)))


@pytest.fixture
def link() -> Iterator[Link]:
    made = Link()
    yield made
    made.close()


def pipes() -> list[int]:
    return list(os.pipe())


def frame(ids: Sequence[int], size: int = MiB) -> bytes:
    return placed_frame([torch.zeros(size, dtype=torch.uint8) for _ in ids], ids)


def altered(data: bytes, **fields: int) -> bytes:
    names = ["magic", "version", "kind", "metadata", "table", "payload"]
    parts = dict(zip(names, HEADER.unpack_from(data), strict=True))
    for name, change in fields.items():
        parts[name] += change
    return HEADER.pack(*parts.values()) + data[HEADER.size :]


def bad() -> dict[str, tuple[list[int], bytes, str]]:
    """Descriptors, the bytes that come with them, and the error. Made for each test, since the descriptors are open."""
    unlinked = os.open("/tmp", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(unlinked, ROOM)
    return {
        "unsealed": ([memfd(ROOM, 0)], frame([1]), "not a sealed segment"),
        "can shrink": ([memfd(ROOM, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)], frame([1]), "not a sealed segment"),
        "seals can change": (
            [memfd(ROOM, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)],
            frame([1]),
            "not a sealed segment",
        ),
        "cannot be written": (
            [memfd(ROOM, segments._SEALS | getattr(fcntl, "F_SEAL_WRITE", 0x0008))],
            frame([1]),
            "is not a segment",
        ),
        "empty": ([memfd(0)], frame([1]), "not a sealed segment"),
        "nothing but control bytes": ([memfd(CONTROL)], frame([1]), "not a sealed segment"),
        "too small": ([memfd(ROOM - 1)], frame([1]), "1048576 bytes in segment 1, which has not been passed or is sm"),
        "pipe": (pipes(), frame([1]), "is not a segment"),
        "socket": ([socket.socket().detach()], PING, "is not a segment"),
        "directory": ([os.open("/", os.O_RDONLY)], PING, "is not a segment"),
        "file": ([unlinked], frame([1]), "not a se"),
        "one good, one bad": ([memfd(ROOM), *pipes()], frame([1]), "is not a segment"),
        "never passed": ([], frame([1]), "in segment 1, which has not been passed"),
        "another one": ([memfd(ROOM)], frame([2]), "in segment 2, which has not been passed"),
        "the largest number": ([memfd(ROOM)], frame([(1 << 32) - 1]), "which has not been passed"),
        "beyond its end": ([memfd(ROOM)], frame([1], 2 * MiB), "2097152 bytes in segment 1, which has not been"),
        "into its control bytes": ([memfd(ROOM)], frame([1], MiB + 1), "1048577 bytes in segment 1"),
        "table that is too short": ([memfd(ROOM)], altered(frame([1]), table=-4, metadata=4), "metadata is not"),
        "flag and no table": ([], altered(PING, kind=0x80), "unknown kind"),
        "unknown kind": ([], altered(frame([1]), kind=0x30), "unknown kind"),
        "too many": ([memfd(ROOM) for _ in range(ALLOWED + 1)], PING, "more descriptors than a message may have"),
        "far too many": ([memfd(ROOM) for _ in range(253)], PING, "more descriptors than a message may have"),
    }


ALLOWED = MAX_PASSED + 2 * MAX_NEW

KINDS = [
    "unsealed",
    "can shrink",
    "seals can change",
    "cannot be written",
    "empty",
    "nothing but control bytes",
    "too small",
    "pipe",
    "socket",
    "directory",
    "file",
    "one good, one bad",
    "never passed",
    "another one",
    "the largest number",
    "beyond its end",
    "into its control bytes",
    "table that is too short",
    "flag and no table",
    "unknown kind",
    "too many",
    "far too many",
]


@pytest.fixture
def cases() -> Iterator[dict[str, tuple[list[int], bytes, str]]]:
    made = bad()
    yield made
    for passed, _, _ in made.values():
        for descriptor in passed:
            os.close(descriptor)


def test_every_kind_of_bad_segment_is_tested(cases: dict[str, tuple[list[int], bytes, str]]) -> None:
    assert list(cases) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_channel_refuses_a_bad_segment(link: Link, cases: dict[str, tuple[list[int], bytes, str]], kind: str) -> None:
    passed, data, says = cases[kind]
    before = descriptors()
    link.raw(data, passed)
    with pytest.raises(ProtocolError, match=says):
        receive(link.far)
    assert descriptors() == before


def test_a_worker_that_refused_a_bad_segment_serves_others(cases: dict[str, tuple[list[int], bytes, str]]) -> None:
    """Only the connection of the bad peer ends."""
    x = numbered(1).view(torch.int64)
    with InProcessCluster(3, sockets=True) as workers:
        agent = workers[0].agent
        hello = Hello(agent.membership.group, 1, "worker1", 0)
        transport = StreamTransport(RpcOptions())
        for _ in range(3):
            assert torch.equal(workers[2].rpc_sync("worker0", torch.neg, args=(x,)), -x)
        before = descriptors()
        for kind, (passed, data, _) in cases.items():
            channel, _ = transport.connect(agent.transport.addresses, hello, soon())
            assert isinstance(channel, StreamChannel)
            beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []
            channel._socket.sendmsg([data], beside)
            with pytest.raises(ChannelClosed):
                assert channel.read(SOON), f"{kind}: the connection is still there"
            channel.close()
            assert torch.equal(workers[2].rpc_sync("worker0", torch.neg, args=(x,)), -x)
        assert descriptors() < before + 10  # out of several hundred; some connections may be opening or closing


def test_segments_over_tcp_are_refused() -> None:
    link = Link(family=socket.AF_INET)
    try:
        link.raw(frame([1]))
        with pytest.raises(ProtocolError, match="unknown kind"):
            receive(link.far)
    finally:
        link.close()


def test_more_segments_than_a_channel_may_have(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MAX_SEGMENTS", 256)
    made = memfd(ROOM)
    before = descriptors()
    for _ in range(segments._MAX_SEGMENTS // MAX_PASSED):
        link.raw(PING, [made] * MAX_PASSED)
        assert receive(link.far).message == Ping(1)
    assert descriptors() == before
    link.raw(PING, [made])
    with pytest.raises(ProtocolError, match="more than 256 segments"):
        receive(link.far)
    assert descriptors() == before
    os.close(made)


def test_descriptors_may_be_named_by_a_later_frame(link: Link) -> None:
    """A descriptor may come with any frame."""
    made = memfd(ROOM)
    link.raw(PING, [made])
    assert receive(link.far).message == Ping(1)
    os.pwrite(made, b"\x07" * MiB, 0)
    link.raw(frame([1]))
    (got,) = receive(link.far).tensors
    assert got.eq(7).all()
    os.close(made)


def test_a_message_limit_counts_bytes_in_segments() -> None:
    one, other = socket.socketpair()
    far = StreamChannel(other, RpcOptions(max_message_bytes=MiB + 1024), Budget(0))
    made = memfd(4 * MiB)
    with one:
        try:
            one.sendmsg([frame([1], MiB)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made]))])
            assert receive(far).tensors[0].nbytes == MiB
            one.sendall(frame([1], MiB + 1024))
            with pytest.raises(MemoryError, match="over the limit of 1049600"):
                land(receive(far).tensors)
        finally:
            far.close()
            os.close(made)
