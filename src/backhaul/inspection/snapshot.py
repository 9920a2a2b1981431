"""A snapshot: the figures of one worker at one moment. `backhaul.rpc.debug_info` returns it.

Counters only grow, so whoever looks twice has rates. Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

import os
import platform
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from backhaul.agent.agent import Agent
from backhaul.ids import GUEST
from backhaul.inspection.names import name_of_request
from backhaul.inspection.threads import describe_handling, describe_threads

if TYPE_CHECKING:
    from backhaul.autograd.autograd import Autograd
    from backhaul.refs.references import References

_PAGE = os.sysconf("SC_PAGE_SIZE")


def snapshot(agent: Agent, references: References, autograd: Autograd, started: float) -> dict[str, Any]:
    """The figures of the worker that these belong to, which began at ``started`` on the clock of `time.monotonic`."""
    now = time.monotonic()
    peers = _peers(agent)
    return {
        "worker": {
            "name": agent.me.name,
            "rank": agent.me.id,
            "group": agent.membership.group,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "seconds": now - started,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
        },
        "time": time.time(),
        "process": _process(),
        "threads": {"all": threading.active_count(), "pool": agent.pool.size, **_states(agent)},
        "peers": peers,
        "calls": {
            name: sum(peer[name] for peer in peers)
            for name in ("calls_sent", "calls_settled", "calls_received", "calls_finished", "outstanding")
        },
        "running": running(agent, now),
        "waiting": [
            {"thread": thread["name"], **thread["waits"][0]}
            for thread in describe_threads(agent.activity, stacks=False)
            if thread["waits"]
        ],
        "references": references.counts(),
        "autograd": {**autograd.counts(), "in_detail": contexts(autograd)},
        "segments": agent.transport_memory(),
    }


def running(agent: Agent, now: float) -> list[dict[str, Any]]:
    """The requests of peers that are being handled, the oldest first."""
    found = []
    for thread, handling in list(agent.activity.handling.items()):
        if handling.peer.id != GUEST:
            found.append({**describe_handling(handling, now), "thread": thread})
    for late in list(agent.activity.late.values()):
        found.append(
            {
                "peer": late.peer.name,
                "kind": type(late.message).__name__,
                "call": late.message.id,
                "what": name_of_request(late.message),
                "seconds": now - late.since,
                "thread": None,
            }
        )
    return sorted(found, key=lambda each: -each["seconds"])


def contexts(autograd: Autograd) -> list[dict[str, Any]]:
    """The distributed autograd contexts that this worker knows of."""
    found = []
    for record in autograd.contexts:
        with record.lock:
            found.append(
                {
                    "context": record.id,
                    "initiator": record.initiator,
                    "workers": sorted(record.told | record.heard),
                    "sends": len(record.sends),
                    "recvs": len(record.recvs),
                    "gradients": len(record.gradients),
                    "passes": [
                        {"backward": share.backward.id, "starter": share.starter, "gates": share.gates}
                        for share in record.shares.values()
                        if not share.failed
                    ],
                }
            )
    return found


def _peers(agent: Agent) -> list[dict[str, Any]]:
    """What was exchanged with each peer, over the lines that are open now."""
    found: dict[int, dict[str, Any]] = {}

    def of(info: Any, path: str) -> dict[str, Any]:
        return found.setdefault(
            info.id,
            {
                "name": info.name,
                "rank": info.id,
                "path": path,
                "lines": 0,
                "sent": 0,
                "shared": 0,
                "received": 0,
                "calls_sent": 0,
                "calls_settled": 0,
                "calls_received": 0,
                "calls_finished": 0,
                "outstanding": 0,
            },
        )

    for calling in agent.calling():
        peer = of(calling.peer, calling.channel.path)
        peer["calls_sent"] += calling.calls_sent
        peer["calls_settled"] += calling.calls_settled
        peer["outstanding"] += calling.outstanding
    for line in [*agent.calling(), *agent.serving.lines]:
        if line.peer.id == GUEST:
            continue
        peer = of(line.peer, line.channel.path)
        peer["lines"] += 1
        peer["sent"] += line.channel.sent
        peer["shared"] += line.channel.shared
        peer["received"] += line.channel.received
        peer["calls_received"] += line.calls_started
        peer["calls_finished"] += line.calls_finished
    return [found[rank] for rank in sorted(found)]


def _states(agent: Agent) -> dict[str, int]:
    waiting, handling = set(agent.activity.waiting), set(agent.activity.handling)
    return {"handling": len(handling - waiting), "waiting": len(waiting)}


def _process() -> dict[str, Any]:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * _PAGE
    return {"cpu": time.process_time(), "memory": resident, "cores": os.cpu_count() or 1}
