"""The watch thread on real lines, in moments that a test holds still."""

from __future__ import annotations

import os
import threading

from backhaul.agent.observing import Event, Losing
from backhaul.testing import InProcessCluster
from backhaul.transport.base import ChannelClosed

PATIENCE = 20.0
MANY = 300
"""More ticks than the watch thread makes before it falls asleep."""


def test_the_watch_thread_does_not_spin_over_a_line_that_is_being_lost() -> None:
    """The thread that loses a line may wait for the interpreter while the line already shows its hang-up."""
    with InProcessCluster(2) as group:
        worker, peer = group[0], group[1]
        assert worker.rpc_sync(peer.info.name, os.getpid) == os.getpid()
        (line,) = worker.agent.calling()
        watch = worker.agent.watch
        losing, go_on, ticked = threading.Event(), threading.Event(), threading.Condition()
        ticks = 0

        def hold(event: Event) -> None:
            if isinstance(event, Losing):
                losing.set()
                assert go_on.wait(PATIENCE)

        def tick() -> bool:
            nonlocal ticks
            with ticked:
                ticks += 1
                ticked.notify_all()
            return False

        worker.agent.observers.add(hold)
        thread = threading.Thread(target=line.lose, args=(ChannelClosed("lost by the test"),))
        thread.start()
        try:
            assert losing.wait(PATIENCE)
            watch.ticks.append(tick)
            (served,) = peer.agent.serving.lines
            served.channel.shutdown()  # now the line shows a hang-up
            with ticked:
                assert ticked.wait_for(lambda: ticks > 0, PATIENCE)
                assert not ticked.wait_for(lambda: ticks > MANY, 1.0)
        finally:
            go_on.set()
            thread.join(PATIENCE)
        assert line not in worker.agent.calling()
