"""Crossing: applies an `Edge` to everything that leaves this worker for the edge's peer.

Numbers leave a worker in three ways, and each goes through here: values and texts of exceptions in `agent.translation`,
and gradients in `autograd.progress`. The code above them (functions, modules, references) has no other way out.

Values that are not floating-point, or not tensors at all, cannot be transformed. An edge with ``on_send`` refuses them,
unless its ``passes`` lets them pass.

**Feedback.** A compression with ``feedback`` keeps what it removed from a tensor, and adds it to the next tensor that
goes the same way: to the same peer, in the same direction, with the same shape and dtype, at the same place among such
tensors of its message. The rest is kept until the connection with the peer ends, up to `MOST_KEPT` bytes for each peer;
the least recently used goes first. Checkpoints do not contain it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from backhaul.edges.compression import DTYPES, Compression, coded, straight_through
from backhaul.edges.edge import Edge, edge_to
from backhaul.edges.transforms import GaussianNoise
from backhaul.errors import (
    BackhaulError,
    ContextError,
    MisuseError,
    QuotaError,
    RefusedError,
    RpcTimeoutError,
    UnsendableError,
    WorkerLostError,
)
from backhaul.ids import WorkerInfo
from backhaul.wire import trees
from backhaul.wire.messages import Coded

_log = logging.getLogger("backhaul.security")

MOST_KEPT = 256 << 20
_QUIET_SECONDS = 1.0

_FLOATS = frozenset(DTYPES.values())
_NARROW = (torch.float16, torch.bfloat16)
_OURS = (MisuseError, RefusedError, QuotaError, ContextError, UnsendableError, RpcTimeoutError, WorkerLostError)

Direction = Literal["on_send", "on_gradient"]


class Compressed(NamedTuple):
    """A tensor as it travels, if its last transform is a compression."""

    compression: Compression
    tensors: list[torch.Tensor]


class Leaving(NamedTuple):
    """Transformed tensors, and the parts of those that travel in parts, by place."""

    tensors: Sequence[torch.Tensor]
    parts: Mapping[int, Compressed]

    def wired(self, recorded: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[Coded, ...]]:
        """The tensors to send, and the message's entries about parts. ``recorded``: the tensors, from autograd."""
        sent = list(recorded)
        codes: list[Coded] = []
        for place, (compression, parts) in self.parts.items():
            codes.append(coded(place, compression, recorded[place]))
            sent[place] = parts[0]
            sent += parts[1:]
        return sent, tuple(codes)


class Feedback:
    """What compressions have removed from tensors, and will add to the next ones. Thread-safe."""

    def __init__(self, limit: int = MOST_KEPT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, torch.Tensor] = OrderedDict()
        self._size = 0

    def take(self, key: Any) -> torch.Tensor | None:
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None:
                self._size -= found.nbytes
            return found

    def put(self, key: Any, rest: torch.Tensor) -> None:
        if rest.nbytes > self._limit:
            return
        with self._lock:
            before = self._kept.pop(key, None)
            self._size += rest.nbytes - (0 if before is None else before.nbytes)
            self._kept[key] = rest
            while self._size > self._limit:
                self._size -= self._kept.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._size = 0

    @property
    def nbytes(self) -> int:
        return self._size


class Released(NamedTuple):
    """How many tensors were sent in one direction, and with how much noise."""

    tensors: int
    """The number of tensors with noise."""
    bare: int
    """The number of tensors without noise."""
    multiplier: float | None
    """The multiplier of the noise; None if there is no noise, or no Clip before it."""


class _Chain:
    """The transforms of a direction, and the noise among them."""

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transforms = transforms
        noises = [each for each in transforms if isinstance(each, GaussianNoise)]
        self.has_noise = bool(noises)
        self.multiplier = next((each.multiplier for each in noises if each.multiplier is not None), None)
        self.releases = min((each.releases for each in noises if each.releases is not None), default=math.inf)


