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
from backhaul.agent.naming import name_of_request
from backhaul.ids import GUEST
from backhaul.inspection.threads import describe_handling, describe_waits

if TYPE_CHECKING:
    from backhaul.autograd.autograd import Autograd
    from backhaul.refs.references import References

_PAGE = os.sysconf("SC_PAGE_SIZE")

_MOST_ASKED = 100
"""Of the requests to a peer that have no reply yet, this many are listed."""


def snapshot(agent: Agent, references: References, autograd: Autograd, started: float) -> dict[str, Any]:
    """The figures of the worker that these belong to, which began at ``started`` on the clock of `time.monotonic`."""
    now = time.monotonic()
    peers = agent.accounts.exchanges()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
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
        "errors": agent.accounts.errors(),
        "running": running(agent, now),
        "waiting": [
            {"thread": names.get(thread, "a thread that Python did not start"), **wait}
            for thread, wait in describe_waits(agent.activity, now)
        ],
        "references": references.counts(),
        "asked": [
            {"peer": calling.peer.name, "call": call, "what": what}
            for calling in agent.calling()
            for call, what in calling.unanswered()[:_MOST_ASKED]
        ],
        "autograd": {**autograd.counts(), "in_detail": contexts(autograd), "runs": _runs(autograd, now)},
        "segments": agent.transport_memory(),
    }


def running(agent: Agent, now: float) -> list[dict[str, Any]]:
    """The requests of peers that are being handled, the oldest first."""
    found = []
    for thread, handling in agent.activity.handling().items():
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
            passes = [local for local in record.passes.values() if not local.failed]
        missing = {local: local.missing for local in passes}
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
                        {
                            "backward": local.backward.id,
                            "starter": local.starter,
                            "gates": local.gates,
                            "given_to": sorted(local.helpers),
                            "missing": [{"source": source, "rank": rank} for source, rank in absent.items()],
                        }
                        for local, absent in missing.items()
                    ],
                }
            )
    return found


def _runs(autograd: Autograd, now: float) -> list[dict[str, Any]]:
    """The runs of torch's engine that go on."""
    return [
        {
            "context": run.local.backward.context,
            "backward": run.local.backward.id,
            "sources": list(run.sources),
            "thread": run.thread,
            "seconds": now - run.began,
        }
        for run in autograd.engine.runs()
    ]


def _states(agent: Agent) -> dict[str, int]:
    waiting, handling = set(agent.activity.all_waits()), set(agent.activity.handling())
    return {"handling": len(handling - waiting), "waiting": len(waiting)}


def _process() -> dict[str, Any]:
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * _PAGE
    return {"cpu": time.process_time(), "memory": resident, "cores": os.cpu_count() or 1}
