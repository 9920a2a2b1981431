"""Asking: the answers of all workers of a cluster at once, from outside or from inside of it.

Each worker has the same short time for its answer. One that is lost or does not answer says so in its place, so that a
cluster of which a part stands still can be looked at.
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
"""By worker: the answers by topic; or ``error`` says why there are none, and ``lost`` whether the worker is gone."""

PATIENCE = 2.0
"""Seconds that each worker has."""


def failure(error: BackhaulError) -> dict[str, Any]:
    """What stands in the place of answers."""
    if isinstance(error, RpcTimeoutError):
        return {"error": "it does not answer: it hangs in code that holds the interpreter, is stopped, or is very busy"}
    if isinstance(error, WorkerLostError):
        reason = str(error).rpartition(": ")[2]
        return {"error": f"its process has ended, or cannot be reached ({reason})", "lost": True}
    return {"error": str(error)}


def ask_guests(
    members: Sequence[Member], transport: Transport, topics: Sequence[str], seconds: float = PATIENCE
) -> Answers:
    """What these workers answer to somebody outside. Each is asked over a connection of its own."""

    def ask(member: Member) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        guest = Guest(member.addresses, transport, seconds)
        try:
            return {topic: guest.ask(topic, max(0.0, deadline - time.monotonic())) for topic in topics}
        finally:
            guest.close()

    return side_by_side({member.info.name: partial(ask, member) for member in members}, seconds)


def side_by_side(questions: Mapping[str, Callable[[], dict[str, Any]]], seconds: float) -> Answers:
    """The answers to all of these, each asked on a thread of its own, in the order of the questions."""
    found: Answers = {}

    def answer(name: str, question: Callable[[], dict[str, Any]]) -> None:
        try:
            found[name] = question()
        except BackhaulError as error:
            found[name] = failure(error)

    threads = [
        threading.Thread(target=answer, args=each, daemon=True, name=f"{ASKER}{each[0]}") for each in questions.items()
    ]
    deadline = time.monotonic() + seconds + 1.0  # they have a limit of their own
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = failure(RpcTimeoutError(""))
    return {name: found.get(name, late) for name in questions}


def ask_from_inside(agent: Agent, topics: Sequence[str], seconds: float = PATIENCE) -> Answers:
    """What the workers of a group answer to one of them. May be called on any thread, whatever the others do."""

    def ask(info: WorkerInfo) -> dict[str, Any]:
        if info == agent.me:
            return {topic: agent.inspect(topic, {}) for topic in topics}
        deadline = time.monotonic() + seconds
        return {
            topic: agent.insist(info, lambda id: Inspect(id, topic), INSPECTION, max(0.0, deadline - time.monotonic()))  # noqa: B023
            for topic in topics
        }

    return side_by_side({info.name: partial(ask, info) for info in agent.members()}, seconds)
