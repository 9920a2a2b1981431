"""Telling: one-way messages to several workers, which may be gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.errors import BackhaulError

_log = logging.getLogger(__name__)


def tell(agent: Agent, ranks: Iterable[int], message: Any, *, lazily: bool = False) -> None:
    """Send a one-way message to those of the workers that can be reached. ``lazily``: it is not urgent."""
    post = agent.post_lazily if lazily else agent.post

    def tell(rank: int) -> None:
        try:
            post(rank, message)
        except BackhaulError as error:
            _log.debug("= %s was not sent to rank %s: %s", type(message).__name__, rank, error)

    reach(agent, ranks, tell)


def reach(agent: Agent, ranks: Iterable[int], tell: Callable[[int], None]) -> None:
    """Call ``tell(rank)`` for all ranks. Does not wait for new connections."""
    for rank in sorted(ranks, key=agent.is_connected, reverse=True):
        if agent.is_connected(rank):
            tell(rank)
        else:
            agent.pool.run(partial(tell, rank))
