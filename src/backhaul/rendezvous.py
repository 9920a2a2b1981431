"""Where workers meet: an init method -> a store and this worker's place in the group.

Launchers, schedulers and engines announce the place in environment variables (`environments`); `place_from` reads them.

A store that rank 0 hosts dies with rank 0. The members know everything that the group keeps in the store. So a member
on the same machine hosts a new store at the same address (`GroupStore.renew`), and each member writes its entries again
(`agent.membership`). Then newcomers find the group as before. If no member is on that machine, rank 0 itself hosts the
new store when the launcher restarts it there, and waits for the others to write the group to it.

``tcp://a:1,b:2`` lists addresses of several machines. The store is at one of them, and a worker that looks for the
store tries all of them. If the machine of the store is gone, or has no member left, a member on the next machine of the
list hosts a new store.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import os
import socket
import threading
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch.distributed as dist

from backhaul import compat
from backhaul.agent.rejoining import goes_on
from backhaul.environments import table as environments
from backhaul.environments.reach import unreachable
from backhaul.errors import MisuseError, OptionError, RpcTimeoutError
from backhaul.ids import Addresses
from backhaul.transport.stream import host_id, look_for

INIT_METHOD_VARIABLE = "BACKHAUL_INIT_METHOD"
"""The init method that ``env://`` stands for. Our launcher sets it."""

_LOOK_SECONDS = 1.0
_CUT_OFF_SECONDS = 15.0
"""How long a worker looks for hosts of a fixed group that do not answer, before it concludes that the group has
ended."""
_RENEW_SECONDS = 5.0
_GRACE_SECONDS = 3.0
"""How long a member on the machine of a lost store has to host a new one, before a member elsewhere does."""
_RETURN_SECONDS = 30.0
"""How long a restarted rank 0 with an empty store waits for a member that writes the group to it."""
_LOOK_PAUSE = 0.02
_RESTARTS_VARIABLE = "BACKHAUL_RESTARTS"
"""Our launcher restarts single workers: the others of their group go on."""
_AWAITED = "backhaul/awaited"
"""The key of a store whose host waits for a member that writes the group to it."""


Address = tuple[str, int]
_NEEDS_RANK = "a dynamic group that meets over TCP needs a rank for each worker; rank 0 hosts the store"


class Place(NamedTuple):
    """A worker's place in its group. ``world_size`` None means a dynamic group."""

    name: str | None
    rank: int | None
    world_size: int | None


def place_from(name: str | None, rank: int, world_size: int | None) -> Place:
    """This worker's place: the user's arguments, completed from the launcher's variables.

    A rank without a world size means a dynamic group, as in torch. Without either, the launcher's variables decide;
    without a launcher the group is dynamic. Raises `OptionError` if launchers contradict each other.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < -1:
        raise OptionError(f"rank {rank!r} must be a whole number; leave it out to take it from the launcher")
    if world_size is not None and (isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1):
        raise OptionError(f"world_size {world_size!r} must be at least 1; None means a dynamic group")
    if name is not None and (not isinstance(name, str) or not name or len(name) > 128):
        raise OptionError(f"name {name!r} must be a string of 1 to 128 characters")
    given_rank = None if rank == -1 else rank
    if given_rank is None:
        said = environments.read()
        if world_size is None and said.rank.take() is not None:
            world_size = said.world_size.take()
        if world_size is not None:
            given_rank = said.rank.take()
            if given_rank is None:
                raise OptionError(
                    "init_rpc needs a rank: give one, or start the script with `backhaul run` or torchrun"
                    + _hinted(said)
                )
    if name is None:
        name = os.environ.get("BACKHAUL_NAME") or (None if given_rank is None else f"worker{given_rank}")
    if world_size is not None and given_rank is not None and not 0 <= given_rank < world_size:
        raise OptionError(f"rank {given_rank} is not in 0..{world_size - 1} (world_size {world_size})")
    return Place(name, given_rank, world_size)


def meet(init_method: str, place: Place, timeout: float, *, alone: bool = False) -> dist.Store:
    """The store in which this group meets. Its keys belong to this group alone.

    A fixed and a dynamic group may meet in one store. With ``alone``, a dynamic group raises `MisuseError` instead.

    A fixed group that starts again in the same store gets a fresh part of the store: every rank moves on to the next
    part when the group of the last part has ended. A worker that died, and restarts while the others live, rejoins its
    old group.
    """
    store = _open(init_method, place, datetime.timedelta(seconds=timeout))
    if place.world_size is None:
        if alone and store.check(["backhaul/times/0"]):
            raise MisuseError(
                "RPC group mixes statically and dynamically initialized members which is not supported. Give all "
                "workers the same world_size, or none of them"
            )
        return GroupStore("backhaul/dynamic", store, init_method, place)
    return _fixed_group_store(store, place, place.world_size, init_method)


def meet_in(store: dist.Store, place: Place) -> dist.Store:
    """A fixed group's part of the store of the engine that started the workers. See `meet`."""
    if place.world_size is None:
        raise OptionError("a group that meets in the store of its engine needs a world_size")
    return _fixed_group_store(store, place, place.world_size, "")


