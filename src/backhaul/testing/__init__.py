"""Tools for tests, ours and yours: clusters in one process, message order by seed, faults.

from backhaul.testing import InProcessCluster

with InProcessCluster(3, seed=7) as workers:
    assert workers[0].rpc_sync("worker1", operator.add, args=(1, 2)) == 3
"""

from backhaul.testing.cluster import InProcessCluster
from backhaul.testing.faults import Faults, FaultyTransport
from backhaul.testing.scheduler import Scheduler

__all__ = ["Faults", "FaultyTransport", "InProcessCluster", "Scheduler"]
