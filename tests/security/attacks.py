"""Attacks of a hostile member of a federation, and what they cost a good member: figures for each attack.

    PYTHONPATH=tests python tests/security/attacks.py [--seconds 30] [attack ...]

The attacked worker and the good peer are processes, with default quotas over TLS. During the attack, the good peer
calls all the time. For each attack this prints and requires: the good peer's 99th percentile before and during the
attack (less than three times as much), the most memory that the attacked worker has taken (less than the quota of a
message plus 64 MiB), and the threads that are left (none).
"""

from __future__ import annotations

import argparse
import contextlib
import ssl
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import exposed
import torch
from intruder import INTRUDER, Besieged, MiB, watch
from key_updates import KeyUpdates
from mallory import NAMED, TENSOR, TUPLE, Mallory, ask_federation, give, hold, set_up_federation

from backhaul import rpc
from backhaul.agent.serving import _MAX_CONNECTIONS
from backhaul.errors import BackhaulError
from backhaul.ids import RefId, ShareId
from backhaul.options import Quotas
from backhaul.wire import trees
from backhaul.wire.frames import HEADER, encode
from backhaul.wire.messages import Call, Gradients, Mark, Notices, Pass, Recall, Tally
from mint import Mint

ROOM = 64 * MiB
SLOWER = 3.0
SPARE_THREADS = 16  # threads that a pool keeps

Stop = Callable[[], bool]


class Intruder:
    """A member that connects again whenever its connection is cut."""

    def __init__(self, besieged: Besieged, context: ssl.SSLContext, stop: Stop) -> None:
        self.besieged = besieged
        self.context = context
        self.stop = stop
        self.cut = 0
        self.numbers = iter(range(1, 1 << 60))

    def on_each_line(self, attack: Callable[[Mallory], None]) -> None:
        """Attack on one connection after the other until the time is up. Each lasts until it is cut, or to the end."""
        while not self.stop():
            try:
                line = Mallory(self.besieged, self.context)
            except (BackhaulError, OSError, AssertionError):  # it must wait before it is admitted again
                time.sleep(0.02)
                continue
            try:
                attack(line)
            except (OSError, AssertionError):
                self.cut += 1
            finally:
                with contextlib.suppress(OSError):
                    line.close()

    def repeat(self, *messages: tuple[Any, list[torch.Tensor]]) -> None:
        """Send these messages over and over. Answers are ignored."""
        frames = [bytes(encode(message, tensors)) for message, tensors in messages]

        def attack(line: Mallory) -> None:
            while not self.stop():
                for frame in frames:
                    line.tls.sendall(frame)
                    answer(line)

        self.on_each_line(attack)


def answer(line: Mallory) -> Any:
    """The next message. Raises an error if the connection was cut."""
    found = line.line.answer(within=5)
    assert found is not None, "it was cut off"
    return found


def call(name: str, *args: Any, kwargs: Any = None, mark: Mark | None = None) -> Call:
    return Call(7, [TUPLE, [NAMED, name], [TUPLE, *args], [trees.DICT, *(kwargs or ())]], (), mark)


# The attacks.


def ends_the_process(intruder: Intruder) -> None:
    """Operators with arguments that would raise a signal."""
    smallest, minus_one = torch.tensor([-(2**63)]), torch.tensor([-1])
    two = ([TENSOR, 0], [TENSOR, 1])
    intruder.repeat(
        (call("torch:div", *two, kwargs=("rounding_mode", "trunc")), [smallest, minus_one]),
        (call("torch:floor_divide", *two), [smallest, minus_one]),
        (call("torch:remainder", *two), [smallest, minus_one]),
        (call("torch:add", *two), [smallest, minus_one]),
    )


def colliding_maps(intruder: Intruder) -> None:
    """464 KB of keys with one hash, as keys of a map, which would be hashed while they are decoded."""
    keys = [bytes(0xFF - (number >> bit & 1) for bit in range(15)) for number in range(29_000)]
    pairs = b"".join(b"\x9f" + key + b"\0" for key in keys)
    tree = b"\x94\x01\x92\x1a\xacexposed:echo\x92\x01\xdf" + len(keys).to_bytes(4, "big") + pairs + b"\x80"
    data = HEADER.pack(b"BH", 1, 1, len(tree) + 2, 0, 0) + b"\x92\x07" + tree

    def attack(line: Mallory) -> None:
        line.tls.sendall(data)
        answer(line)

    intruder.on_each_line(attack)


def colliding_keys(intruder: Intruder) -> None:
    """The same keys, in sets and dicts."""
    keys = [[TUPLE, *(-1 - (number >> bit & 1) for bit in range(15))] for number in range(4000)]
    intruder.repeat(
        (call("exposed:echo", [trees.SET, *keys]), []),
        (call("exposed:echo", [trees.DICT, *(part for key in keys for part in (key, 1))]), []),
    )


