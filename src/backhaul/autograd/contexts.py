"""Contexts: the records that one worker keeps of its contexts.

A context is made by its *initiator*. Other workers learn of it from messages that carry its id, and keep a `Record` of
it until a message says that it is over.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from backhaul.autograd.functions import ID_BITS, rank_of
from backhaul.autograd.gradients import Captured, store
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
"""The `Contexts` of all workers of this process. It is global, since the torch functions that `mistakes` watches know
no worker."""

_NONES = repeat(None)

_REMEMBERED = 4096
_NOTED = 1024
# Ids count up from a random start below this, which leaves as many ids again. The start is random so that a process
# that takes the rank of a dead one does not reuse its ids, except by a very rare chance.
_START_BITS = ID_BITS - 1


class Send(msgspec.Struct, frozen=True, eq=False):
    """The sender's record of a tensor of a message."""

    message: int
    to: WorkerInfo
    node: Node
    """The graph node."""
    output: torch.Tensor
    """The dummy output of the node."""
    device: torch.device
    """The device of the tensor, where its gradient is expected."""
    like: Like | None = None
    """The properties that its gradient must have, if the gradient comes from a peer that may lie."""


class Together:
    """The Sends of a message with several recorded tensors, presented as one node of the graph."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes

    def name(self) -> str:
        name: str = self._nodes[0].name()
        return name

    @property
    def next_functions(self) -> tuple[tuple[Node, int], ...]:
        return tuple(edge for node in self._nodes for edge in node.next_functions)


class Ran(NamedTuple):
    """A finished run of torch's engine. Times are those of `time.perf_counter_ns`."""

    backward: int
    sources: Sequence[int]
    began: int
    ended: int
    waits: bool
    """Whether gates of the run had to wait: see `graph.Component`."""
    failed: bool


