"""The actor that hosts a worker. `driving` starts one for each worker, and talks to it through Ray until it joins."""

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
    """The place of a Ray process."""

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
    """What a process needs to become a worker. It contains the secret, so it is passed to a method: the arguments of an
    actor's constructor stay in Ray's control service."""

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
        """The prefix that Ray puts before each line that this process prints."""
        return self._name

    def spot(self) -> Spot:
        """Where this process is."""
        return own_spot()

    def join(self, start: Start, definitions: Sequence[Definition] = ()) -> Joined:
        """Become a worker; returns when the group is complete.

        ``definitions`` are those that the driver sent before this process joined: others may call it at once.
        """
        os.environ.update(start.environment)
        sys.argv[:] = start.argv
        load(MainModule())
        apply(list(definitions))
        self._worker = join(start.name, start.rank, start.world_size, start.meeting, start.options)
        agent = self._worker.agent
        return Joined(agent.membership.incarnation, agent.membership.find(agent.me).addresses)

    def define(self, definitions: list[Definition]) -> None:
        """Apply definitions from the driver's script."""
        apply(definitions)

    def run(self, request: bytes) -> bytes:
        """Call a function for a driver that is not in the group."""
        function, args, kwargs = pickle.loads(request)
        return pickle.dumps(function(*args, **kwargs), protocol=pickle.HIGHEST_PROTOCOL)

    def leave(self, graceful: bool, timeout: float) -> None:
        """Shut the worker down."""
        try:
            rpc.shutdown(graceful, timeout)
        except WorkerLostError:
            pass  # the driver knows, or the driver is the lost worker
        except NotInitializedError:
            pass  # the worker has left by itself, or never joined

    def outlast(self) -> None:
        """Return when the worker is shut down. If the process ends first, the task fails, which tells the driver."""
        if self._worker is not None:
            self._worker.agent.closed.wait()


def own_spot() -> Spot:
    return Spot(ray.get_runtime_context().get_node_id(), own_address(), os.getpid(), free_port())