def host_store(host: str, timeout: float) -> tuple[dist.Store, int]:
    """A store that this process hosts, and its port. The store listens at ``host`` only.

    The process need not be a member of a group.
    """
    listening = _listen(host, 0)
    if listening is None:
        raise MisuseError(f"cannot host the store at {host}: no port is free")
    port: int = listening.getsockname()[1]
    return _store(host, port, datetime.timedelta(seconds=timeout), listening, hosts=True), port


def visit_store(host: str, port: int, timeout: float) -> dist.Store:
    """The store that another process hosts at that address. Raises `RpcTimeoutError`."""
    try:
        return _store(host, port, datetime.timedelta(seconds=timeout), None, hosts=False)
    except dist.DistError as error:
        raise RpcTimeoutError(
            f"no store at {host}:{port}; is the process that made the group alive? {error}"
        ) from error


def _fixed_group_store(store: dist.Store, place: Place, world_size: int, init_method: str) -> GroupStore:
    rank = 0 if place.rank is None else place.rank
    key = f"backhaul/times/{rank}"
    times = int(store.compare_set(key, "", "1"))
    group_store = GroupStore(f"backhaul/{times}", store, init_method, place)
    restarted = environments.read().agent_store

    def moved_on() -> bool:
        others = [key for id in range(world_size) if id != rank and store.check([key := f"backhaul/times/{id}"])]
        return any(int(store.get(each)) > times for each in others)

    while not goes_on(group_store, rank, world_size, _look, moved_on, _CUT_OFF_SECONDS, restarted=restarted):
        times = int(store.compare_set(key, str(times), str(times + 1)))
        group_store = GroupStore(f"backhaul/{times}", store, init_method, place)
    group_store.times = times
    return group_store


class GroupStore(dist.PrefixStore):
    """One group's part of a store."""

    times = 0
    """The number of this group among the fixed groups that met in the store, from 1; 0 for a dynamic group."""

    def __init__(self, prefix: str, store: dist.Store, init_method: str, place: Place) -> None:
        super().__init__(prefix, store)
        self._prefix = prefix
        self._init_method = init_method
        self._place = place

    @property
    def renewable(self) -> bool:
        """Whether a member of the group hosts the store, so that another member can take over."""
        return bool(_addresses_of(self._init_method))

    def renew(self) -> GroupStore | None:
        """The same part of a new store at an address of the group, or None. May wait for seconds.

        This worker hosts the new store if no other member does.
        """
        addresses = _addresses_of(self._init_method)
        if not addresses:
            return None
        run = _run_of(self._init_method, self._place)
        store = _renewed(*addresses[0], run) if len(addresses) == 1 else _renewed_at_one(addresses)
        if store is None:
            return None
        for rank in range(self._place.world_size or 0):
            store.compare_set(f"backhaul/times/{rank}", "", str(self.times))
        found = GroupStore(self._prefix, store, self._init_method, self._place)
        found.times = self.times
        return found


