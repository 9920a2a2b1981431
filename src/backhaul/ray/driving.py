"""``backhaul.ray.cluster(n)``: workers that Ray starts, driven from one script, notebook or job.

Theory of operation
-------------------
A placement group reserves resources for all workers, or for none. Each worker lives in the process of an actor
(`host.Host`), whose place, name and rank never change. The driver hosts the store in which all workers meet. The store
lives as long as any worker, because Ray ends the actors when the driver ends.

Ray carries the messages that start and end a worker: where it is, how to join, when to leave. One more task of each
actor, `Host.outlast`, returns when the worker is shut down, and fails when its process ends before that. One thread
of the driver waits for all of these tasks. A worker that ends is replaced up to ``restarts`` times: another actor
with the same name, rank and bundle joins the group, which treats it as a new incarnation.

Definitions from the driver's script are sent to the workers when a call first needs them (`launch.interactive`). Unlike
with ``cluster()`` on one machine, the script itself does not run there: it need not exist on other nodes.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from backhaul.cluster.handles import WorkerHandle, Workers
from backhaul.errors import MisuseError, OptionError, RpcTimeoutError, WorkerLostError
from backhaul.ids import WorkerInfo
from backhaul.launch import interactive
from backhaul.launch.main_module import stop_if_loading
from backhaul.launch.session import added
from backhaul.ray.actors import GRACE, LOOK_SECONDS, Actor, Actors, ending_of, value_of
from backhaul.ray.host import Spot, Start, own_spot
from backhaul.ray.joining import JOIN_SECONDS, Meeting, closed_options, join_in, require_ray
from backhaul.ray.placement import Placement, bundle_of, check_strategy, ranks
from backhaul.rendezvous import host_store
from backhaul.worker import Worker, current_or_none

if TYPE_CHECKING:
    from torch.distributed import Store

    from backhaul.options import RpcOptions

_log = logging.getLogger(__name__)

_RESTART_SECONDS = 120.0

OnRejoin = Callable[["RayWorker"], Any]


class RayWorker(WorkerHandle):
    """A worker in a Ray actor, as the driver sees it."""

    def __init__(self, cluster: RayCluster, driver: Worker | None, info: WorkerInfo, actor: Actor) -> None:
        super().__init__(driver, info)
        self._cluster = cluster
        self._actor = actor
        self._replacing = threading.Lock()

    def __repr__(self) -> str:
        how = f"pid {self.pid} on {self.address}" if self.alive else self._actor.ending
        return f"<{self.name}: {how}>"

    @property
    def pid(self) -> int:
        """The id of the worker's process, on its node."""
        return self._actor.spot.pid

    @property
    def node(self) -> str:
        """Ray's id of the worker's node."""
        return self._actor.spot.node

    @property
    def address(self) -> str:
        """The address of the worker's node."""
        return self._actor.spot.address

    @property
    def alive(self) -> bool:
        """Whether the worker's process runs, as far as Ray has reported."""
        return not self._actor.ending

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """The value of ``func(*args, **kwargs)`` on this worker. See `RayCluster.run`."""
        return self._cluster._run([self], func, args, kwargs, timeout)[0]


def cluster(
    n: int,
    *,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    restarts: int = 0,
    on_rejoin: OnRejoin | None = None,
    env: Mapping[str, str] | None = None,
    driver: bool = True,
    name: str = "driver",
    names: Sequence[str] | None = None,
    options: RpcOptions | None = None,
    timeout: float = JOIN_SECONDS,
) -> RayCluster:
    """Start ``n`` workers on the Ray cluster that this process is connected to, or starts.

    Use it as ``with backhaul.ray.cluster(4) as workers:``, or call `RayCluster.close` at the end. Each worker lives in
    an actor that has ``resources`` (by default one CPU), in a placement group with that ``strategy``. This process
    becomes rank 0, with the name ``name``. The workers' names are ``worker1``, ``worker2``, … by node, or those in
    ``names``. With ``driver=False`` this process stays outside the group: the workers are ``worker0``, ``worker1``, …,
    and `RayCluster.run` runs functions on them.

    A worker that ends is replaced up to ``restarts`` times. ``on_rejoin(worker)`` is then called here, to restore the
    worker's state. ``env`` is added to the workers' environment.

    Raises `RpcTimeoutError`, saying what is missing, if Ray has no room or a worker is not up within ``timeout``
    seconds; `WorkerLostError` if a worker does not start; `MisuseError` if this process is already a worker.
    """
    stop_if_loading()
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError(f"cluster() needs a number of workers, at least 1; got {n!r}")
    if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
        raise OptionError(
            f"restarts={restarts!r} must be a number, at least 0: how many times each worker may be restarted"
        )
    if on_rejoin is not None and not callable(on_rejoin):
        raise OptionError(f"on_rejoin={on_rejoin!r} must be a function that takes a worker")
    first = 1 if driver else 0
    names = [f"worker{rank}" for rank in range(first, first + n)] if names is None else list(names)
    if len(names) != n or len({*names, *([name] if driver else [])}) != n + first:
        taken = f" and from {name!r}" if driver else ""
        raise OptionError(f"cluster({n}) needs {n} names that differ from each other{taken}; got {names}")
    resources = {"CPU": 1} if resources is None else resources
    bundle_of(resources)
    check_strategy(strategy)
    wanted = closed_options(options, "cluster()")
    variables = added(env)
    existing = current_or_none()
    if driver and existing is not None:
        raise MisuseError(
            f"this process is already worker {existing.info.name!r} of a group; close that cluster, call "
            "rpc.shutdown(), or keep this process outside the new group with driver=False"
        )
    require_ray("cluster()")
    return RayCluster(
        name if driver else None, names, resources, strategy, restarts, on_rejoin, variables, wanted, timeout
    )


