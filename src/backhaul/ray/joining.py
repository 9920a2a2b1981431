"""How a Ray process becomes a worker: the group's maker hosts a meeting place, and each actor gets a rank.

The process that makes a group hosts its store. Actors get its address and the secret as an argument. `deal` is
pure: it turns the arrivals and their nodes into ranks.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import ray

from backhaul.errors import MisuseError, OptionError, RpcTimeoutError
from backhaul.options import RpcOptions
from backhaul.ray.obituaries import Obituaries, own_life
from backhaul.rendezvous import Place, host_store, visit_store
from backhaul.worker import Worker, become_worker, current

if TYPE_CHECKING:
    from torch.distributed import Store

JOIN_SECONDS = 120.0
_LOOK_SECONDS = 0.02
_SECRET_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Meeting:
    """The address of a group's store."""

    host: str
    port: int


class Arrival(msgspec.Struct, frozen=True):
    """A process that came to a group without a rank."""

    process: str
    node: str


def deal(arrivals: list[Arrival]) -> dict[str, int]:
    """The rank of each process. Processes of one node have consecutive ranks, in the order of arrival. Pure."""
    order = list(dict.fromkeys(arrival.node for arrival in arrivals))
    ranked = sorted(range(len(arrivals)), key=lambda number: (order.index(arrivals[number].node), number))
    return {arrivals[number].process: rank for rank, number in enumerate(ranked)}


class Group:
    """A group for actors of this job, made by `group`. Pass it to them as an argument; it contains the group's secret.

    The process that made the group hosts its store, until `close` or the end of the process.
    """

    def __init__(self, world_size: int, options: RpcOptions) -> None:
        self.world_size = world_size
        self._options = options
        address = own_address()
        self._store: Store | None
        self._store, port = host_store(address, JOIN_SECONDS)
        self._meeting = Meeting(address, port)

    def __repr__(self) -> str:
        return f"<Group of {self.world_size}, which meets at {self._meeting.host}:{self._meeting.port}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}

    def close(self) -> None:
        """Stop hosting the store. Workers that have met continue; none can join or come back."""
        self._store = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def group(world_size: int, *, options: RpcOptions | None = None) -> Group:
    """Make a group of ``world_size`` workers, for actors that call `init_rpc` with it.

    ``options`` apply to all workers. Keep the group, or its ``with`` block, until the workers are done. Raises
    `OptionError`, and `MisuseError` if this process is not part of the Ray cluster.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise OptionError(f"group() needs a number of workers, at least 1; got {world_size!r}")
    require_ray("group()")
    return Group(world_size, closed_options(options, "group()"))


def init_rpc(
    name: str | None = None, *, group: Group, rank: int | None = None, rpc_backend_options: RpcOptions | None = None
) -> None:
    """Make this Ray actor or driver a worker of ``group``. Call `backhaul.rpc.shutdown` at the end.

    Returns when all workers of the group have joined. Inside a training function of Ray Train, ``rank`` defaults to
    Train's rank; elsewhere ranks are assigned by node in the order of arrival. The default name is ``worker<rank>``. An
    actor that Ray restarts takes its old place. ``rpc_backend_options`` replace those of the group. Without credentials
    among them, the worker has those of the group.

    Raises `OptionError` for a rank or name that is taken, and `RpcTimeoutError` if others do not join in time.
    """
    if not isinstance(group, Group):
        raise OptionError(
            f"group={group!r} must be made by backhaul.ray.group() and passed to this actor as an argument"
        )
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < group.world_size):
        raise OptionError(f"rank {rank!r} is not in 0..{group.world_size - 1}, the ranks of this group")
    options = group._options if rpc_backend_options is None else own_options(rpc_backend_options, group._options)
    if rank is None:
        rank = _rank_of_train()
    join(name, rank, group.world_size, group._meeting, options)


def join(name: str | None, rank: int | None, world_size: int, meeting: Meeting, options: RpcOptions) -> Worker:
    """Become a worker of the group that meets there. Without a rank, wait until all have arrived, then take one."""
    return join_in(visit_store(meeting.host, meeting.port, JOIN_SECONDS), name, rank, world_size, options)


def join_in(
    store: Store,
    name: str | None,
    rank: int | None,
    world_size: int,
    options: RpcOptions,
    check: Callable[[], None] = lambda: None,
) -> Worker:
    """The same, with an open store. ``check`` is called while this worker waits for the others, and may raise."""
    obituaries = Obituaries(store)
    obituaries.announce(own_life(os.getpid()))
    if rank is None:
        rank = _take_rank(store, world_size)
    if options.host is None:
        options = dataclasses.replace(options, host=own_address())
    become_worker(Place(name or f"worker{rank}", rank, world_size), options, check, store)
    worker = current()
    worker.agent.ask_engine = obituaries
    return worker


def own_address() -> str:
    """The address of this node, as Ray's other nodes know it."""
    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


