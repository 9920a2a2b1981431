"""Inspection: answers those who look at a worker. Whatever they ask, they change nothing.

A question has a **topic** and arguments, all plain data, and so is the answer. A question may come from a member of the
cluster or from a guest (`seeing.guest`). In a federation nobody may ask.

    clock       this host's time, to align the clocks of several hosts
    members     the workers of the group and where they can be reached
    snapshot    the figures of `snapshot`
    threads     what each thread does, with its stack
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from backhaul.agent.agent import Agent
from backhaul.errors import MisuseError
from backhaul.inspection.snapshot import snapshot
from backhaul.inspection.threads import describe_threads

if TYPE_CHECKING:
    from backhaul.autograd.autograd import Autograd
    from backhaul.refs.references import References


class Inspection:
    """Answers for one worker. Thread-safe."""

    def __init__(self, agent: Agent, references: References, autograd: Autograd) -> None:
        self._agent = agent
        self._references = references
        self._autograd = autograd
        self._started = time.monotonic()
        self.topics: dict[str, Callable[..., Any]] = {
            "clock": lambda: {"monotonic": time.perf_counter_ns(), "time": time.time_ns()},
            "members": self._members,
            "snapshot": self.snapshot,
            "threads": lambda: describe_threads(agent.activity),
        }

    def __call__(self, topic: str, arguments: Mapping[str, Any]) -> Any:
        """The answer to a question. Raises `MisuseError` for one that has no answer."""
        answer = self.topics.get(topic)
        if answer is None:
            raise MisuseError(f"{topic!r} is not a topic of inspection; there are {', '.join(sorted(self.topics))}")
        return answer(**arguments)

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self._agent, self._references, self._autograd, self._started)

    def _members(self) -> dict[str, Any]:
        membership = self._agent.membership
        if membership.dynamic:
            membership.refresh()
        return {
            "me": self._agent.me.id,
            "group": membership.group,
            "members": [
                {
                    "rank": info.id,
                    "name": info.name,
                    "addresses": msgspec.to_builtins(membership.find(info).addresses),
                }
                for info in membership.members()
            ],
        }
