"""A creation that the owner refuses: a worker that asks for the value learns why, and does not wait for it."""

from __future__ import annotations

import pytest

from backhaul import rpc
from backhaul.options import Quotas, RpcOptions
from backhaul.refs import holdings
from backhaul.testing import InProcessCluster


def test_the_cause_of_a_refusal_is_stored_before_the_creation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that finds no creation under way checks next whether the creation has failed, without a lock."""
    under_way: list[int] = []
    kept = holdings.kept
    with InProcessCluster(2, options=RpcOptions(quotas=Quotas(references=1))) as workers, workers[0].as_current():
        mine = workers[0].references._holdings

        def noticed(error: BaseException, worker: str) -> BaseException:
            under_way.append(len(mine._creations))
            return kept(error, worker)

        first = rpc.remote("worker1", int)
        assert first.to_here() == 0
        monkeypatch.setattr(holdings, "kept", noticed)
        with pytest.raises(rpc.QuotaError):
            rpc.remote("worker1", int).to_here()
    assert under_way == [1]