def unconfirmed_shares(intruder: Intruder) -> None:
    """The attacker's own references, sent again and again and never confirmed by it; and recalls of all of them."""
    ref = RefId(INTRUDER, INTRUDER, 1)

    def attack(line: Mallory) -> None:
        while not intruder.stop():
            shares = [ShareId(INTRUDER, next(intruder.numbers)) for _ in range(5000)]
            refs = tuple((ref, share) for share in shares)
            line.send(Call(7, [TUPLE, [NAMED, "exposed:double"], [TUPLE, 1], {}], refs))
            answer(line)
            line.send(Notices(8, 1, next(intruder.numbers), tuple(Recall((share,)) for share in shares)))
            answer(line)

    intruder.on_each_line(attack)


def bombs_by_shape(intruder: Intruder) -> None:
    """Tensors of no bytes with huge shapes: those that are refused, and the largest that are not."""
    allowed = torch.empty(0, 1 << 24)
    corner = torch.zeros(2, 1, dtype=torch.int64)
    wide = torch.sparse_coo_tensor(corner, torch.ones(1), (1, 1 << 24), check_invariants=True)
    intruder.repeat(
        (call("torch:sum", [TENSOR, 0], 0), [allowed]),
        (call("exposed:add_up", [TENSOR, 0]), [allowed]),
        (call("exposed:double", [TENSOR, 0]), [wide]),
        (call("torch:sum", [TENSOR, 0], 0), [torch.empty(0, 1 << 29)]),
    )


def gradients(intruder: Intruder) -> None:
    """Gradients for a tensor of three numbers: 16 MiB of bytes, and one number that claims to be a million rows."""
    large, expanded = torch.zeros(16 * MiB, dtype=torch.uint8), torch.ones(1).expand(1 << 20, 3)

    def attack(line: Mallory) -> None:
        context = (INTRUDER << 48) + 100 * next(intruder.numbers)
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        line.send(call("exposed:weigh", [TENSOR, 0], mark=Mark(context, context + 1)), [x])
        sent = answer(line)
        for number in range(context + 2, context + 90):
            backward = Pass(number, context, number, False, False)
            gradient = large if number % 8 == 0 else expanded
            line.send(Gradients(backward, (sent.mark.message,), (0,)), [gradient])
            line.send(call("exposed:double", 1))
            while getattr(answer(line), "id", None) != 7:
                pass
            if intruder.stop():
                return

    intruder.on_each_line(attack)


def unread_replies(intruder: Intruder) -> None:
    """200 calls whose replies have 8 MiB each, read at 48 KiB per second."""
    _read_slowly(intruder, "exposed:much")


def unread_coroutines(intruder: Intruder) -> None:
    """The same with coroutines, whose replies are made on one shared thread."""
    _read_slowly(intruder, "exposed:much_later")


def unread_connections(intruder: Intruder) -> None:
    """The same over as many connections as a peer may have, of which it reads none."""

    def attack(first: Mallory) -> None:
        with contextlib.ExitStack() as stack:
            lines = [first]
            for _ in range(_MAX_CONNECTIONS - 1):
                lines.append(Mallory(intruder.besieged, intruder.context))
                stack.callback(lines[-1].close)
            for number in range(200):
                line = lines[number % len(lines)]
                line.send(Call(number + 1, [TUPLE, [NAMED, "exposed:much"], [TUPLE, 8 * MiB], {}]))
            while not intruder.stop():
                time.sleep(0.1)

    intruder.on_each_line(attack)


def _read_slowly(intruder: Intruder, function: str) -> None:
    def attack(line: Mallory) -> None:
        for number in range(200):
            line.send(Call(number + 1, [TUPLE, [NAMED, function], [TUPLE, 8 * MiB], {}]))
        while not intruder.stop():
            assert line.tls.recv(4800), "it was cut off"
            time.sleep(0.1)

    intruder.on_each_line(attack)


def lying_values(intruder: Intruder) -> None:
    """Instances of exposed classes with impossible contents, and countless flags."""
    bad = [trees.DATACLASS, "exposed:Point", "x", "not a number", "y", 7]
    flags = [call("exposed:echo", [trees.FLAG, "exposed:Rights", number]) for number in range(100, 200)]
    intruder.repeat((call("exposed:echo", bad), []), *((flag, []) for flag in flags))


def tallies(intruder: Intruder) -> None:
    """Questions about how often others call."""

    def attack(line: Mallory) -> None:
        while not intruder.stop():
            line.send(Tally(7))
            _, sent, _ = answer(line).tree[1:]
            if sent != {}:
                raise ValueError(f"it tells {sent}")
            time.sleep(0.001)

    intruder.on_each_line(attack)


def key_updates(intruder: Intruder) -> None:
    """A flood of requests for new keys."""
    with tempfile.TemporaryDirectory() as directory:
        keylog = Path(directory) / "keys"
        intruder.context.keylog_filename = str(keylog)

        def attack(line: Mallory) -> None:
            with line.raw() as raw:
                updates = KeyUpdates(raw, keylog, 1)  # the greeting is one record
                while not intruder.stop():
                    updates.send(1000)

        intruder.on_each_line(attack)


