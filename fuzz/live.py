"""A live worker of a federation, and a lying peer whose messages are made from the bytes of an input.

The worker runs with all its threads, in this process. Its peer has a connection for each input. After each input the
worker must answer a ping or have cut the connection; it must answer a good peer; nothing else may have failed; and what
the worker keeps must be bounded. An input that ends the process is a finding as well.

Each step of a script is an operation and three operands, a byte each.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
for place in (HERE, HERE.parent / "tests" / "security", HERE.parent / "tests"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

import exposed  # noqa: E402 in a folder of the line above
import operator_cases  # noqa: E402
from liars import Liar, federation  # noqa: E402

from backhaul import rpc  # noqa: E402
from backhaul.errors import AuthenticationError, UnsendableError  # noqa: E402
from backhaul.ids import RefId, ShareId  # noqa: E402
from backhaul.testing import InProcessCluster  # noqa: E402
from backhaul.transport.base import ChannelClosed  # noqa: E402
from backhaul.trust import exposure  # noqa: E402
from backhaul.trust.operators import TABLE  # noqa: E402
from backhaul.trust.penalties import Penalties  # noqa: E402
from backhaul.wire import trees  # noqa: E402
from backhaul.wire.messages import (  # noqa: E402
    Call,
    Check,
    Create,
    Failed,
    Fetch,
    Gradients,
    Inquire,
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
    Sweep,
    Swept,
    TakePart,
    Unpin,
)
from backhaul.wire.values import Codec  # noqa: E402

ME = 2
STEP = 4
MAX_STEPS = 16
FRESH_AFTER = 300  # inputs for one group: later inputs find what earlier ones have left behind
_IDS = (0, 1, 2, -1, 1 << 62, (1 << 64) - 1, -(1 << 63), 7)

Say = Callable[[Any, list[torch.Tensor]], None]


class Broken(Exception):
    """The worker has broken a rule."""


class _Failures(logging.Handler):
    """Records failures of the worker itself, which it logs with a traceback."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(self.format(record))


class Live:
    """The group, made when it is first needed."""

    def __init__(self) -> None:
        self._workers: InProcessCluster | None = None
        self._failures = _Failures()
        self._inputs = 0
        self.numbers = itertools.count(1)
        self.sent: list[int] = []  # tensors that the worker has sent to the peer, by their ids
        self.context = 0
        self._exposed: dict[str, Any] = {}

    def workers(self) -> InProcessCluster:
        if self._workers is not None and self._inputs % FRESH_AFTER == 0:
            self.close()
        if self._workers is None:
            logging.getLogger("backhaul").addHandler(self._failures)
            self._exposed = dict(exposure.registry._entries)
            for operator in TABLE.values():
                rpc.expose(operator.function)
            self._workers = federation()
            agent = self._workers[0].agent
            agent.penalties, agent.permissions.refusals = Penalties(1 << 40, 1.0), Penalties(1 << 40, 1.0)
        self._inputs += 1
        return self._workers

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None
            exposure.registry._entries.clear()
            exposure.registry._entries.update(self._exposed)
            logging.getLogger("backhaul").removeHandler(self._failures)

    def play(self, data: bytes, step: Callable[[Live, Say, int, int, int, int], None], *, records: bool) -> None:
        """Send the messages of a script. With ``records``, the worker has recorded a tensor for the peer before."""
        workers = self.workers()
        peer = Liar(workers, ME)
        try:
            if records:
                self._record(peer)
            for start in range(0, min(len(data) - STEP, STEP * MAX_STEPS) + 1, STEP):
                step(self, lambda message, tensors: _say(peer, message, tensors), *data[start : start + STEP])
            ping = next(self.numbers) + (1 << 50)
            peer.send(Ping(ping))
            while getattr(peer.receive(), "id", None) != ping:
                pass
        except (ChannelClosed, AuthenticationError):
            pass
        finally:
            peer.close()
        if workers[1].rpc_sync("worker0", exposed.double, (21,), timeout=20) != 42:
            raise Broken("the good peer got a wrong answer")
        self._check(workers)

    def _record(self, peer: Liar) -> None:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        self.context = (ME << 48) + 1000 * next(self.numbers)
        mark = Mark(self.context, self.context + 1)
        answer = peer.call("exposed:weigh", [trees.TENSOR, 0], tensors=[x], mark=mark)
        found = getattr(answer, "mark", None)
        self.sent = [] if found is None else [found.message]

    def _check(self, workers: InProcessCluster) -> None:
        found, self._failures.found = self._failures.found, []
        if found:
            raise Broken(found[0])
        gradient = exposed.weight.grad
        if gradient is not None and (gradient.shape != (3,) or gradient.dtype is not torch.float64):
            raise Broken(f"a gradient of {gradient.dtype}{list(gradient.shape)}")
        exposed.weight.grad = None
        victim = workers[0]
        if victim.autograd.counts()["passes"] > 256 * 64:
            raise Broken("passes without end")
        for record in victim.autograd.contexts:
            if len(record.aborted) > 512 or len(record.passes) > 256:
                raise Broken(f"a context with {len(record.passes)} passes")
        counts = victim.references.counts()
        if counts["used"] > 10_000 or counts["owned"] > 20_000:
            raise Broken(f"references without end: {counts}")


def _say(peer: Liar, message: Any, tensors: list[torch.Tensor]) -> None:
    with contextlib.suppress(UnsendableError):  # a value that no frame can carry
        peer.send(message, tensors)


live = Live()


# The messages of each target's steps.


