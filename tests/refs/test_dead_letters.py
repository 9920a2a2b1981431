"""What happens to notices for a worker that is gone, and to the references that it held."""

from __future__ import annotations

from backhaul.ids import ShareId
from backhaul.refs.mailbox import Outbox
from backhaul.testing import InProcessCluster
from backhaul.wire.messages import Unpin


def test_notices_for_a_dead_worker_are_thrown_away() -> None:
    with InProcessCluster(3) as workers:
        holdings = workers[0].references._holdings
        box = holdings._tables.post._outboxes[2] = Outbox()
        box.add(Unpin(ShareId(2, 7)))
        assert box.next_batch() is not None
        box.add(Unpin(ShareId(2, 8)))
        assert not holdings.idle()
        holdings._deaths.bury(2)
        assert len(box) == 0, "its successor would get them"
        assert holdings.idle(), "a shutdown would wait for them"


def test_a_worker_that_leaves_first_does_not_hide_its_leak() -> None:
    """At the end of a group, the fastest worker may be gone before the owner looks at what others hold."""
    with InProcessCluster(2) as workers:
        reference = workers[1].remote("worker0", int)
        assert reference.to_here() == 0
        holdings = workers[0].references._holdings
        (leak,) = holdings.leaks()
        holdings.expect_none()
        holdings._deaths.bury(1)
        assert holdings.leaks() == [leak]
        assert leak.endswith("held by worker1")