def _renewed(host: str, port: int, run: str) -> dist.Store | None:
    """A new store at the group's only address."""
    try:
        listening = _listen(host, port)
    except MisuseError:
        listening = None  # an address of another machine: a member there hosts the store
    within = datetime.timedelta(seconds=_RENEW_SECONDS)
    if listening is None:
        return _taken_over(host, port, within, run)
    return _of_run(_store(host, port, within, listening, hosts=True), run)


def _renewed_at_one(addresses: list[Address]) -> dist.Store | None:
    """A new store at one of several addresses. The first machine of the list that has a member hosts it.

    Until a member on that machine notices the loss, the machine answers but refuses connections. A machine that does
    not answer may be cut off only briefly.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < _CUT_OFF_SECONDS + _GRACE_SECONDS:
        if (store := _found_at_one(addresses)) is not None:
            return store
        for host, port in addresses:
            try:
                listening = _listen(host, port)
            except MisuseError:
                patience = _CUT_OFF_SECONDS if _look_at(host, port) is None else _GRACE_SECONDS
                if waited < patience:
                    break
            else:
                if listening is None:
                    break  # another member on this machine hosts the store, and is about to write the group's entries
                within = datetime.timedelta(seconds=_RENEW_SECONDS)
                return _store(host, port, within, listening, hosts=True)
        time.sleep(_LOOK_PAUSE)
    return None


def _found_at_one(addresses: list[Address]) -> dist.Store | None:
    """The store of a group that has already met, at whichever address it is now."""
    within = datetime.timedelta(seconds=_RENEW_SECONDS)
    for host, port in addresses:
        if _look_at(host, port) and (store := _taken_over(host, port, within, "")) is not None:
            return store
    return None


def _open_at_one(addresses: list[Address], place: Place, timeout: datetime.timedelta) -> dist.Store:
    """The store at one of several addresses. Rank 0 hosts it on its own machine, unless the group already has one."""
    if place.rank is None:
        raise OptionError(_NEEDS_RANK + _hinted(environments.read()))
    if place.rank == 0:
        return _found_at_one(addresses) or _host_at_one(addresses, timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        for host, port in addresses:
            if _look_at(host, port):
                with contextlib.suppress(dist.DistError):
                    return _store(host, port, timeout, None, hosts=False)
        if time.monotonic() >= deadline:
            raise RpcTimeoutError(f"no store at {_listed(addresses)}; is rank 0 up?")
        time.sleep(_LOOK_PAUSE)


def _host_at_one(addresses: list[Address], timeout: datetime.timedelta) -> dist.Store:
    for host, port in addresses:
        try:
            listening = _listen(host, port)
        except MisuseError:
            continue  # an address of another machine
        if listening is None:
            raise MisuseError(f"cannot host the store at {host}:{port}: another program uses that port")
        return _store(host, port, timeout, listening, hosts=True)
    raise MisuseError(
        f"cannot host the store at {_listed(addresses)}: none is an address of this machine, and rank 0 hosts the store"
    )


def _listed(addresses: list[Address]) -> str:
    return " or ".join(f"{host}:{port}" for host, port in addresses)


def _look(addresses: Addresses) -> bool | None:
    """Whether a worker listens there; None if its host does not answer.

    A worker on another host that can only be reached on its own host counts as listening. Nobody can tell from here,
    and a worker that took it for dead would wait for it in a new group. Calls to such a worker say what is missing.
    """
    return _is_out_of_sight(addresses) or look_for(addresses, time.monotonic() + _LOOK_SECONDS)


def _is_out_of_sight(addresses: Addresses) -> bool:
    if not addresses.host or addresses.host == host_id():
        return False
    if addresses.tcp is None:
        return addresses.unix is not None
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(addresses.tcp[0].partition("%")[0]).is_loopback
    return False


def _look_at(host: str, port: int) -> bool | None:
    """Whether something listens at that address; None if the host does not answer."""
    return _look(Addresses(host="", tcp=(host, port)))


def _open(init_method: str, place: Place, timeout: datetime.timedelta) -> dist.Store:
    if init_method.startswith("env://"):
        inherited = os.environ.get(INIT_METHOD_VARIABLE)
        if inherited and inherited != init_method:
            return _open(inherited, place, timeout)
        said = environments.read()
        address, port = said.address.take(), said.port.take()
        if not address or port is None:
            raise OptionError(
                "init_method env:// needs MASTER_ADDR and MASTER_PORT in the environment: start the script with "
                "`backhaul run` or torchrun, set them, or give RpcOptions(init_method='tcp://127.0.0.1:29500')"
                + _hinted(said)
            )
        if place.rank == 0 and not said.agent_store and (objection := unreachable(said)):
            raise MisuseError(objection)
        return _tcp(address, port, place, timeout, hosted=said.agent_store, run=_run_of(init_method, place))
    url = urlsplit(init_method)
    if url.scheme == "file":
        if not url.path:
            raise OptionError(f"init_method {init_method!r} needs a path: file:///tmp/meeting-point")
        # torch would wait minutes for a file that cannot be created.
        if not os.path.isdir(os.path.dirname(url.path)) or os.path.isdir(url.path):
            raise OptionError(f"init_method {init_method!r}: {url.path} must be a file in a directory that exists")
        return dist.FileStore(url.path, -1)
    addresses = _parsed(init_method)
    if len(addresses) > 1:
        return _open_at_one(addresses, place, timeout)
    return _tcp(*addresses[0], place, timeout, hosted=False)


def _parsed(init_method: str) -> list[Address]:
    """The addresses of ``tcp://host:port,host:port``. Raises `OptionError`."""
    found = []
    for each in urlsplit(init_method).netloc.split(","):
        url = urlsplit(f"tcp://{each.strip()}")
        try:
            host, port = url.hostname, url.port
        except ValueError:
            host = port = None
        if not host or port is None:
            raise OptionError(
                f"init_method {init_method!r} needs a host and a port: tcp://127.0.0.1:29500, or several addresses "
                "separated by commas"
            )
        found.append((host, port))
    if len(found) > 1 and not all(port for _, port in found):
        raise OptionError(f"init_method {init_method!r} lists several addresses, and each needs a port of its own")
    return found