def _tensors() -> list[torch.Tensor]:
    return [
        torch.ones(3, dtype=torch.float64),
        torch.ones(3),
        torch.ones(3, dtype=torch.uint8),
        torch.ones((), dtype=torch.float64).expand(3),
        torch.ones(1, dtype=torch.float64).expand(1 << 20),
        torch.ones(0, dtype=torch.float64),
        torch.full((3,), torch.nan, dtype=torch.float64),
        torch.ones(3, dtype=torch.float64).to_sparse(),
        torch.ones(3, dtype=torch.float64, requires_grad=True),
        torch.nn.Parameter(torch.ones(3, dtype=torch.float64)),
        torch.ones(3, dtype=torch.float64, device="meta"),
        torch.ones(1, 3, dtype=torch.float64),
        torch.arange(6, dtype=torch.float64)[::2],
    ]


def _pass(me: Live, a: int, b: int) -> Pass:
    starter = a % 4
    context = me.context if a & 4 else _IDS[a // 8 % len(_IDS)]
    id = ((starter << 48) + b % 32 + 1) if a & 128 else _IDS[b % len(_IDS)]
    return Pass(id, context, id if b & 64 else 0, bool(b & 128), bool(b & 32))


def _source(me: Live, a: int) -> int:
    return me.sent[a // 2 % len(me.sent)] if me.sent and a & 1 else _IDS[a // 2 % len(_IDS)]


def _gradient_step(me: Live, say: Say, operation: int, a: int, b: int, c: int) -> None:
    known = _tensors()
    count = operation % 4
    sources = tuple(_source(me, c + 2 * place) if operation & 8 else _source(me, c) for place in range(count))
    tensors = [known[(b + place) % len(known)] for place in range(operation // 4 % 3)]
    present = tuple(range(len(tensors))) if operation & 16 else tuple(_IDS[(c + each) % 8] for each in range(count))
    consumed = (_source(me, b),) if operation & 32 else ()
    say(Gradients(_pass(me, a | 4, b), sources, present, consumed, sources if operation & 64 else ()), tensors)


def _context_step(me: Live, say: Say, operation: int, a: int, b: int, c: int) -> None:
    backward = _pass(me, a, b)
    sources = tuple(_source(me, c + each) for each in range(c % 4))
    id = next(me.numbers)
    context = me.context if a & 1 else _IDS[b % len(_IDS)]
    tree = [trees.TUPLE, [trees.NAMED, "exposed:weigh"], [trees.TUPLE, [trees.TENSOR, 0]], {}]
    mark = Mark(context, (ME << 48) + c if c & 1 else _IDS[c // 2 % 8], bool(a & 2), ((1, 2),) if a & 4 else None)
    said: list[tuple[Any, list[torch.Tensor]]] = [
        (TakePart(backward, sources), []),
        (Resolve(backward), []),
        (Resolved(backward), []),
        (Report(backward, bool(c & 4), sources, sources[:1]), []),
        (Failed(backward, "x" * c, "builtins.ValueError", "y" * c, "", None, ()), []),
        (Check(id, backward, _IDS[c % 8]), []),
        (Leave(context), []),
        (Inquire(id, (context, *sources)), []),
        (Call(id, tree, (), mark), [_tensors()[c % 13]]),
        (Gradients(backward, sources, tuple(range(len(sources)))), [_tensors()[0]] * len(sources)),
    ]
    say(*said[operation % len(said)])


def _notice_step(me: Live, say: Say, operation: int, a: int, b: int, c: int) -> None:
    rank = (0, 1, 2, 3, -1, 1 << 62, (1 << 64) - 1, 2)
    ref = RefId(rank[a % 8], rank[a // 8 % 8], _IDS[b % 8])
    share = ShareId(rank[c % 8], _IDS[c // 8 % 8])
    id = next(me.numbers)
    tree = [trees.TUPLE, [trees.NAMED, "exposed:give"], [trees.TUPLE, 1], {}]
    kinds: list[Any] = [
        Register(ref),
        Registered(ref, bool(b & 8)),
        Unpin(share),
        Release(ref),
        Sweep((a, b)),
        Swept((a, b)),
        Recall((share,) * (b % 5)),
    ]
    said: list[Any] = [
        Notices(id, b % 3, _IDS[c % 8] if c & 128 else id, (kinds[operation // 4 % 7], kinds[a % 7])),
        Call(id, tree, ((ref, share),) * (1 + b % 3)),
        Create(id, RefId(0, ME, id) if b & 1 else ref, tree, ((ref, share),) if b & 2 else ()),
        Fetch(id, ref, None),
    ]
    say(said[operation % len(said)], [])


_codec = Codec(bounded=True)


def _operator_step(me: Live, say: Say, operation: int, a: int, b: int, c: int) -> None:
    name, args, kwargs = operator_cases.case(operation << 24 | a << 16 | b << 8 | c)
    try:
        tree, packing = _codec.pack((tuple(args), kwargs))
    except UnsendableError:
        return
    function = [trees.NAMED, f"torch:{name}"]
    say(Call(next(me.numbers), [trees.TUPLE, function, *tree[1:]]), packing.tensors)


def gradients(data: bytes) -> None:
    """Correct and wrong gradients, for a tensor that was sent to the peer and for others."""
    live.play(data, _gradient_step, records=True)


def contexts(data: bytes) -> None:
    """All other messages about contexts and passes, those of the peer and those of others."""
    live.play(data, _context_step, records=True)


def notices(data: bytes) -> None:
    """Notices about references, and requests that bring or name references."""
    live.play(data, _notice_step, records=False)


def operators(data: bytes) -> None:
    """Calls of exposed operators, with arguments from `operator_cases`."""
    live.play(data, _operator_step, records=False)


def seeds() -> Iterator[bytes]:
    """Scripts with messages of each kind."""
    yield b""
    for operation in range(0, 64, 3):
        yield bytes((operation, 132, 1, 1)) * 2
        yield bytes((operation, 5, operation, 3, operation + 1, 200, 66, 17))
