"""Contexts: what one worker has recorded, by context.

A context is made by its *initiator*. Other workers get to know of it by messages that carry its id, and keep a
`Record` of it until they are told that it is over.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from backhaul.autograd.functions import ID_BITS, rank_of
from backhaul.errors import BackhaulError, ContextError, QuotaError
from backhaul.ids import WorkerInfo
from backhaul.options import Quotas
from backhaul.trust.checking import Like

if TYPE_CHECKING:
    from backhaul.autograd.graph import Node
    from backhaul.autograd.local_pass import LocalPass

current_context: ContextVar[int | None] = ContextVar("backhaul_autograd_context", default=None)
"""The id of the context that this thread, or coroutine, is in."""

everywhere: weakref.WeakSet[Contexts] = weakref.WeakSet()
"""Those of all workers of this process: torch's functions that `mistakes` watches know no worker."""

_REMEMBERED = 4096
_NOTED = 1024
# Leaves as many ids again to count up to; a process that has the rank of a dead one hardly meets its ids.
_START_BITS = ID_BITS - 1


class Send(msgspec.Struct, frozen=True, eq=False):
    """A recorded tensor of a message, at its sender."""

    message: int
    to: WorkerInfo
    output: torch.Tensor
    """The dummy output: its ``grad_fn`` is the graph node."""
    device: torch.device
    """Where the tensor is, and its gradient is expected."""
    like: Like | None = None
    """What its gradient must be like, if it comes from a peer that may lie."""

    @property
    def node(self) -> Node:
        return self.output.grad_fn


class Together:
    """The Sends of a message with several recorded tensors, to be looked at as if they were one node of the graph."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes

    def name(self) -> str:
        name: str = self._nodes[0].name()
        return name

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        return tuple(edge for node in self._nodes for edge in node.next_functions)


class Ran(NamedTuple):
    """A run of torch's engine that is over. Times are those of `time.perf_counter_ns`."""

    backward: int
    sources: Sequence[int]
    began: int
    ended: int
    waits: bool
    """Whether gates of it had to wait: see `graph.Component`."""
    failed: bool