class Crossing:
    """Transforms everything that leaves for one peer. Thread-safe."""

    def __init__(self, peer: str, edge: Edge) -> None:
        self.peer = peer
        self.edge = edge
        self.transforms = bool(edge.on_send)
        self.feedback = Feedback()
        self._chains = {"on_send": _Chain(edge.on_send), "on_gradient": _Chain(edge.on_gradient)}
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._noisy: Counter[str] = Counter()  # tensors that have left, by direction
        self._bare: Counter[str] = Counter()
        self._complained = -math.inf

    def values(self, tree: Any, tensors: Sequence[torch.Tensor]) -> Leaving:
        """The transformed tensors of a message.

        Raises `UnsendableError` if the message's tree, or its tensors, contain numbers that may not pass.
        """
        if not self.transforms:
            self._note_bare("on_send", tensors)
            return Leaving(tensors, {})
        self._check(tree)
        passing = [place for place, tensor in enumerate(tensors) if tensor.dtype in self.edge.passes]
        self._note_bare("on_send", [tensors[place] for place in passing])
        return self._apply("on_send", tensors, passing)

    def gradients(self, tensors: Sequence[torch.Tensor]) -> Leaving:
        """The transformed gradients."""
        if not self.edge.on_gradient:
            self._note_bare("on_gradient", tensors)
            return Leaving(tensors, {})
        with torch.no_grad():
            return self._apply("on_gradient", tensors, ())

    def may_tell(self, error: BaseException) -> bool:
        """Whether the peer may read the text of an exception. Texts of user code may contain numbers."""
        return not self.transforms or (type(error) in _OURS and all(type(each) is str for each in error.args))

    def text_of(self, error: BaseException, text: str) -> str:
        """The text that the peer may read about an exception."""
        if self.may_tell(error):
            return text
        return "the message stays in the log of its worker, since on_send is set for this peer there"

    def released(self, direction: Direction) -> Released:
        """The number of tensors sent so far, and their noise."""
        return Released(self._noisy[direction], self._bare[direction], self._chains[direction].multiplier)

    def _note_bare(self, direction: Direction, tensors: Sequence[torch.Tensor]) -> None:
        """Count tensors that leave unchanged. Integers do not count: they name rows, or the user allowed them."""
        count = sum(map(torch.is_floating_point, tensors))
        if count:
            with self._lock:
                self._bare[direction] += count

    def _release(self, direction: Direction) -> None:
        """Count a tensor that leaves. Raises `QuotaError` if the limit of releases is reached."""
        chain = self._chains[direction]
        with self._lock:
            if not chain.has_noise:
                self._bare[direction] += 1
                return
            if self._noisy[direction] >= chain.releases:
                raise QuotaError(
                    f"{chain.releases} tensors were sent to {self.peer!r} with noise ({direction}), and that is the "
                    "limit (GaussianNoise(releases=...)): each further tensor would reveal more about their rows"
                )
            self._noisy[direction] += 1

    def _apply(self, direction: Direction, tensors: Sequence[torch.Tensor], passing: Sequence[int]) -> Leaving:
        found = list(tensors)
        parts: dict[int, Compressed] = {}
        slots: Counter[Any] = Counter()
        for place, tensor in enumerate(tensors):
            if place in passing:
                continue
            self._require_dense(direction, tensor)
            kind = (direction, tuple(tensor.shape), tensor.dtype)
            slots[kind] += 1
            try:
                found[place], last = self._transform(direction, tensor, (*kind, slots[kind]))
            except BackhaulError:
                raise
            except Exception as error:
                self._complain(direction)
                raise MisuseError(
                    f"{direction} of the edge to {self.peer!r} has failed with {type(error).__name__}, so nothing was "
                    "sent: see the log of the sending worker"
                ) from None
            if last is not None:
                parts[place] = last
        return Leaving(found, parts)

    def _complain(self, direction: Direction) -> None:
        """Log the current exception, but rarely, because a peer may cause it again and again."""
        with self._lock:
            now = time.monotonic()
            recently, self._complained = now - self._complained < _QUIET_SECONDS, now
        if not recently:
            _log.exception("%s for %s failed", direction, self.peer)

    def _transform(
        self, direction: Direction, tensor: torch.Tensor, key: Any
    ) -> tuple[torch.Tensor, Compressed | None]:
        self._release(direction)
        dtype = tensor.dtype
        # In half precision, rounding could give a clipped row a larger norm.
        found = tensor.float() if dtype in _NARROW else tensor
        bound: float | None = None
        last: Compressed | None = None
        for place, transform in enumerate(self._chains[direction].transforms):
            before = found
            last = None
            if isinstance(transform, Compression):
                found, last = self._compress(transform, before, (*key, place))
            elif isinstance(transform, GaussianNoise) and transform.multiplier is not None and bound is not None:
                found = transform.add(before, transform.multiplier * bound)
            else:
                found = transform(before)
            bound = getattr(transform, "norm", None)
            if not isinstance(found, torch.Tensor) or (found.shape, found.dtype, found.device) != (
                before.shape,
                before.dtype,
                before.device,
            ):
                raise MisuseError(
                    f"{direction}: {transform!r:.100} must return a tensor of the same shape, dtype and device"
                )
        return found.to(dtype), last

    def _compress(self, transform: Compression, tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, Compressed]:
        with torch.no_grad():
            wanted = tensor.detach()
            if transform.feedback and (rest := self.feedback.take(key)) is not None:
                wanted = wanted + rest.to(wanted.device)
            parts = transform.compress(wanted)
            made = transform.expand(parts, wanted)
            if transform.feedback:
                self.feedback.put(key, wanted - made)
        return straight_through(tensor, made), Compressed(transform, parts)

    def _require_dense(self, direction: Direction, tensor: torch.Tensor) -> None:
        if tensor.dtype in _FLOATS and tensor.layout is torch.strided and not tensor.is_nested:
            return
        what = f"a tensor of {tensor.dtype}" if tensor.layout is torch.strided else f"a tensor of {tensor.layout}"
        if tensor.dtype is torch.uint8:
            what += ", or a NumPy array,"
        hint = "send dense tensors of floating-point numbers"
        if direction == "on_send" and tensor.layout is torch.strided:
            hint += f", or let it pass unchanged with Edge(passes=[{tensor.dtype}])"
        raise UnsendableError(f"{direction} is set for the edge to {self.peer!r}, and cannot change {what}: {hint}")

    def _check(self, tree: Any) -> None:
        """Raise `UnsendableError` for numbers in the tree, outside tensors."""
        kind = type(tree)
        if kind is list:
            tag = tree[0]
            if tag in _NO_NUMBERS:
                return
            if tag in _NUMBERS:
                self._require_passing(*_NUMBERS[tag])
                return
            for part in tree[1:]:
                if type(part) not in _HARMLESS:
                    self._check(part)
        elif kind is dict:
            for part in tree.values():
                if type(part) not in _HARMLESS:
                    self._check(part)
        elif kind is float or kind is bytes:
            self._require_passing(kind, f"a {kind.__name__}")

    def _require_passing(self, kind: type | None, what: str) -> None:
        if kind is None or kind not in self.edge.passes:
            hint = "" if kind is None else f", or let these pass unchanged with Edge(passes=[{kind.__name__}])"
            raise UnsendableError(
                f"on_send is set for the edge to {self.peer!r}, and cannot change {what}: send a tensor{hint}"
            )


