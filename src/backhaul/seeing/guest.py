"""Guest: looks at the workers of a cluster from outside. A guest is not a member, makes no calls and changes nothing.

On the same machine the kernel identifies the guest: a worker answers processes of its own user. From another
host, the guest needs the cluster's key, as a worker would.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from backhaul.errors import BackhaulError, MisuseError, ProtocolError, RemoteError, RpcTimeoutError, WorkerLostError
from backhaul.ids import GUEST, Addresses, WorkerInfo
from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello
from backhaul.transport.base import ChannelClosed, Transport
from backhaul.transport.stream import RUNTIME_DIR_VARIABLE, StreamTransport, host_id
from backhaul.wire.frames import encode
from backhaul.wire.messages import Failure, Inspect
from backhaul.wire.values import Codec

PATIENCE = 5.0
"""Seconds that a worker has to answer a question."""

_codec = Codec(bounded=True)  # what a worker answers is data, and nothing of it is run here


class _NoNames:
    """Rejects names: an answer contains no function or class, and resolving one would import and so run its module."""

    def name_of(self, obj: Any) -> str:
        raise MisuseError(f"{obj!r} has no name here")

    def find(self, name: str) -> Any:
        raise ProtocolError(f"the answer refers to {name[:200]!r} and is not plain data")


class Member(NamedTuple):
    """A worker of the cluster, and its addresses."""

    info: WorkerInfo
    addresses: Addresses


class Guest:
    """A connection to one worker. Thread-safe; questions are asked one at a time."""

    def __init__(self, addresses: Addresses, transport: Transport, seconds: float = PATIENCE) -> None:
        """Connect. Raises `WorkerLostError` if no worker is there, `AuthenticationError` if the worker refuses.

        A worker that exists but does not answer in time, for example because it is stopped, raises `RpcTimeoutError`.
        """
        hello = Hello("", GUEST, "guest", GUEST)
        self._lock = threading.Lock()
        self._number = 0
        try:
            self._channel, welcome = transport.connect(addresses, hello, time.monotonic() + seconds)
        except TimeoutError as error:
            where = addresses.unix or addresses.tcp
            raise RpcTimeoutError(f"the worker at {where} did not answer in time") from error
        except ChannelClosed as error:
            raise WorkerLostError(f"no worker answers at {addresses.unix or addresses.tcp}: {error}", "") from error
        self.info = WorkerInfo(welcome.id, welcome.name)

    def ask(self, topic: str, seconds: float = PATIENCE, **arguments: Any) -> Any:
        """The worker's answer. Raises `WorkerLostError`, `RpcTimeoutError`, or `RemoteError`."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._number += 1
            try:
                self._write(Inspect(self._number, topic, arguments), deadline)
                return self._await(self._number, deadline)
            except ChannelClosed as error:
                raise WorkerLostError(f"worker {self.info.name!r} is lost: {error}", self.info.name) from error

    def _write(self, message: Inspect, deadline: float) -> None:
        done = self._channel.write(encode(message))
        while not done:
            self._channel.wait(read=False, write=True, timeout=self._left(deadline))
            done = self._channel.flush()

    def _await(self, number: int, deadline: float) -> Any:
        while True:
            envelope = self._channel.next()
            if envelope is None:
                self._channel.read(self._left(deadline))
                continue
            reply = envelope.message
            if getattr(reply, "id", None) != number:
                continue  # a late answer to an earlier question
            if isinstance(reply, Failure):
                raise RemoteError(
                    f"{reply.type_name} on worker {reply.worker!r}: {reply.text}",
                    reply.worker,
                    reply.type_name,
                    reply.traceback,
                )
            return _codec.unpack(reply.tree, envelope.tensors, _NoNames())

    def _left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise RpcTimeoutError(f"worker {self.info.name!r} did not answer in time: it hangs, or is very busy")
        return left

    def close(self) -> None:
        self._channel.shutdown()
        self._channel.close()


def transport_for(options: RpcOptions | None = None) -> StreamTransport:
    """A transport for a guest, with the key that the options or the environment name, if any."""
    transport = StreamTransport(RpcOptions() if options is None else options)
    transport.introduce("guest")
    return transport


def members(guest: Guest) -> list[Member]:
    """The workers of the cluster to which a guest is connected."""
    found = guest.ask("members")
    try:
        return [
            Member(WorkerInfo(each["rank"], each["name"]), msgspec.convert(each["addresses"], Addresses))
            for each in found["members"]
        ]
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"worker {guest.info.name!r} does not list the members of its group: {error}") from error


def sockets_here(where: str | None = None) -> list[Path]:
    """The sockets of this user's workers on this machine, or in the directory ``where``; the newest first."""
    roots = {Path(tempfile.gettempdir()), Path("/tmp")}
    directories = [path for root in roots for path in root.glob("backhaul-*")]
    if RUNTIME_DIR_VARIABLE in os.environ:
        directories.append(Path(os.environ[RUNTIME_DIR_VARIABLE]))
    if where is not None:
        directories = [Path(where)]
    found: dict[Path, float] = {}
    for directory in directories:
        try:
            status = directory.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                continue
            for path in directory.iterdir():
                status = path.stat()
                if stat.S_ISSOCK(status.st_mode):
                    found[path] = status.st_mtime
        except OSError:  # just removed
            continue
    return sorted(found, key=lambda path: -found[path])


def clusters_here(transport: Transport, where: str | None = None) -> dict[str, list[Member]]:
    """The clusters of this user on this machine, or of a directory: their members, by the name of the group."""
    found: dict[str, list[Member]] = {}
    seen: set[str | None] = set()
    for path in sockets_here(where):
        if str(path) in seen:
            continue
        try:
            guest = Guest(Addresses(host=host_id(), unix=str(path)), transport, seconds=1.0)
        except BackhaulError:  # its worker is dead or refuses guests
            continue
        try:
            group = guest.ask("members")["group"]
            found[group] = members(guest)
            seen.update(member.addresses.unix for member in found[group])
        except BackhaulError:
            continue
        finally:
            guest.close()
    return found


def find_cluster(where: str | None, options: RpcOptions | None = None) -> list[Member]:
    """The members of the cluster at ``where``: ``host:port`` of one of its workers, or a directory with its sockets.

    None means the only cluster of this user on this machine. Raises `MisuseError` if there is none, or several.
    """
    transport = transport_for(options)
    if where is not None and not os.path.isdir(where):
        host, colon, port = where.rpartition(":")
        if not colon or not port.isdecimal():
            raise MisuseError(f"{where!r} is neither a directory nor the host:port of a worker")
        guest = Guest(Addresses(tcp=(host.strip("[]"), int(port))), transport)
        try:
            return members(guest)
        finally:
            guest.close()
    clusters = clusters_here(transport, where)
    if len(clusters) == 1:
        return next(iter(clusters.values()))
    if not clusters:
        raise MisuseError(
            "you have no running cluster on this machine"
            + (f" in {where}" if where is not None else "; give the host:port of a worker to look at another one")
        )
    listed = "\n".join(
        f"  {os.path.dirname(found[0].addresses.unix or '')}: {', '.join(member.info.name for member in found)}"
        for found in clusters.values()
    )
    raise MisuseError(f"you have several running clusters on this machine; give the directory of one:\n{listed}")
