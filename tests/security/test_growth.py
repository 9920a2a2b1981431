"""The cost of a message, before its sender's permission is checked, grows linearly with its size.

For every kind of message, and for every part of it that a peer can make larger: twice as much of it takes about twice
the processor time, all in all. A cost that grows with the square would take sixty-four times as long for eight times
the size. The parts follow from the types of the fields, so that no field can be forgotten. Cases whose values have to
mean something are written by hand.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from liars import Liar, federation
from msgspec import inspect

from backhaul.errors import AuthenticationError
from backhaul.ids import RefId, ShareId
from backhaul.testing import InProcessCluster
from backhaul.transport.base import ChannelClosed
from backhaul.trust.penalties import Penalties
from backhaul.wire import headers, trees
from backhaul.wire.frames import HEADER, encode
from backhaul.wire.messages import (
    KIND_OF,
    KINDS,
    AwaitEnd,
    AwaitReady,
    Call,
    Check,
    Create,
    Failed,
    Failure,
    Fetch,
    Goodbye,
    Gradients,
    Inquire,
    Inspect,
    Leave,
    Mark,
    Notices,
    Pass,
    Ping,
    Recall,
    Register,
    Registered,
    Release,
    Report,
    Resolve,
    Resolved,
    Result,
    Sweep,
    Swept,
    TakePart,
    Tally,
    Unpin,
)

SMALL, TIMES = 1000, 8
LARGEST_RATIO = 3.0 * TIMES  # a square is 8 * TIMES; an eighth of a message is too small to be exact about
ME = 2
PASS = Pass((ME << 48) + 1, (ME << 48) + 2, 0, False, False)
numbers = itertools.count(1)


def call(*args: Any, refs: Any = (), mark: Mark | None = None) -> Call:
    return Call(next(numbers), [trees.TUPLE, [trees.NAMED, "exposed:hidden"], [trees.TUPLE, *args], {}], refs, mark)


def collide(count: int) -> list[list[int]]:
    """Trees of tuples with one hash."""
    return [[trees.TUPLE, *(-1 - (number >> bit & 1) for bit in range(14))] for number in range(count)]


def refs(count: int) -> tuple[tuple[RefId, ShareId], ...]:
    return tuple((RefId(ME, ME, number), ShareId(ME, number)) for number in range(count))


def notices(make: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda count: Notices(next(numbers), 1, next(numbers), tuple(make(each) for each in range(count)))


def ids(count: int) -> tuple[int, ...]:
    return tuple((ME << 48) + number for number in range(count))


def scattered(count: int) -> Iterator[int]:
    """Numbers in an order without consecutive neighbours."""
    return (number * 7919 % 1_000_003 for number in range(count))


# For each kind of message, the parts that grow with the count.
GROWING: dict[type[Any], list[Callable[[int], Any]]] = {
    Call: [
        lambda count: call(*range(count)),
        lambda count: call(*[[] for _ in range(count)]),
        lambda count: call("x" * 10 * count),
        lambda count: call([trees.SET, *collide(count)]),
        lambda count: call(dict.fromkeys(range(count), 1)),
        lambda count: call(refs=refs(count)),
        lambda count: call(mark=Mark(7, 8, True, tuple((1,) for _ in range(count)))),
    ],
    Result: [lambda count: Result(1, list(range(count)))],
    Failure: [lambda count: Failure(1, "x" * count, "y" * count, "z" * count, "", list(range(count)))],
    Create: [
        lambda count: Create(next(numbers), RefId(0, ME, next(numbers)), [trees.TUPLE, *range(count)], refs(count)),
    ],
    Notices: [
        notices(lambda each: Register(RefId(0, 0, each))),
        notices(lambda each: Registered(RefId(ME, ME, each))),
        notices(lambda each: Unpin(ShareId(0, each))),
        lambda count: Notices(
            next(numbers), 1, next(numbers), tuple(Release(RefId(0, ME, each)) for each in scattered(count))
        ),
        notices(lambda each: Recall((ShareId(ME, each),))),
        lambda count: Notices(
            next(numbers), 1, next(numbers), (Recall(tuple(ShareId(ME, each) for each in range(count))),)
        ),
        notices(lambda each: Sweep((each,))),
        notices(lambda each: Swept((each,))),
    ],
    Gradients: [lambda count: Gradients(PASS, ids(count), (), ids(count), ids(count))],
    TakePart: [lambda count: TakePart(PASS, ids(count))],
    Report: [lambda count: Report(PASS, False, ids(count), ids(count))],
    Failed: [lambda count: Failed(PASS, "x" * count, "y" * count, "z" * count, "", list(range(count)))],
    Inquire: [lambda count: Inquire(next(numbers), ids(count))],
    Inspect: [lambda count: Inspect(1, "x" * count, {str(each): each for each in range(count)})],
}
FIXED = {Ping, AwaitReady, AwaitEnd, Tally, Goodbye, Fetch, Resolve, Resolved, Check, Leave}
"""Kinds without a part that grows."""

CASES = [(kind, place) for kind, makers in GROWING.items() for place in range(len(makers))]


def test_every_kind_of_message_is_tested() -> None:
    assert GROWING.keys() | FIXED == set(KINDS.values())
    assert not GROWING.keys() & FIXED


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with federation() as made:
        # Work is measured, without the pauses for refused peers.
        made[0].agent.permissions.refusals = Penalties(1 << 40, 1.0)
        made[0].agent.penalties = Penalties(1 << 40, 1.0)
        yield made


class Peer:
    """A liar that connects again when its connection is cut."""

    def __init__(self, workers: InProcessCluster) -> None:
        self._workers = workers
        self._liar: Liar | None = None

    def cost(self, data: bytes) -> float:
        """The processor time of this process for handling a frame and a ping after it."""
        if self._liar is None:
            self._liar = Liar(self._workers, ME)
        peer, ping = self._liar, next(numbers) + (1 << 40)
        assert peer.channel.peer is not None
        gc.disable()
        began = time.process_time()
        peer.channel._network.post(peer.channel.peer, data)
        try:
            peer.send(Ping(ping))
            while getattr(peer.receive(), "id", None) != ping:
                pass
        except (ChannelClosed, AuthenticationError):
            self.close()
        took = time.process_time() - began
        gc.enable()
        return took

    def close(self) -> None:
        if self._liar is not None:
            self._liar.close()
            self._liar = None


@pytest.fixture
def peer(workers: InProcessCluster) -> Iterator[Peer]:
    made = Peer(workers)
    yield made
    made.close()


def check(peer: Peer, make: Callable[[int], bytes]) -> None:
    """Check the ratio with the least of several measurements, because other work only adds to them."""
    for attempt in range(4):
        small = min(peer.cost(make(SMALL)) for _ in range(3 + 2 * attempt))
        large = min(peer.cost(make(SMALL * TIMES)) for _ in range(2 + attempt))
        if large < LARGEST_RATIO * max(small, 0.0005):
            return
    raise AssertionError(f"{TIMES} times as much takes {large / small:.0f} times as long: {small:.4f} s, {large:.4f} s")


@pytest.mark.parametrize(("kind", "place"), CASES, ids=[f"{kind.__name__}-{place}" for kind, place in CASES])
def test_a_message_of_twice_the_size_takes_twice_as_long(peer: Peer, kind: type[Any], place: int) -> None:
    make = GROWING[kind][place]
    assert type(make(1)) is kind
    check(peer, lambda count: bytes(encode(make(count))))


# What can grow by its type.


def least(kind: inspect.Type, number: int) -> Any:
    """The smallest value of a type that differs from those with other numbers."""
    match kind:
        case inspect.StructType():
            tag = [] if kind.tag is None else [kind.tag]
            return [*tag, *(_field(field, number) for field in kind.fields)]
        case inspect.TupleType():
            return [least(each, number) for each in kind.item_types]
        case inspect.UnionType():
            return least(kind.types[0], number)
        case inspect.IntType():
            return (ME << 48) + number
        case inspect.StrType():
            return str(number)
        case inspect.BoolType():
            return False
        case inspect.VarTupleType():
            return []
        case inspect.DictType():
            return {}
        case inspect.AnyType():
            return [trees.TUPLE, [trees.NAMED, "exposed:hidden"], [trees.TUPLE], {}]
    raise NotImplementedError(f"a field of type {kind}")


def _field(field: inspect.Field, number: int) -> Any:
    """Requests are numbered, and those that count are in order."""
    return next(numbers) if field.name in ("id", "number") else least(field.type, number)


Growing = tuple[str, Callable[[int], Any]]


def growths(kind: inspect.Type) -> Iterator[Growing]:
    """Every part of a type that can have any size, by name, and a function that makes a value of a given size."""
    match kind:
        case inspect.StrType():
            yield "", lambda count: "x" * 10 * count
        case inspect.DictType():
            yield "", lambda count: {str(each): each for each in range(count)}
        case inspect.VarTupleType():
            for item in kind.item_type.types if isinstance(kind.item_type, inspect.UnionType) else [kind.item_type]:
                name = f"[{item.cls.__name__}]" if isinstance(item, inspect.StructType) else "[]"
                yield name, lambda count, item=item: [least(item, each) for each in range(count)]
                yield from ((name + inner, lambda count, make=make: [make(count)]) for inner, make in growths(item))
        case inspect.TupleType():
            yield from _inside(kind, [(f"[{place}]", each) for place, each in enumerate(kind.item_types)])
        case inspect.StructType():
            yield from _inside(kind, [(f".{field.name}", field.type) for field in kind.fields])
        case inspect.UnionType():
            for each in kind.types:
                yield from growths(each)


def _inside(kind: inspect.Type, parts: list[tuple[str, inspect.Type]]) -> Iterator[Growing]:
    for place, (name, part) in enumerate(parts):
        for inner, make in growths(part):

            def grown(count: int, place: int = place, make: Callable[[int], Any] = make) -> Any:
                value = least(kind, 1)
                value[len(value) - len(parts) + place] = make(count)
                return value

            yield name + inner, grown


def all_growths() -> Iterator[tuple[str, type[Any], Callable[[int], Any]]]:
    for kind in KINDS.values():
        described = inspect.type_info(kind)
        for name, make in growths(described):
            yield kind.__name__ + name, kind, make
        yield (
            f"{kind.__name__} and fields that it does not have",
            kind,
            lambda count, described=described: [*least(described, 1), *range(count), list(range(count))],
        )


def framed(kind: type[Any], fields: Any) -> bytes:
    metadata = msgspec.msgpack.encode(fields)
    return HEADER.pack(b"BH", 1, KIND_OF[kind], len(metadata), 0, 0) + metadata


FROM_TYPES = list(all_growths())


def test_parts_that_can_grow_are_found() -> None:
    found = {name for name, _, _ in FROM_TYPES}
    assert {
        "Call.refs[]",
        "Call.mark.reach[]",
        "Call.mark.reach[][]",
        "Call.autocast[]",
        "Call.autocast[][1]",
        "Create.coded[Coded].shape[]",
        "Notices.notices[Obituary].reason",
        "Notices.notices[Recall].shares[ShareId]",
        "Fetch.mark.reach[]",
        "Gradients.shortcuts[Shortcut]",
        "Ping and fields that it does not have",
    } <= found


@pytest.mark.parametrize(("name", "kind", "make"), FROM_TYPES, ids=[name for name, _, _ in FROM_TYPES])
def test_every_part_that_can_grow_takes_linear_time(
    peer: Peer, name: str, kind: type[Any], make: Callable[[int], Any]
) -> None:
    msgspec.convert(make(2), kind)  # so it is one
    check(peer, lambda count: framed(kind, make(count)))


def tables(count: int) -> Iterator[bytes]:
    """Tensor tables of ``count`` entries: separate tensors, views of one buffer, empty ones, false buffers."""
    plain = headers.Header(headers.STRIDED, torch.uint8, 0, headers.CPU, (1,), None, 0, 0, 1)
    yield headers.encode(count, [plain._replace(buffer=each) for each in range(count)], [1] * count)
    yield headers.encode(count, [plain] * count, [1])
    nothing = plain._replace(sizes=(0, 1), buffer=headers.NO_BUFFER, nbytes=0)
    yield headers.encode(count, [nothing] * count, [])
    yield headers.encode(1, [plain], [1] * count)
    yield headers.encode(count, [plain._replace(sizes=(1 << 62,) * 9)] * count, [1])


@pytest.mark.parametrize("place", range(5))
def test_tables_of_tensors(peer: Peer, place: int) -> None:
    def make(count: int) -> bytes:
        table = next(itertools.islice(tables(count // 4), place, None))
        payload = headers._COUNTS.unpack_from(table)[1]
        metadata = bytes(encode(call()))[HEADER.size :]
        return HEADER.pack(b"BH", 1, 1, len(metadata), len(table), payload) + metadata + table + bytes(payload)

    check(peer, make)


def test_maps_of_keys_that_collide(peer: Peer) -> None:
    """Written byte by byte, because making a dict of such keys would take as long as decoding it."""

    def make(count: int) -> bytes:
        pairs = b"".join(
            b"\x9e" + bytes(0xFF - (number >> bit & 1) for bit in range(14)) + b"\0" for number in range(count)
        )
        metadata = b"\x92\x07\xdf" + count.to_bytes(4, "big") + pairs
        return HEADER.pack(b"BH", 1, 1, len(metadata), 0, 0) + metadata

    check(peer, make)


def test_quadratic_cost_is_noticed(workers: InProcessCluster) -> None:
    class Slow(Peer):
        def cost(self, data: bytes) -> float:
            return 1e-9 * len(data) ** 2

    with pytest.raises(AssertionError, match="8 times as much takes 64 times as long"):
        check(Slow(workers), bytes)
