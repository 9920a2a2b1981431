"""A peer that does wrong again and again must wait."""

from __future__ import annotations

import time

import exposed
import pytest
from liars import federation, is_refused, liar

from backhaul.agent import agent
from backhaul.errors import AuthenticationError
from backhaul.trust.penalties import Penalties
from backhaul.wire import trees
from backhaul.wire.frames import HEADER


def test_the_first_wrongs_are_free_and_later_ones_cost_time() -> None:
    penalties = Penalties(3, 2.0)
    assert penalties.wait("shop", 10.0) == 0
    for _ in range(3):
        penalties.wrong("shop", 10.0)
    assert penalties.wait("shop", 10.0) == 0
    penalties.wrong("shop", 10.0)
    penalties.wrong("shop", 10.0)
    assert penalties.wait("shop", 10.0) == 4.0
    assert penalties.wait("shop", 13.0) == 1.0
    assert penalties.wait("shop", 20.0) == 0
    assert penalties.wait("bank", 10.0) == 0
    penalties.wrong("shop", 100.0)  # old wrongs are forgiven
    assert penalties.wait("shop", 100.0) == 0
    penalties.wrong("shop", 100.0, 9)
    assert penalties.wait("shop", 100.0) == 14.0
    penalties.forgive()
    assert penalties.wait("shop", 10.0) == 0


def test_a_peer_that_breaks_the_protocol_again_and_again_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_BREACH_SECONDS", 60.0)  # on a busy machine, the breaches take longer than the default
    with federation() as workers:
        for _ in range(17):
            with liar(workers) as peer:
                assert peer.channel.peer is not None
                peer.channel._network.post(peer.channel.peer, HEADER.pack(b"BX", 1, 1, 0, 0, 0))
                assert peer.is_cut_off()
        with pytest.raises(AuthenticationError, match=r"too often, and may come back in \d+ s"), liar(workers):
            pass
        assert workers[1].rpc_sync("worker0", exposed.double, (21,)) == 42
        workers[0].agent.penalties.forgive()
        with liar(workers) as peer:
            assert is_refused(peer.call("exposed:hidden"))


def test_a_peer_that_is_refused_all_the_time_is_read_slowly() -> None:
    with federation() as workers, liar(workers) as peer:
        refusals = workers[0].agent.permissions.refusals
        guard = workers[0].agent.serving.guard
        assert guard is not None
        for _ in range(120):
            assert is_refused(peer.call("exposed:hidden"))
        assert refusals.wait("worker2", 0.0) > 0
        assert guard.pause(workers[1].agent.me) == 0
        assert workers[1].rpc_sync("worker0", exposed.double, (21,)) == 42


def test_messages_that_take_long_to_refuse_cost_more() -> None:
    keys = [[trees.TUPLE, *(-1 - (number >> bit & 1) for bit in range(15))] for number in range(4000)]  # with one hash
    with federation() as workers, liar(workers) as peer:
        refusals = workers[0].agent.permissions.refusals
        for _ in range(100):
            assert is_refused(peer.call("exposed:hidden"))
        assert refusals.wait("worker2", time.monotonic()) == 0
        for _ in range(5):
            assert is_refused(peer.call("exposed:echo", [trees.SET, *keys]))
        assert refusals.wait("worker2", time.monotonic()) > 0.2  # five of the others would be 0.1 s
