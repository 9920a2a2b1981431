"""Inspection: answers questions about a worker. No question changes anything.

A question has a **topic** and arguments. Question and answer are plain data. A question may come from a member of the
cluster or from a guest (`seeing.guest`). A member of a federation refuses all questions.

    clock       this host's time, to align the clocks of several hosts
    context     what the worker has recorded in an autograd context, see `contexts`
    members     the workers of the group and their addresses
    meter       the figures of `meter`, which starts to count at the first question
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
from backhaul.inspection.contexts import describe_context
from backhaul.inspection.meter import Meter
from backhaul.inspection.metrics import LOOPBACK, Exposition, port_of
from backhaul.inspection.snapshot import snapshot
from backhaul.inspection.spans import Spans
from backhaul.inspection.threads import describe_threads
from backhaul.options import RpcOptions

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider
    from prometheus_client import CollectorRegistry

    from backhaul.autograd.autograd import Autograd
    from backhaul.refs.references import References


class Inspection:
    """Answers for one worker. Thread-safe."""

    def __init__(self, agent: Agent, references: References, autograd: Autograd) -> None:
        self._agent = agent
        self._references = references
        self._autograd = autograd
        self._started = time.monotonic()
        self.name = agent.me.name
        self.meter = Meter(agent)
        self.when_closed: list[Callable[[], None]] = []
        """Called when the worker is shut down. They end tools that observe the worker continuously."""
        self.topics: dict[str, Callable[..., Any]] = {
            "clock": lambda: {"monotonic": time.perf_counter_ns(), "time": time.time_ns()},
            "context": lambda **arguments: describe_context(agent, autograd, **arguments),
            "members": self._members,
            "meter": self.meter.figures,
            "snapshot": self.snapshot,
            "threads": lambda: describe_threads(agent.activity),
        }

    def start(self, options: RpcOptions) -> None:
        """Start the tools that the options or the environment ask for."""
        if options.tracing:
            self.trace()
        port = options.metrics_port_or_inherited()
        if port is not None:
            self.expose(port_of(port, self._agent.me.id))

    def __call__(self, topic: str, arguments: Mapping[str, Any]) -> Any:
        """The answer to a question. Raises `MisuseError` for an unknown one."""
        answer = self.topics.get(topic)
        if answer is None:
            raise MisuseError(f"{topic!r} is not a topic of inspection; there are {', '.join(sorted(self.topics))}")
        return answer(**arguments)

    def snapshot(self) -> dict[str, Any]:
        return snapshot(self._agent, self._references, self._autograd, self._started)

    def debug_info(self) -> dict[str, Any]:
        """The snapshot, and the meter's figures; ``meter`` is None while the meter is off."""
        return {**self.snapshot(), "meter": self.meter.figures_if_on()}

    def expose(self, port: int, host: str = LOOPBACK, registry: CollectorRegistry | None = None) -> Exposition:
        """Serve the metrics of this worker until it is shut down; see `backhaul.seeing.metrics.start`."""
        exposition = Exposition(self, port, host, registry)
        self.when_closed.append(exposition.close)
        return exposition

    def trace(self, provider: TracerProvider | None = None) -> Callable[[], None]:
        """Trace this worker until it is shut down; see `backhaul.seeing.spans.enable`."""
        if self._agent.execution.tracing is not None:
            raise MisuseError(f"worker {self.name!r} is already traced")
        spans = Spans(self._agent, provider)
        self.when_closed.append(spans.close)
        return spans.close

    def close(self) -> None:
        """End all tools that observe this worker continuously."""
        while self.when_closed:
            self.when_closed.pop()()

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