class Waited(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A wait at a gate that is over."""

    backward: int
    source: int
    began: int
    ended: int


class Passed(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A backward pass that was started here and is over."""

    backward: int
    began: int
    ended: int
    error: str | None


class Record:
    """A context, as one worker knows it. ``lock`` guards what is not said to be constant."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.initiator = rank_of(id)
        self.lock = threading.Lock()
        self.sends: dict[int, Send] = {}
        """By the id of the message for its first recorded tensor, and ids that follow for the others."""
        self.unspent: dict[int, Send] = {}
        """Those whose graphs have not been run, or were retained: who else may take part in a pass."""
        self.recvs: dict[int, Node] = {}
        """By the id of the message."""
        self.told: set[int] = set()
        """Ranks of the workers that this one has sent messages of the context to."""
        self.heard: set[int] = set()
        """Ranks of those that it has such messages from."""
        self.gradients: dict[torch.Tensor, torch.Tensor] = {}
        self.passes: dict[int, LocalPass] = {}
        """What this worker has to do with passes, by their ids."""
        self.aborted: set[int] = set()
        """Passes that have failed."""
        self.floors: dict[int, int] = {}
        """By who starts passes: those with lower ids are over."""
        self.over = False
        self.unread = False
        """Whether a pass that was started here has put gradients into the context, and nobody has asked for them."""
        self.introducer: int | None = None
        """Rank of who told this worker of the context."""
        self.limit: int | None = None
        """How many recorded tensors may wait for their gradients, if a peer that has a quota has told of it."""
        # For those who look at the context (`inspection.contexts`). Appending needs no lock.
        self.ran: list[tuple[int, Sequence[int], int, int, bool, bool]] = []
        """The fields of `Ran`, of each run; see `runs`. A plain tuple is made faster."""
        self.waited: list[Waited] = []
        self.passed: list[Passed] = []
        self.roots: list[weakref.ref[torch.Tensor]] = []
        """The roots of the latest pass that was started here, as long as the user keeps them."""

    def sent(self) -> dict[int, Node]:
        """The Sends of each message, by its id: a node, or several seen as one."""
        found: dict[int, list[Node]] = {}
        for send in list(self.sends.values()):
            found.setdefault(send.message, []).append(send.node)
        return {message: nodes[0] if len(nodes) == 1 else Together(nodes) for message, nodes in found.items()}

    def require_room(self, count: int) -> None:
        """Raise `QuotaError` if so many Sends, or Recvs, are too many."""
        if self.limit is not None and count > self.limit:
            raise QuotaError(f"{self.limit} tensors of autograd context {self.id} wait for their gradients")

    def add(self, source: int, send: Send) -> None:
        self.sends[source] = send
        self.unspent[source] = send

    def spend(self, sources: Iterable[int]) -> None:
        """The graphs of these have been run, and freed."""
        for source in sources:
            self.unspent.pop(source, None)

    def runs(self) -> list[Ran]:
        """The runs that are over. Of many passes, only the latest runs are kept."""
        return [Ran(*run) for run in list(self.ran)]

    def note_wait(self, backward: int, source: int, began: int) -> None:
        """A wait that began at that time is over. Of many, the latest are kept; so too below."""
        if len(self.waited) >= _NOTED:
            del self.waited[: _NOTED // 2]
        self.waited.append(Waited(backward, source, began, time.perf_counter_ns()))

    def note_pass(self, backward: int, began: int, error: BaseException | None) -> None:
        if len(self.passed) >= _NOTED:
            del self.passed[: _NOTED // 2]
        text = None if error is None else f"{type(error).__name__}: {error}"[:500]
        self.passed.append(Passed(backward, began, time.perf_counter_ns(), text))

    def raise_floor(self, starter: int, floor: int) -> list[LocalPass]:
        """Passes of that worker below ``floor`` are over: forgets them, and returns them. Under the lock."""
        if len(self.ran) >= _NOTED:
            del self.ran[: -_NOTED // 2]
        self.floors[starter] = max(floor, self.floors.get(starter, 0))
        self.aborted = {id for id in self.aborted if not self.is_over(id)}
        return [self.passes.pop(id) for id in list(self.passes) if self.is_over(id)]

    def is_over(self, backward: int) -> bool:
        """Whether a pass is known to be over, since a later one has begun after it."""
        return backward < self.floors.get(rank_of(backward), 0)

    def workers(self) -> set[int]:
        with self.lock:
            return self.told | self.heard


class Contexts:
    """The contexts that one worker knows. Thread-safe."""

    def __init__(
        self,
        me: WorkerInfo,
        limits: Quotas | None = None,
        refuse: Callable[[WorkerInfo, str], BackhaulError] = lambda peer, why: ContextError(why),
        *,
        secret: bool = False,
    ) -> None:
        """``limits`` are those of each peer, and ``refuse`` makes the exception for one that goes beyond them.

        With ``secret``, nobody can guess the ids of this worker's contexts: who knows one has been told of it.
        """
        self._me = me
        everywhere.add(self)
        self._limits = limits
        self._refuse = refuse
        self.secret = secret
        self._introduced: Counter[int] = Counter()  # by rank: how many contexts are known from there
        self._lock = threading.Lock()
        self._records: dict[int, Record] = {}
        self._over: OrderedDict[int, None] = OrderedDict()  # the latest: a message of theirs may still come
        self._next_id = (me.id << ID_BITS) + secrets.randbits(_START_BITS) + 1

    def new_id(self, count: int = 1) -> int:
        """An id that no other context, message or pass has, or the first of so many. Later ones are higher."""
        with self._lock:
            first = self._next_id
            self._next_id += count
            return first

    def new(self) -> Record:
        """A context of this worker's."""
        id = self.new_id()
        if self.secret:  # above all that are counted
            id = (((self._me.id << 1) + 1) << _START_BITS) + secrets.randbits(_START_BITS)
        record = Record(id)
        with self._lock:
            self._records[record.id] = record
        return record

    def get(self, id: int) -> Record | None:
        return self._records.get(id)

    def find(self, id: int) -> Record:
        """The record of a context. Raises `ContextError`."""
        record = self._records.get(id)
        if record is None:
            raise gone(id, self._me)
        return record

    def join(self, id: int, sender: WorkerInfo) -> Record | None:
        """The record of a context that a message of ``sender`` belongs to; None if it is over.

        Raises `QuotaError` if there are too many that this worker has told of.
        """
        record = self._records.get(id)
        if record is None:
            with self._lock:
                if id in self._over or rank_of(id) == self._me.id:
                    return None
                record = self._records.get(id) or self._introduce(id, sender)
        if record is None:  # said without the lock: it goes into the log, whose handlers are the user's
            limit = 0 if self._limits is None else self._limits.contexts
            raise self._refuse(sender, f"{limit} autograd contexts are known from this peer")
        record.heard.add(sender.id)
        return record

    def _introduce(self, id: int, sender: WorkerInfo) -> Record | None:
        """A context that was not known here; None if there are too many from there. Holds the lock."""
        record = Record(id)
        record.introducer = sender.id
        if self._limits is not None:
            if self._introduced[sender.id] >= self._limits.contexts:
                return None
            record.limit = self._limits.references
        self._introduced[sender.id] += 1
        self._records[id] = record
        return record

    def end(self, id: int) -> Record | None:
        """Forget a context; its record, if there was one."""
        with self._lock:
            record = self._records.pop(id, None)
            if record is not None and record.introducer is not None:
                self._introduced[record.introducer] -= 1
            self._over[id] = None
            if len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
        if record is not None:
            with record.lock:
                record.over = True
        return record

    def __iter__(self) -> Iterator[Record]:
        with self._lock:
            return iter(list(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)


def is_known(id: int) -> bool:
    """Whether a worker of this process knows this context, and has not been told that it is over."""
    return any(contexts.get(id) is not None for contexts in list(everywhere))


def gone(id: int, me: WorkerInfo) -> ContextError:
    return ContextError(
        f"Could not find autograd context with id: {id} on worker {me.name!r}. Either its `with context()` block has "
        "been left, by its own thread or because of an error in it, or its initiator has died, or this worker never "
        "took part in it"
    )
