"""A peer that lies: it greets like a member of the group, and then sends what the test writes."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import exposed
import torch

from backhaul.options import RpcOptions
from backhaul.security.handshake import Hello
from backhaul.testing import InProcessCluster
from backhaul.transport.base import ChannelClosed
from backhaul.transport.memory import MemoryTransport
from backhaul.trust.penalties import Penalties
from backhaul.trust.permissions import refusal
from backhaul.wire import trees
from backhaul.wire.frames import encode
from backhaul.wire.messages import Call, Failure, Mark, Refs, Result
from backhaul.worker import Worker

REFUSED = str(refusal("worker0"))
SECONDS = 20.0


def federation(size: int = 3, **options: Any) -> InProcessCluster:
    return InProcessCluster(size, options=RpcOptions(trust="federation", **options))


def without_pauses(victim: Worker) -> None:
    """Switch off the pauses for refused peers."""
    victim.agent.permissions.refusals = Penalties(1 << 40, 1.0)


class Liar:
    """A connection to ``victim`` as the member ``rank``, whose frames the test writes."""

    def __init__(self, cluster: InProcessCluster, rank: int = 2, victim: int = 0, *, as_itself: bool = False) -> None:
        """``as_itself``: it has the incarnation of the member, and is no other process in its place."""
        self.me: Worker = cluster[rank]
        self.victim: Worker = cluster[victim]
        membership = self.me.agent.membership
        incarnation = membership.incarnation if as_itself else ""
        hello = Hello(membership.group, rank, f"worker{rank}", victim, incarnation=incarnation)
        transport = MemoryTransport(cluster.network, RpcOptions(trust="federation"))
        self.channel, _ = transport.connect(membership.find(victim).addresses, hello, time.monotonic() + SECONDS)
        self._ids = itertools.count(1)

    def send(self, message: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        assert self.channel.write(encode(message, tensors))

    def receive(self) -> Any:
        """The next message from the victim."""
        deadline = time.monotonic() + SECONDS
        while (envelope := self.channel.next()) is None:
            assert self.channel.read(max(0.0, deadline - time.monotonic())), "no answer"
        return envelope.message

    def ask(self, message: type[Any], *fields: Any, tensors: Sequence[torch.Tensor] = ()) -> Any:
        """Send a request of that type, and return the answer."""
        id = next(self._ids)
        self.send(message(id, *fields), tensors)
        answer = self.receive()
        while not isinstance(answer, Result | Failure):  # messages of a pass come on the same line
            answer = self.receive()
        assert answer.id == id
        return answer

    def call(
        self,
        function: Any,
        *args: Any,
        refs: Refs = (),
        mark: Mark | None = None,
        tensors: Sequence[torch.Tensor] = (),
        kwargs: Any = None,
    ) -> Any:
        """Make a call, and return the answer. The arguments are trees; ``function`` is a name or a tree."""
        function = [trees.NAMED, function] if isinstance(function, str) else function
        tree = [trees.TUPLE, function, [trees.TUPLE, *args], {} if kwargs is None else kwargs]
        return self.ask(Call, tree, refs, mark, tensors=tensors)

    def is_cut_off(self, within: float = SECONDS) -> bool:
        """Whether the victim has ended the connection, or ends it before that many seconds have passed."""
        try:
            while self.channel.read(within):
                while self.channel.next() is not None:
                    pass
        except ChannelClosed:
            return True
        return False

    def close(self) -> None:
        self.channel.close()


@contextmanager
def liar(cluster: InProcessCluster, rank: int = 2, victim: int = 0) -> Iterator[Liar]:
    peer = Liar(cluster, rank, victim)
    try:
        yield peer
    finally:
        peer.close()


def is_refused(answer: Any) -> bool:
    """Whether this is the uniform answer to all refused requests."""
    return answer == Failure(answer.id, "worker0", "backhaul.errors.RefusedError", REFUSED, "")


def is_value(answer: Any, value: Any) -> bool:
    return isinstance(answer, Result) and bool(answer.tree == value)


EVENTS = ("pickle.find_class", "exec", "compile", "os.system", "subprocess.Popen", "ctypes.dlopen", "import")
_seen: list[str] | None = None


def _hook(event: str, args: Any) -> None:
    if _seen is not None and event in EVENTS:
        _seen.append(f"{event} {args!r:.200}")


sys.addaudithook(_hook)  # a hook cannot be removed; it is active only inside `attack`


@contextmanager
def attack(cluster: InProcessCluster) -> Iterator[None]:
    """A block that must import and run nothing. Afterwards a good peer must get an answer at once."""
    global _seen
    assert cluster[1].rpc_sync("worker0", exposed.double, (1,)) == 2  # connect them before the attack
    before = set(sys.modules)
    exposed.called.clear()
    _seen = []
    try:
        yield
        seen = _seen
    finally:
        _seen = None
    assert not seen
    assert not exposed.called
    assert set(sys.modules) == before
    start = time.monotonic()
    assert cluster[1].rpc_sync("worker0", exposed.double, (21,)) == 42
    assert time.monotonic() - start < 1.0


__all__ = [
    "REFUSED",
    "Liar",
    "attack",
    "federation",
    "is_refused",
    "is_value",
    "liar",
    "without_pauses",
]
