"""The actors of a cluster: creating them in their bundles, sending them requests, ending them.

Requests to an actor go through Ray. A failed one raises a `WorkerLostError` with Ray's explanation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from backhaul.errors import MisuseError, RpcTimeoutError, WorkerLostError
from backhaul.ray.host import Host, Joined, Spot
from backhaul.ray.obituaries import first_sentence
from backhaul.ray.placement import Placement
from backhaul.transport.stream import is_listening

LOOK_SECONDS = 0.5
PAUSE = 0.05
GRACE = 5.0
_PROBE_SECONDS = 1.0
_THREADS = 8
"""Tasks that an actor may run at a time: `Host.outlast`, and requests of the driver."""


class Actor:
    """An actor that hosts a worker, from creation to end."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self.handle = handle
        self.joined: Joined | None = None
        self.over: Any = None
        """Ray's reference to the end of `Host.outlast`."""
        self.ending = ""
        """How the actor ended, if it has."""
        self.dismissed = False
        """The actor ends because another one replaces it."""
        self._spot: Spot | None = None

    @property
    def spot(self) -> Spot:
        if self._spot is None:
            raise WorkerLostError(f"worker {self.name!r} has not started", self.name)
        return self._spot

    def has_started(self, spot: Spot) -> None:
        self._spot = spot

    def has_joined(self, joined: Joined) -> None:
        self.joined = joined


class Actors:
    """All actors of a cluster that may still run, and the resources that Ray reserved for them."""

    def __init__(self, placement: Placement, env: Mapping[str, str]) -> None:
        self.stopping = threading.Event()
        """The cluster is closing: stop waiting for anything."""
        self._placement = placement
        self._env = dict(env)
        self._all: list[Actor] = []

    def create(self, name: str, bundle: int) -> Actor:
        """Ask Ray to start an actor in this bundle."""
        options = {
            **self._placement.options(bundle),
            "max_restarts": 0,
            "max_concurrency": _THREADS,
            "runtime_env": {"env_vars": self._env} if self._env else None,
        }
        actor = Actor(name, ray.remote(Host).options(**options).remote(name))
        self._all.append(actor)
        return actor

    def require(self, asked: Sequence[tuple[Actor, Any]]) -> None:
        """Raise if a request to an actor has failed."""
        ready, _ = ray.wait([reference for _, reference in asked], num_returns=len(asked), timeout=0)
        for actor, reference in asked:
            if reference in ready:
                value_of(actor, reference)

    def await_all(
        self, asked: Sequence[tuple[Actor, Any]], deadline: float, keep: Callable[[Actor, Any], None]
    ) -> None:
        """Wait for requests to actors. Raises the error of the first that fails, or at the deadline."""
        left = {reference: actor for actor, reference in asked}
        while left:
            ready, _ = ray.wait(list(left), timeout=LOOK_SECONDS)
            for reference in ready:
                actor = left.pop(reference)
                keep(actor, value_of(actor, reference))
            if left and self.stopping.is_set():
                raise MisuseError("the cluster is closed")
            if left and time.monotonic() >= deadline:
                late = ", ".join(repr(actor.name) for actor in left.values())
                raise RpcTimeoutError(
                    f"worker {late} did not start in time: its node is slow, or is gone and Ray has no room "
                    "elsewhere. Give a longer timeout, or look at `ray status` and Ray's logs"
                )

    def end(self, actor: Actor, deadline: float) -> None:
        """Kill an actor. Returns when nothing listens at its worker's address, so that another can take its place."""
        ray.kill(actor.handle)
        while actor.joined is not None and is_listening(actor.joined.addresses, time.monotonic() + _PROBE_SECONDS):
            if time.monotonic() >= deadline:
                raise RpcTimeoutError(f"worker {actor.name!r} could not be ended in time, and keeps its place")
            time.sleep(PAUSE)
        actor.ending = actor.ending or "was replaced"

    def forget(self, actor: Actor) -> None:
        """Note that the actor has ended."""
        self._all.remove(actor)

    def dismantle(self) -> None:
        """End all actors, and release the resources that Ray reserved."""
        if ray.is_initialized():
            for actor in self._all:
                ray.kill(actor.handle)
            ended = [actor.handle.outlast.remote() for actor in self._all]
            self._placement.remove()
            if ended:
                ray.wait(ended, num_returns=len(ended), timeout=GRACE)
        for actor in self._all:
            actor.ending = actor.ending or "has left the group"


def value_of(actor: Actor, reference: Any) -> Any:
    """An actor's answer. Raises its exception, or `WorkerLostError` if Ray does not reach the actor."""
    try:
        return ray.get(reference)
    except RayActorError as error:
        raise WorkerLostError(f"worker {actor.name!r} is lost; Ray says: {error}", actor.name) from error


def ending_of(error: RayError) -> str:
    """Ray's explanation for the end of an actor, without its list of possible causes."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("\t")]
    return first_sentence(lines[-1]) if lines else type(error).__name__
