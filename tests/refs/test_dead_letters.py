"""Notices for a worker that is dead are thrown away: nothing waits for an answer to them."""

from __future__ import annotations

from backhaul.ids import ShareId
from backhaul.refs.mailbox import Outbox
from backhaul.testing import InProcessCluster
from backhaul.wire.messages import Unpin


def test_notices_for_a_dead_worker_are_thrown_away() -> None:
    with InProcessCluster(3) as workers:
        holdings = workers[0].references._holdings
        box = holdings._post._outboxes[2] = Outbox()
        box.add(Unpin(ShareId(2, 7)))
        assert box.next_batch() is not None
        box.add(Unpin(ShareId(2, 8)))
        assert not holdings.idle()
        holdings._bury(2)
        assert len(box) == 0, "its successor would get them"
        assert holdings.idle(), "a shutdown would wait for them"