def _hinted(said: environments.Table) -> str:
    return "".join(f". {hint}" for hint in said.hints)


def _run_of(init_method: str, place: Place) -> str:
    """The name of this run of a fixed group, if a launcher started all of it; else "".

    The name keeps apart two jobs that end up with the same port: the later job finds the port taken, and says so.
    """
    if not init_method.startswith("env://") or os.environ.get(INIT_METHOD_VARIABLE) or place.world_size is None:
        return ""
    said = environments.read()
    return str(said.run.value or "") if said.world_size.value == place.world_size else ""


def _of_run(store: dist.Store, run: str) -> dist.Store:
    return dist.PrefixStore(f"run {run}", store) if run else store


def _tcp(host: str, port: int, place: Place, timeout: datetime.timedelta, *, hosted: bool, run: str = "") -> dist.Store:
    """A TCPStore, or the part of one that belongs to ``run``. Rank 0 hosts it unless the launcher does."""
    if place.rank is None and not hosted:
        raise OptionError(_NEEDS_RANK + _hinted(environments.read()))
    hosts = place.rank == 0 and not hosted
    # The store listens only at the address that the others were told, because it authenticates nobody.
    listening = _listen(host, port) if hosts else None
    if listening is not None:
        port = listening.getsockname()[1]
    try:
        store = _of_run(_store(host, port, timeout, listening, hosts=hosts), run)
        size = place.world_size or 0
        if listening is not None and size > 1 and (os.environ.get(_RESTARTS_VARIABLE) or "0") != "0":
            _await_group(store, size, min(timeout.total_seconds(), _RETURN_SECONDS))
        return store
    except dist.DistError as error:
        if not hosts:
            raise RpcTimeoutError(f"no store at {host}:{port}; is rank 0 up? {error}") from error
        found = _taken_over(host, port, timeout, run)
        if found is None:
            raise MisuseError(f"cannot host the store at {host}:{port}: {error}") from error
        return found


