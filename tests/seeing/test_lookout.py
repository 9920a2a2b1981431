"""Polling the workers of a group while they come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from backhaul.errors import WorkerLostError
from backhaul.options import RpcOptions
from backhaul.seeing.guest import Member, transport_for
from backhaul.seeing.lookout import Lookout
from backhaul.seeing.view import View
from backhaul.transport.stream import StreamTransport
from backhaul.worker import Worker

PATIENCE = 20.0


@pytest.fixture
def join() -> Iterator[Callable[[str], Worker]]:
    """Adds workers to a dynamic group."""
    store = dist.HashStore()
    workers: list[Worker] = []

    def join(name: str) -> Worker:
        workers.append(Worker(name, None, None, store=store, transport=StreamTransport(RpcOptions())))
        return workers[-1]

    yield join
    for worker in workers:
        if not worker.closed:
            worker.shutdown(graceful=False)


def states(view: View) -> dict[str, str]:
    return {row.name: row.state for row in view.rows()}


def test_workers_that_come_and_go(join: Callable[[str], Worker]) -> None:
    first = join("first")
    member = Member(first.info, first.agent.membership.find(first.info).addresses)
    with Lookout([member], transport_for(), interval=0.05, metered=True) as lookout:
        assert lookout.wait_until(lambda view: states(view) == {"first": "live"}, PATIENCE)
        second = join("second")
        assert lookout.wait_until(lambda view: states(view) == {"first": "live", "second": "live"}, PATIENCE)
        assert lookout.name_of(second.info.id) == "second"
        first.rpc_sync("second", max, args=(1, 2))
        assert lookout.wait_until(lambda view: "max" in view.curves(), PATIENCE)
        second.shutdown(graceful=False)
        assert lookout.wait_until(lambda view: states(view) == {"first": "live"}, PATIENCE)  # the other has left
        with pytest.raises(WorkerLostError, match="there is no worker 'second'"):
            lookout.ask("second", "threads")


def test_several_workers_are_asked_at_once(join: Callable[[str], Worker]) -> None:
    workers = [join(name) for name in ("first", "second")]
    members = [Member(each.info, each.agent.membership.find(each.info).addresses) for each in workers]
    with Lookout(members, transport_for(), interval=0.05) as lookout:
        assert set(lookout.ask_each(["first", "second", "third"], "clock")) == {"first", "second"}
        workers[1].shutdown(graceful=False)
        answers = lookout.ask_all("clock")
        assert answers["first"]["clock"]["time"] > 0
        assert answers["second"]["lost"]
