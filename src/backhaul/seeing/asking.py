"""Asking: the answers of all workers of a cluster at once, from outside or inside the cluster.

Each worker has the same short time to answer. A worker that is lost or does not answer gets an error in place of its
answers, so that a cluster that partly hangs can still be inspected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from backhaul.agent.agent import Agent
from backhaul.errors import BackhaulError, RpcTimeoutError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.seeing.guest import Guest, Member
from backhaul.seeing.stuck import ASKER, INSPECTION
from backhaul.transport.base import Transport
from backhaul.wire.messages import Inspect

Answers = dict[str, dict[str, Any]]
"""By worker: the answers by topic; or ``error`` with the reason, and ``lost`` if the worker is gone."""

PATIENCE = 2.0
"""Seconds that each worker has to answer."""


def failure(error: BackhaulError) -> dict[str, Any]:
    """The entry for a worker that gave no answers."""
    if isinstance(error, RpcTimeoutError):
        return {"error": "it does not answer: it hangs in code that holds the GIL, is stopped, or is very busy"}
    if isinstance(error, WorkerLostError):
        reason = str(error).rpartition(": ")[2]
        return {"error": f"its process has ended or is unreachable ({reason})", "lost": True}
    return {"error": str(error)}


def ask_guests(
    members: Sequence[Member], transport: Transport, topics: Sequence[str], seconds: float = PATIENCE
) -> Answers:
    """The answers of these workers to a guest. Each worker is asked over its own connection."""

    def ask(member: Member) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        guest = Guest(member.addresses, transport, seconds)
        try:
            return {topic: guest.ask(topic, max(0.0, deadline - time.monotonic())) for topic in topics}
        finally:
            guest.close()

    return side_by_side({member.info.name: partial(ask, member) for member in members}, seconds)


def side_by_side(questions: Mapping[str, Callable[[], dict[str, Any]]], seconds: float) -> Answers:
    """The answers to all questions, in their order. Each is asked on its own thread."""
    found: Answers = {}

    def answer(name: str, question: Callable[[], dict[str, Any]]) -> None:
        try:
            found[name] = question()
        except BackhaulError as error:
            found[name] = failure(error)

    threads = [
        threading.Thread(target=answer, args=each, daemon=True, name=f"{ASKER}{each[0]}") for each in questions.items()
    ]
    deadline = time.monotonic() + seconds + 1.0  # each question also has its own limit
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = failure(RpcTimeoutError(""))
    return {name: found.get(name, late) for name in questions}


def ask_from_inside(agent: Agent, topics: Sequence[str], seconds: float = PATIENCE) -> Answers:
    """The answers of a group's workers to one of them. May be called on any thread, whatever the other threads do."""

    def ask(info: WorkerInfo) -> dict[str, Any]:
        if info == agent.me:
            return {topic: agent.inspect(topic, {}) for topic in topics}
        deadline = time.monotonic() + seconds
        return {
            topic: agent.insist(info, lambda id: Inspect(id, topic), INSPECTION, max(0.0, deadline - time.monotonic()))  # noqa: B023
            for topic in topics
        }

    return side_by_side({info.name: partial(ask, info) for info in agent.members()}, seconds)