def require_ray(what: str) -> None:
    """Connect to Ray as Ray's own libraries do. Raises `MisuseError` for a client outside of the cluster."""
    if not ray.is_initialized():
        ray.init()
    client = sys.modules.get("ray.util.client")
    if client is not None and client.ray.is_connected():
        raise MisuseError(
            f"{what}: this process is connected by Ray Client (ray://) and is not on a node of the cluster, so workers "
            "cannot reach it. Start the script on a node, as `ray job submit` does"
        )


def closed_options(options: RpcOptions | None, what: str) -> RpcOptions:
    """The options of all workers, with a secret."""
    options = RpcOptions() if options is None else options
    if not isinstance(options, RpcOptions):
        raise OptionError(f"{what} takes RpcOptions, not {type(options).__name__}")
    if options.init_method != RpcOptions().init_method:
        raise OptionError(f"{what} decides where its workers meet: leave out the option init_method")
    if not options.policy.is_one_user:
        raise OptionError(
            f'{what} is for workers of one user, which trust each other: trust="federation" is for parties that '
            "each start their own workers, with backhaul.rpc.init_rpc"
        )
    if options.secret is None and options.key_file is None and options.tls is None:
        options = dataclasses.replace(options, secret=secrets.token_bytes(_SECRET_BYTES))
    return options


def own_options(given: RpcOptions, of_group: RpcOptions) -> RpcOptions:
    """The options of one worker. Without credentials of its own it has those of the group."""
    options = closed_options(given, "init_rpc()")
    if given.secret is None and given.key_file is None and given.tls is None:
        options = dataclasses.replace(options, secret=of_group.secret, key_file=of_group.key_file, tls=of_group.tls)
    return options


def _rank_of_train() -> int | None:
    """The rank inside a training function of Ray Train; None elsewhere."""
    train = sys.modules.get("ray.train")
    if train is None:
        return None
    try:
        rank = train.get_context().get_world_rank()
    except Exception:  # Train has its own errors for "not inside a training function"
        return None
    return rank if isinstance(rank, int) else None


def _take_rank(store: Store, world_size: int) -> int:
    """A rank by node, when all have arrived. An actor that Ray restarted gets its old rank."""
    context = ray.get_runtime_context()
    process = context.get_actor_id() or context.get_worker_id()
    key = f"backhaul/came/{process}"
    if not store.check([key]):
        number = store.add("backhaul/arrived", 1) - 1
        if number >= world_size:
            raise OptionError(
                f"all {world_size} places of the group are taken: make another group, or give "
                "init_rpc a rank if this process replaces one of them"
            )
        store.set(f"backhaul/arrival/{number}", msgspec.json.encode(Arrival(process, context.get_node_id())).decode())
        store.set(key, str(number))
    deadline = time.monotonic() + JOIN_SECONDS
    keys = [f"backhaul/arrival/{number}" for number in range(world_size)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            came = sum(store.check([key]) for key in keys)
            raise RpcTimeoutError(
                f"{came} of {world_size} workers have joined the group within {JOIN_SECONDS:g} s: call "
                "init_rpc(group=...) in all of them at the same time, and check that Ray has room for all actors"
            )
        time.sleep(_LOOK_SECONDS)
    return deal([msgspec.json.decode(store.get(key), type=Arrival) for key in keys])[process]
