"""What Ray holds now, and waiting for that to change."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray
from ray._private.state import actors

PATIENCE = 60.0
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


def eventually(condition: Callable[[], Any], within: float = PATIENCE) -> Any:
    """The first true value of the condition. Polls, because Ray has no event for what others hold."""
    deadline = time.monotonic() + within
    while not (found := condition()):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return found


def patiently(start: Callable[[], Any]) -> Any:
    """Start a node. Ray itself allows half a minute, which is not enough on a busy machine."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
            last = error
    raise last


def living_actors() -> list[str]:
    """The actors that host workers. Ray's libraries leave some of theirs, such as Ray Train's record of runs."""
    return [each["Name"] for each in actors().values() if each["ActorClassName"] == "Host" and each["State"] != "DEAD"]


def placements() -> list[str]:
    return [each["state"] for each in ray.util.placement_group_table().values() if each["state"] != "REMOVED"]
