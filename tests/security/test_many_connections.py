"""A peer of a federation that opens connection after connection keeps only a few, and other peers lose none."""

from __future__ import annotations

from liars import SECONDS, Liar, federation

from awaiting import await_events
from backhaul.agent.serving import _MAX_CONNECTIONS
from backhaul.testing import InProcessCluster
from backhaul.wire.messages import Ping


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
