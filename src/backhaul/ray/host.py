"""The actor that hosts a worker. `driving` starts one for each, and talks to it through Ray until it has joined."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import ray

from backhaul import rpc
from backhaul.errors import NotInitializedError, WorkerLostError
from backhaul.ids import Addresses
from backhaul.launch.interactive import Definition, apply
from backhaul.launch.main_module import MainModule, load
from backhaul.launch.session import free_port
from backhaul.options import RpcOptions
from backhaul.ray.joining import Meeting, join, own_address

if TYPE_CHECKING:
    from backhaul.worker import Worker


@dataclass(frozen=True)
class Spot:
    """Where a process of Ray's is."""

    node: str
    address: str
    pid: int
    free_port: int
    """For programs that also use `torch.distributed`, if this is rank 0."""


@dataclass(frozen=True)
class Joined:
    """A worker that has joined, as its peers know it."""

    incarnation: str
    addresses: Addresses


@dataclass(frozen=True)
class Start:
    """What a process needs to become a worker. It has the secret, and so is given to a method: what an actor is
    created with stays in Ray's control service."""

    name: str
    rank: int
    world_size: int
    meeting: Meeting
    options: RpcOptions = field(repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()


class Host:
    """An actor with a worker in its process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._worker: Worker | None = None

    def __repr__(self) -> str:
        """What Ray puts in front of each line that this process prints."""
        return self._name

    def spot(self) -> Spot:
        """Where this process is."""
        return own_spot()

    def join(self, start: Start, definitions: Sequence[Definition] = ()) -> Joined:
        """Become a worker; returns when the group is complete.

        ``definitions`` are those that the driver has sent before this process has come: others may call it at once.
        """
        os.environ.update(start.environment)
        sys.argv[:] = start.argv
        load(MainModule())
        apply(list(definitions))
        self._worker = join(start.name, start.rank, start.world_size, start.meeting, start.options)
        agent = self._worker.agent
        return Joined(agent.membership.incarnation, agent.membership.find(agent.me).addresses)

    def define(self, definitions: list[Definition]) -> None:
        """Make what the driver's script defines."""
        apply(definitions)

    def run(self, request: bytes) -> bytes:
        """Call a function that the driver, which is not in the group, starts here."""
        function, args, kwargs = pickle.loads(request)
        return pickle.dumps(function(*args, **kwargs), protocol=pickle.HIGHEST_PROTOCOL)

    def leave(self, graceful: bool, timeout: float) -> None:
        """Shut the worker down."""
        try:
            rpc.shutdown(graceful, timeout)
        except WorkerLostError:
            pass  # the driver knows, or is the one that is lost
        except NotInitializedError:
            pass  # it has left by itself, or has never joined

    def outlast(self) -> None:
        """Return when the worker is shut down. Fails when the process ends before that, which tells the driver."""
        if self._worker is not None:
            self._worker.agent.closed.wait()


def own_spot() -> Spot:
    return Spot(ray.get_runtime_context().get_node_id(), own_address(), os.getpid(), free_port())
