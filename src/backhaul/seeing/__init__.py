"""Seeing: tools to look at the workers of a running cluster, from inside or outside.

`why_stuck` tells what the threads of all workers wait for. The commands ``backhaul top``, ``backhaul dashboard`` and
``backhaul stuck`` look from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backhaul.seeing.findings import Stuck

__all__ = ["why_stuck"]


def why_stuck(seconds: float = 2.0) -> Stuck:
    """What each waiting thread of all workers waits for, with cycles and dead ends named. Print the result to read it.

    For a worker that hangs: call it on another thread, for example one that waits a minute first. Each worker has
    ``seconds`` to answer; the result names those that do not. Raises `NotInitializedError` outside a worker, and
    `MisuseError` in a federation, whose members do not show each other what they do.
    """
    from backhaul import current_worker
    from backhaul.errors import MisuseError
    from backhaul.seeing.asking import ask_from_inside
    from backhaul.seeing.stuck import explain

    agent = current_worker.get().agent
    if not agent.trust.shows:
        raise MisuseError("the members of a federation do not show each other what their threads do")
    return explain(ask_from_inside(agent, ("threads", "snapshot"), seconds))