def _await_group(store: dist.Store, world_size: int, seconds: float) -> None:
    """Wait until a member of the group, which goes on without this restarted rank 0, has written the group to its new
    store; see `GroupStore.renew`. Otherwise rank 0 would begin another group, and wait for the others in vain.

    Returns early if all others have come to begin a group as well.
    """
    others = [f"backhaul/times/{rank}" for rank in range(1, world_size)]
    deadline = time.monotonic() + seconds
    store.set(_AWAITED, "")
    while time.monotonic() < deadline:
        came = store.check(others)  # comes first: a member writes the entry of rank 0 before those of the others
        if store.check(["backhaul/times/0"]):
            times = store.get("backhaul/times/0").decode()
            if store.check([f"backhaul/{times}/group"]):
                return
        elif came:
            break
        time.sleep(_LOOK_PAUSE)
    store.delete_key(_AWAITED)


def _store(
    host: str, port: int, timeout: datetime.timedelta, listening: socket.socket | None, *, hosts: bool
) -> dist.TCPStore:
    options: Any = {"is_master": hosts, "timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
    if listening is None:
        return dist.TCPStore(host, port, **options)
    return compat.store_on(listening, host, port, **options)


def _taken_over(host: str, port: int, timeout: datetime.timedelta, run: str) -> dist.Store | None:
    """The group's store, hosted by the member that took over from rank 0; None if there is none.

    Called when a restarted rank 0 finds its port taken.
    """
    timeout = min(timeout, datetime.timedelta(seconds=_RENEW_SECONDS))
    found: list[dist.Store] = []

    deadline = time.monotonic() + timeout.total_seconds()

    def look() -> None:
        with contextlib.suppress(dist.DistError):
            store = _of_run(_store(host, port, timeout, None, hosts=False), run)
            while time.monotonic() < deadline:
                if any(store.check([key]) for key in ("backhaul/times/0", "backhaul/dynamic/group", _AWAITED)):
                    found.append(store)
                    return
                time.sleep(_LOOK_PAUSE)  # that member is about to write the group's entries

    # On a thread: torch waits forever for a server that is not a store and never answers.
    thread = threading.Thread(target=look, name="look-for-store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    return found[0] if found else None


def _addresses_of(init_method: str) -> list[Address]:
    """The addresses at which a member may host the store; empty if no member hosts it."""
    inherited = os.environ.get(INIT_METHOD_VARIABLE)
    if init_method.startswith("env://") and inherited and inherited != init_method:
        return _addresses_of(inherited)
    if init_method.startswith("env://"):
        said = environments.read()
        host, port = said.address.value, said.port.value
        return [] if said.agent_store or not host or port is None else [(host, port)]
    if not init_method.startswith("tcp://"):
        return []
    return [(host, port) for host, port in _parsed(init_method) if port]


def _listen(host: str, port: int) -> socket.socket | None:
    """A socket for the store; None if the port is taken, perhaps by this process for another group."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MisuseError(f"cannot host the store at {host}:{port}: {error}") from None
    for number, (family, _, _, _, address) in enumerate(found, 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            return sock
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                return None
            if number == len(found):
                raise MisuseError(
                    f"cannot host the store at {host}:{port}: {error.strerror}. Rank 0 hosts the store, so this must "
                    "be the name or an address of rank 0's machine: set MASTER_ADDR, or give init_method"
                ) from None
    return None