ATTACKS: dict[str, Callable[[Intruder], None]] = {
    attack.__name__: attack
    for attack in (
        ends_the_process,
        colliding_maps,
        colliding_keys,
        unconfirmed_shares,
        bombs_by_shape,
        gradients,
        unread_replies,
        unread_coroutines,
        unread_connections,
        lying_values,
        tallies,
        key_updates,
    )
}


# In the good peer.


def latencies(seconds: float) -> list[float]:
    """The latencies in seconds, sorted, of calls that alternate between a function and a coroutine."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        assert rpc.rpc_sync("worker0", exposed.double, (21,), timeout=60) == 42
        between = time.perf_counter()
        assert rpc.rpc_sync("worker0", exposed.echo_later, (21,), timeout=60) == 21
        found += between - began, time.perf_counter() - between
        time.sleep(0.002)
    return sorted(found)


# The figures.


class Figures(NamedTuple):
    attack: str
    quiet: float
    """The good peer's 99th percentile, in seconds; also the next field."""
    attacked: float
    calls: int
    grown: int
    """Bytes."""
    left: int
    """Threads."""
    alive: bool
    cut: int
    """How often the intruder's connection was cut."""

    @property
    def wrong(self) -> str:
        if not self.alive:
            return "it is dead"
        if self.grown > Quotas().message_bytes + ROOM:
            return "memory"
        if self.left > 0:
            return "threads"
        return "slower" if self.attacked > SLOWER * self.quiet else ""

    def line(self) -> str:
        return (
            f"{self.attack:<20}{self.quiet * 1e3:>9.2f}{self.attacked * 1e3:>13.2f}{self.attacked / self.quiet:>8.1f}"
            f"{self.calls:>8}{self.grown / MiB:>11.1f}{self.left:>9}{self.cut:>6}  {self.wrong or 'good'}"
        )


HEAD = (
    f"{'attack':<20}{'quiet ms':>9}{'attacked ms':>13}{'ratio':>8}{'calls':>8}{'grown MiB':>11}{'threads':>9}{'cut':>6}"
)


def p99(found: list[float]) -> float:
    return found[min(len(found) - 1, int(len(found) * 0.99))]


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * 4096


def _threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def run(besieged: Besieged, context: ssl.SSLContext, name: str, seconds: float) -> Figures:
    """Attack for ``seconds``."""
    besieged.victim.run(watch)
    quiet = p99(besieged.peer.run(latencies, min(10.0, max(0.2, seconds)), timeout=seconds + 60))
    before, threads = _resident(besieged.pid), _threads(besieged.pid)
    over = threading.Event()
    most = before
    errors: list[BaseException] = []
    intruder = Intruder(besieged, context, over.is_set)

    def attack() -> None:
        try:
            ATTACKS[name](intruder)
        except BaseException as error:
            errors.append(error)

    attacker = threading.Thread(target=attack, daemon=True)
    attacker.start()
    measured = besieged.peer.start(latencies, seconds)
    while not measured.done():
        most = max(most, _resident(besieged.pid))
        over.wait(0.01)
    attacked = measured.result(0)
    over.set()
    attacker.join(30)
    besieged.hang_up()
    if errors:
        raise errors[0]
    deadline = time.monotonic() + 15
    while (left := _threads(besieged.pid) - max(threads, SPARE_THREADS + 6)) > 0 and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = besieged.victim.process.is_alive() and besieged.peer.run(ask_federation) < 30
    return Figures(name, quiet, p99(attacked), len(attacked), most - before, max(0, left), alive, intruder.cut)


@contextlib.contextmanager
def members() -> Iterator[tuple[Besieged, ssl.SSLContext]]:
    with tempfile.TemporaryDirectory() as directory:
        mint = Mint(Path(directory))
        besieged = Besieged(
            lambda rank: {"tls": mint.tls(f"worker{rank}"), "trust": "federation"},
            setup=set_up_federation,
            ask=ask_federation,
        )
        try:
            besieged.peer.run(hold)
            besieged.peer.run(give)
            yield besieged, mint.tls("worker2").contexts()[1]
        finally:
            besieged.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"of {', '.join(ATTACKS)}; all without any")
    parser.add_argument("--seconds", type=float, default=30.0, help="that each attack goes on (default: 30)")
    options = parser.parse_args()
    unknown = [name for name in options.attacks if name not in ATTACKS]
    if unknown:
        parser.error(f"there is no attack {unknown[0]!r}")
    wrong = 0
    print(HEAD, flush=True)
    with members() as (besieged, context):
        for name in options.attacks or ATTACKS:
            figures = run(besieged, context, name, options.seconds)
            print(figures.line(), flush=True)
            wrong += bool(figures.wrong)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