_HARMLESS = frozenset({int, str, bool, type(None)})
_NO_NUMBERS = frozenset({trees.TENSOR, trees.BIG_INT, trees.TEXT, trees.ARRAY, trees.NAMED})
"""Tags without numbers in the tree: the numbers of tensors and arrays are in the message's tensors."""
_NUMBERS: dict[int, tuple[type | None, str]] = {
    trees.COMPLEX: (complex, "a complex number"),
    trees.BYTE_ARRAY: (bytes, "a bytearray"),
    trees.NUMPY_SCALAR: (float, "a NumPy number"),
    trees.PICKLE: (None, "a pickled object"),
}


class Edges:
    """The edges of one worker. Thread-safe."""

    def __init__(self, me: WorkerInfo, edges: Mapping[str, Edge]) -> None:
        self._me = me.name
        self._edges = edges
        self._lock = threading.Lock()
        self._crossings: dict[str, Crossing | None] = {me.name: None}  # a message to oneself leaves unchanged

    def to(self, peer: str) -> Crossing | None:
        """The crossing to a peer; None if there is no edge to it. It lives as long as this worker."""
        try:
            return self._crossings[peer]
        except KeyError:
            pass
        edge = edge_to(peer, self._edges)
        with self._lock:
            return self._crossings.setdefault(peer, None if edge is None else Crossing(peer, edge))

    def lost(self, connection: object, peer: WorkerInfo, error: object) -> None:
        """Drop the feedback for a peer whose connection has ended. The counts of releases stay."""
        crossing = self.to(peer.name)
        if crossing is not None:
            crossing.feedback.clear()

    @property
    def transforms(self) -> bool:
        """Whether any edge of this worker has ``on_send``."""
        return any(edge.on_send for edge in self._edges.values())