class RayCluster(Workers[RayWorker]):
    """The workers of a Ray cluster, by rank. Made by `cluster`; a context manager."""

    def __init__(
        self,
        name: str | None,
        names: Sequence[str],
        resources: Mapping[str, float],
        strategy: str,
        restarts: int,
        on_rejoin: OnRejoin | None,
        env: Mapping[str, str],
        options: RpcOptions,
        timeout: float,
    ) -> None:
        super().__init__([])
        deadline = time.monotonic() + timeout
        self._env = dict(env)
        self._on_rejoin = on_rejoin
        self._restarts = restarts
        self._restarted = dict.fromkeys(names, 0)
        self._failures: dict[str, Exception] = {}
        self._revivals: list[threading.Thread] = []
        self._watching = threading.Thread(target=self._watch, name="backhaul-ray", daemon=True)
        self._driver: Worker | None = None
        self._store: Store | None = None
        self._placement = Placement(len(names), resources, strategy, deadline)
        self._actors = Actors(self._placement, env)
        self._shipper = interactive.Shipper(self._define, vars(sys.modules["__main__"]))
        try:
            self._start(name, names, options, deadline)
        except BaseException:
            self._leave(False, 0)
            self._dismantle()
            raise
        self._watching.start()
        atexit.register(self.close)

    def __enter__(self) -> RayCluster:
        return self

    def run(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call ``func(*args, **kwargs)`` on all workers at once; returns the values by rank.

        A driver in the group makes ordinary calls, without a time limit unless ``timeout`` is given. A driver outside
        the group lets Ray run the function, in which the workers call each other. Raises what ``func`` raises, and
        `WorkerLostError` or `RpcTimeoutError`.
        """
        return self._run(self._workers, func, args, kwargs, timeout)

    def restart(self, name: str, timeout: float = _RESTART_SECONDS) -> RayWorker:
        """Start another actor in the place of worker ``name``, with its name and rank; returns the new worker.

        If the old actor still runs, it is ended first. Its values are gone: references to them raise
        `WorkerLostError`. Calls go to the new actor. Returns when the new worker is ready for calls and ``on_rejoin``
        has run. If a restart of the worker is in progress, waits for that one. Raises `WorkerLostError` if the worker
        does not start, and `RpcTimeoutError` if that takes longer than ``timeout`` seconds.
        """
        worker = self._of_name(name)
        before = worker._actor
        with worker._replacing:
            if worker._actor is before:
                self._replace(worker, time.monotonic() + timeout)
        return worker

    def close(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leave the group, end the workers, and release the resources that Ray reserved. May be called again.

        If ``graceful``, wait for calls that still run, at most ``timeout`` seconds unless that is 0. Raises
        `RpcTimeoutError` at the timeout, and what ``on_rejoin`` raised; the workers are gone in any case.
        """
        # A process forked from the driver has this object, but not the workers.
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._actors.stopping.set()
        try:
            if graceful:
                self._await_revivals()
            leaving = self._ask_to_leave(graceful, timeout)
            self._leave(graceful, timeout)
            self._await_leaving(leaving, graceful and self._driver is None)
        finally:
            self._dismantle()
        if graceful and self._failures:
            raise next(iter(self._failures.values()))

    # Start.

    def _start(self, name: str | None, names: Sequence[str], options: RpcOptions, deadline: float) -> None:
        here = own_spot()
        self._store, port = host_store(here.address, JOIN_SECONDS)
        meeting = Meeting(here.address, port)
        first = 0 if name is None else 1
        order = ranks(self._placement.nodes_of_bundles(), None if name is None else here.node)
        self._bundles = dict(zip(names, order, strict=True))
        actors = [self._actors.create(each, self._bundles[each]) for each in names]
        self._actors.await_all([(actor, actor.handle.spot.remote()) for actor in actors], deadline, Actor.has_started)
        spots = [*([here] if first else []), *(actor.spot for actor in actors)]
        self._starts = {
            each: Start(
                each, rank, len(spots), meeting, options, _environment(rank, spots) | self._env, tuple(sys.argv)
            )
            for rank, each in enumerate(names, first)
        }
        joining = [(actor, actor.handle.join.remote(self._starts[actor.name])) for actor in actors]
        if name is not None:
            self._driver = join_in(self._store, name, 0, len(spots), options, lambda: self._actors.require(joining))
            self._driver.before_call.append(self._before_call)
        self._actors.await_all(joining, deadline, Actor.has_joined)
        self._workers = [
            RayWorker(self, self._driver, WorkerInfo(rank, actor.name), actor)
            for rank, actor in enumerate(actors, first)
        ]

    # The lives of the workers.

    def _watch(self) -> None:
        """Notice workers that end. Runs on its own thread."""
        while not self._actors.stopping.is_set():
            watched = {}
            for worker in self._workers:
                actor = worker._actor
                if not actor.ending:
                    if actor.over is None:
                        actor.over = actor.handle.outlast.remote()
                    watched[actor.over] = worker
            if not watched:
                self._actors.stopping.wait(LOOK_SECONDS)
                continue
            ready, _ = ray.wait(list(watched), timeout=LOOK_SECONDS)
            for reference in ready:
                if not self._actors.stopping.is_set():
                    self._look_at(watched[reference], reference)

    def _look_at(self, worker: RayWorker, reference: Any) -> None:
        actor = worker._actor
        if actor.over is not reference:
            return
        try:
            ray.get(reference)
        except ActorUnavailableError:
            # Ray does not reach the actor, and does not know yet whether it has ended.
            actor.over = None
            self._actors.stopping.wait(LOOK_SECONDS)
            return
        except RayError as error:
            actor.ending = ending_of(error)
        else:
            actor.ending = "has left the group"
            return
        if actor.dismissed:
            return
        again = self._restarted[worker.name] < self._restarts
        _log.warning(
            "worker %r is lost: it has ended; Ray says: %s%s",
            worker.name,
            actor.ending,
            ". Restarting it" if again else "",
        )
        if again:
            thread = threading.Thread(
                target=self._revive, args=(worker, actor), name=f"backhaul-ray-{worker.name}", daemon=True
            )
            self._revivals.append(thread)
            thread.start()

    def _revive(self, worker: RayWorker, lost: Actor) -> None:
        """Replace a worker that has ended, while restarts are left."""
        name = worker.name
        with worker._replacing:
            while worker._actor is lost and self._restarted[name] < self._restarts:
                if self._actors.stopping.is_set():
                    return
                self._restarted[name] += 1
                try:
                    self._replace(worker, time.monotonic() + _RESTART_SECONDS)
                except Exception as error:
                    if not self._actors.stopping.is_set():
                        _log.exception(
                            "worker %r, restart %d of %d failed", name, self._restarted[name], self._restarts
                        )
                        self._failures[name] = error

    def _replace(self, worker: RayWorker, deadline: float) -> None:
        """End the actor of a worker, start another in its place, and restore the worker's state."""
        old = worker._actor
        old.dismissed = True
        self._actors.end(old, deadline)
        actor = self._actors.create(worker.name, self._bundles[worker.name])
        try:
            self._actors.await_all([(actor, actor.handle.spot.remote())], deadline, Actor.has_started)
            joined = actor.handle.join.remote(self._starts[worker.name], self._shipper.sent())
            self._actors.await_all([(actor, joined)], deadline, Actor.has_joined)
            self._await_greeting(worker.info, actor, deadline)
        except BaseException:
            old.dismissed = False
            ray.kill(actor.handle)
            raise
        self._actors.forget(old)
        worker._actor = actor
        self._shipper.repeat(lambda definitions: self._define_on([worker], definitions))
        _log.warning("worker %r has come back as process %d on %s", worker.name, worker.pid, worker.address)
        if self._on_rejoin is not None:
            self._on_rejoin(worker)
        self._failures.pop(worker.name, None)

    def _await_greeting(self, info: WorkerInfo, actor: Actor, deadline: float) -> None:
        """Wait until this process, if it is in the group, has heard of the new incarnation."""
        if self._driver is None or actor.joined is None:
            return
        agent, incarnation = self._driver.agent, actor.joined.incarnation
        with agent.presence.changed:
            while agent.membership.find(info).incarnation != incarnation:
                if time.monotonic() >= deadline:
                    raise RpcTimeoutError(f"worker {info.name!r} did not rejoin the group in time")
                agent.presence.changed.wait(LOOK_SECONDS)

    # Calls.

    def _before_call(self, target: WorkerInfo, func: Any, args: Any, kwargs: Any) -> None:
        """Send the workers the definitions that a call refers to. A hook of the driver's `Worker`."""
        if self._driver is not None and target != self._driver.info:
            self._shipper(func, args, kwargs)

    def _define_on(self, workers: Sequence[RayWorker], definitions: list[interactive.Definition]) -> None:
        if self._driver is not None:
            super()._define_on(workers, definitions)
            return
        for reference in [worker._actor.handle.define.remote(definitions) for worker in workers if worker.alive]:
            try:
                ray.get(reference)
            except RayActorError:
                continue

    def _run(
        self,
        workers: Sequence[RayWorker],
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float | None,
    ) -> list[Any]:
        if self._closed:
            raise MisuseError("this cluster is closed, and its workers with it; start another one")
        if self._driver is not None:
            limit = 0.0 if timeout is None else timeout
            futures = [worker.rpc_async(func, args, kwargs, limit) for worker in workers]
            return [future.wait() for future in futures]
        deadline = None if timeout is None else time.monotonic() + timeout
        self._shipper(func, args, kwargs or {})
        request = pickle.dumps((func, tuple(args), dict(kwargs or {})), protocol=pickle.HIGHEST_PROTOCOL)
        asked = [(worker._actor, worker._actor.handle.run.remote(request)) for worker in workers]
        values: dict[str, Any] = {}
        left = {reference: actor for actor, reference in asked}
        try:
            while left:  # in the order in which they end, so that the first failure is raised
                seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready, _ = ray.wait(list(left), timeout=seconds)
                if not ready:
                    late = ", ".join(repr(actor.name) for actor in left.values())
                    raise RpcTimeoutError(f"run(): worker {late} had not returned after {timeout:g} s")
                for reference in ready:
                    actor = left.pop(reference)
                    values[actor.name] = pickle.loads(value_of(actor, reference))
        finally:
            # Ray prints the traceback of each failure that nobody asks for, and one dead worker fails all others.
            for reference in left:
                reference.future()
        return [values[worker.name] for worker in workers]

    # The end.

    def _ask_to_leave(self, graceful: bool, timeout: float) -> list[tuple[Actor, Any]]:
        """Ask the workers to shut down."""
        if not ray.is_initialized():
            return []
        actors = [worker._actor for worker in self._workers if worker.alive]
        return [(actor, actor.handle.leave.remote(graceful, timeout)) for actor in actors]

    def _await_leaving(self, leaving: Sequence[tuple[Actor, Any]], patient: bool) -> None:
        """Wait until the workers have left; if ``patient``, without a limit, because only they know of running work."""
        if not leaving or not ray.is_initialized():
            return
        ray.wait([reference for _, reference in leaving], num_returns=len(leaving), timeout=None if patient else GRACE)
        if patient:
            for actor, reference in leaving:
                try:
                    value_of(actor, reference)
                except WorkerLostError:
                    continue

    def _await_revivals(self, seconds: float | None = None) -> None:
        for thread in self._revivals:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _leave(self, graceful: bool, timeout: float) -> None:
        """Make this process leave the group, if it is a member."""
        if self._driver is not None and not self._driver.closed:
            self._driver.before_call.remove(self._before_call)
            self._shut_down(self._driver, graceful, timeout)

    def _dismantle(self) -> None:
        """End all actors and release their resources."""
        self._actors.stopping.set()
        if self._watching.ident is not None and self._watching is not threading.current_thread():
            self._watching.join()
        self._await_revivals(GRACE)  # an `on_rejoin` that still runs continues without its worker
        self._actors.dismantle()
        self._store = None


def _environment(rank: int, spots: Sequence[Spot]) -> dict[str, str]:
    """The variables that torchrun would set for worker ``rank``. The secret is not among them."""
    here = [other for other, spot in enumerate(spots) if spot.node == spots[rank].node]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(spots)),
        "LOCAL_RANK": str(here.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": spots[0].address,
        "MASTER_PORT": str(spots[0].free_port),
    }