class Waited(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A finished wait at a gate."""

    backward: int
    source: int
    began: int
    ended: int


class Passed(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A finished backward pass that this worker started."""

    backward: int
    began: int
    ended: int
    error: str | None


class Record:
    """One worker's record of a context. ``lock`` guards all fields but ``id`` and ``initiator``, unless noted."""

    over = False
    unread = False
    """Whether a pass that was started here has put gradients into the context that have not been read yet."""
    asked = False
    """Whether this worker has asked the initiator if the context is over. It needs no lock."""
    introducer: int | None = None
    """Rank of the worker whose message told this worker of the context."""
    limit: int | None = None
    """How many recorded tensors may wait for their gradients, if the introducer has a quota."""

    def __init__(self, id: int) -> None:
        self.id = id
        self.initiator = rank_of(id)
        self.lock = threading.Lock()
        self.sends: dict[int, Send] = {}
        """By source: the id of the message for its first recorded tensor, and the ids that follow for the others."""
        self.unspent: dict[int, Send] = {}
        """The Sends whose graphs have not been run, or were retained: only these can take part in a further pass."""
        self.recvs: dict[int, Node] = {}
        """By the id of the message."""
        self.told: set[int] = set()
        """Ranks of the workers to which this one has sent messages of the context."""
        self.heard: set[int] = set()
        """Ranks of the workers from which this one has received messages of the context."""
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        self._left: list[tuple[Sequence[torch.Tensor], Captured]] = []
        self.passes: dict[int, LocalPass] = {}
        """This worker's part of each pass, by the pass's id."""
        self.aborted: set[int] = set()
        """Ids of failed passes."""
        self.floors: dict[int, int] = {}
        """For each rank that starts passes: its passes with ids below this are over."""
        # The fields below are for `inspection.contexts`. Appending to them needs no lock.
        self.ran: list[tuple[int, Sequence[int], int, int, bool, bool]] = []
        """The fields of a `Ran` for each run (see `runs`), as plain tuples, which are made faster."""
        self.waited: list[Waited] = []
        self.passed: list[Passed] = []
        self.roots: list[weakref.ref[torch.Tensor]] = []
        """The roots of the latest pass that was started here, as long as the user keeps them."""

    def sent(self) -> dict[int, Node]:
        """The Sends of each message, by its id: a node, or several presented as one."""
        found: dict[int, list[Node]] = {}
        for send in list(self.sends.values()):
            found.setdefault(send.message, []).append(send.node)
        return {message: nodes[0] if len(nodes) == 1 else Together(nodes) for message, nodes in found.items()}

    def require_room(self, count: int) -> None:
        """Raise `QuotaError` if ``count`` Sends, or Recvs, are more than the limit."""
        if self.limit is not None and count > self.limit:
            raise QuotaError(f"{self.limit} tensors of autograd context {self.id} already wait for their gradients")

    def add(self, sends: Mapping[int, Send]) -> None:
        self.sends.update(sends)
        self.unspent.update(sends)

    def spend(self, sources: Iterable[int]) -> None:
        """Note that the graphs of these Sends have been run, and freed."""
        deque(map(self.unspent.pop, sources, _NONES), maxlen=0)

    @property
    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """By leaf. Needs the lock, because it stores what runs have left."""
        while self._left:
            store(self._gradients, *self._left.pop(0))
        return self._gradients

    def leave(self, leaves: Sequence[torch.Tensor], captured: Captured) -> None:
        """Leave the gradients of a run, to be stored when there is time, or when they are read. Needs the lock."""
        self._left.append((leaves, captured))

    @property
    def has_left(self) -> bool:
        """Whether there are gradients to store. Needs no lock."""
        return bool(self._left)

    def runs(self) -> list[Ran]:
        """The finished runs. Only the latest are kept."""
        return [Ran(*run) for run in list(self.ran)]

    def note_wait(self, backward: int, source: int, began: int) -> None:
        """Note that a wait is over. Only the latest waits are kept."""
        if len(self.waited) >= _NOTED:
            del self.waited[: _NOTED // 2]
        self.waited.append(Waited(backward, source, began, time.perf_counter_ns()))

    def note_pass(self, backward: int, began: int, error: BaseException | None) -> None:
        if len(self.passed) >= _NOTED:
            del self.passed[: _NOTED // 2]
        text = None if error is None else f"{type(error).__name__}: {error}"[:500]
        self.passed.append(Passed(backward, began, time.perf_counter_ns(), text))

    def raise_floor(self, starter: int, floor: int) -> list[LocalPass]:
        """Forget and return the passes of ``starter`` with ids below ``floor``, which are over. Needs the lock."""
        if len(self.ran) >= _NOTED:
            del self.ran[: -_NOTED // 2]
        self.floors[starter] = max(floor, self.floors.get(starter, 0))
        if self.aborted:
            self.aborted = {id for id in self.aborted if not self.is_over(id)}
        return [self.passes.pop(id) for id in list(self.passes) if self.is_over(id)] if self.passes else []

    def is_over(self, backward: int) -> bool:
        """Whether a pass is known to be over, because its starter has begun a later one after it."""
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
        """``limits`` apply to each peer, and ``refuse`` makes the exception for a peer that exceeds them.

        With ``secret``, the ids of this worker's contexts cannot be guessed: a peer knows only ids that it was told.
        """
        self._me = me
        everywhere.add(self)
        self._limits = limits
        self._refuse = refuse
        self.secret = secret
        self._introduced: Counter[int] = Counter()  # the number of open contexts that each rank has introduced
        self._lock = threading.Lock()
        self._records: dict[int, Record] = {}
        self._over: OrderedDict[int, None] = OrderedDict()  # the latest ended contexts: late messages may still come
        self._next_id = (me.id << ID_BITS) + secrets.randbits(_START_BITS) + 1

    def new_id(self, count: int = 1) -> int:
        """The first of ``count`` consecutive ids that no other context, message or pass has. Later ids are higher."""
        with self._lock:
            first = self._next_id
            self._next_id += count
            return first

    def new(self) -> Record:
        """The record of a new context of this worker."""
        id = self.new_id()
        if self.secret:  # random, and above all counted ids
            id = (((self._me.id << 1) + 1) << _START_BITS) + secrets.randbits(_START_BITS)
        record = Record(id)
        with self._lock:
            self._records[record.id] = record
        return record

    def get(self, id: int) -> Record | None:
        return self._records.get(id)

    def find(self, id: int) -> Record:
        """The record of a context. Raises `ContextError` if there is none."""
        record = self._records.get(id)
        if record is None:
            raise gone(id, self._me)
        return record

    def join(self, id: int, sender: WorkerInfo) -> Record | None:
        """The record of the context that a message of ``sender`` belongs to; None if the context is over.

        Raises `QuotaError` if ``sender`` has introduced too many contexts.
        """
        record = self._records.get(id)
        if record is None:
            with self._lock:
                if id in self._over or rank_of(id) == self._me.id:
                    return None
                record = self._records.get(id) or self._introduce(id, sender)
            if record is None:  # refused without the lock, since this writes to the log, whose handlers are user code
                limit = 0 if self._limits is None else self._limits.contexts
                raise self._refuse(sender, f"this peer has {limit} open autograd contexts already")
        record.heard.add(sender.id)
        return record

    def _introduce(self, id: int, sender: WorkerInfo) -> Record | None:
        """A record for a new context of a peer; None if the peer has too many. The caller holds the lock."""
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
        """Forget a context. Returns its record, if there was one."""
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
    """Whether a worker of this process has a record of this context."""
    return any(contexts.get(id) is not None for contexts in list(everywhere))


def gone(id: int, me: WorkerInfo) -> ContextError:
    return ContextError(
        f"Could not find autograd context with id: {id} on worker {me.name!r}. Either its `with context()` block has "
        "ended, normally or by an exception, or the worker that opened it has died, or this worker never took part "
        "in it"
    )
