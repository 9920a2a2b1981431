"""Seeing: looking at the workers of a running cluster, from inside or outside of it.

`why_stuck` says what the threads of all workers wait for. The commands ``backhaul top``, ``backhaul dashboard`` and
``backhaul stuck`` look from outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backhaul.seeing.findings import Stuck

__all__ = ["why_stuck"]


def why_stuck(seconds: float = 2.0) -> Stuck:
    """What each waiting thread waits for, over all workers, with cycles and dead ends named; print it to read it.

    For a worker that stands still: call it on another thread, such as one that waits a minute first. Each worker has
    ``seconds`` to answer; one that does not is named. Raises `NotInitializedError` outside of a worker, `MisuseError`
    in a federation, whose members do not show each other what they do.
    """
    from backhaul import current_worker
    from backhaul.errors import MisuseError
    from backhaul.seeing.asking import ask_from_inside
    from backhaul.seeing.stuck import explain

    agent = current_worker.get().agent
    if not agent.trust.shows:
        raise MisuseError("the members of a federation do not show each other what their threads do")
    return explain(ask_from_inside(agent, ("threads", "snapshot"), seconds))
