"""A peer of a federation that opens connection after connection keeps only a few, and other peers lose none."""

from __future__ import annotations

import threading

import pytest
from liars import SECONDS, Liar, federation

from awaiting import await_events
from backhaul.agent.serving import _MAX_CONNECTIONS
from backhaul.testing import InProcessCluster
from backhaul.wire import trees
from backhaul.wire.frames import Frame
from backhaul.wire.messages import Call, Ping, Result


def answers(peer: Liar, id: int) -> bool:
    peer.send(Ping(id))
    return getattr(peer.receive(), "id", None) == id


def served(workers: InProcessCluster, rank: int) -> int:
    return len(workers[0].agent.serving.lines_of(rank))


def test_the_oldest_connections_of_a_peer_go_and_those_of_others_stay() -> None:
    with federation() as workers:
        other = Liar(workers, 1, as_itself=True)
        assert answers(other, 1)
        mine = []
        for number in range(_MAX_CONNECTIONS + 3):
            mine.append(Liar(workers, 2, as_itself=True))
            assert answers(mine[-1], number), "the newest one works"
        assert await_events(workers[0], lambda: served(workers, 2) <= _MAX_CONNECTIONS, SECONDS)
        assert served(workers, 2) == _MAX_CONNECTIONS
        assert served(workers, 1) == 1
        assert answers(other, 2)
        assert all(answers(each, 100) for each in mine[3:])
        for each in (other, *mine):
            each.close()


def test_a_reply_counts_for_all_connections_before_its_first_byte_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer may read that byte, and call again on another connection, before the thread that writes notices."""
    writes, go_on = threading.Event(), threading.Event()
    size = 1 << 20
    with federation(max_unsent_bytes=size) as workers:
        first = Liar(workers, as_itself=True)
        assert answers(first, 1)
        (line,) = workers[0].agent.serving.lines_of(2)
        write = line.channel.write

        def write_slowly(frame: Frame) -> bool:
            writes.set()
            assert go_on.wait(SECONDS)
            return bool(write(frame))

        monkeypatch.setattr(line.channel, "write", write_slowly)
        second = Liar(workers, as_itself=True)
        try:
            first.send(Call(2, [trees.TUPLE, [trees.NAMED, "exposed:much"], [trees.TUPLE, size], {}]))
            assert writes.wait(SECONDS)
            refused = second.call("exposed:much", size)
            assert refused.type_name == "backhaul.errors.QuotaError"
            assert "bytes of replies wait for this peer to read them" in refused.text
            go_on.set()
            assert isinstance(first.receive(), Result)
            assert await_events(workers[0], lambda: not line.offered, SECONDS)
            assert isinstance(second.call("exposed:much", size), Result)
        finally:
            go_on.set()
            first.close()
            second.close()
