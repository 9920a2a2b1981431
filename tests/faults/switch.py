"""A switch between network namespaces that misbehaves on purpose, packet by packet.

Each namespace has a TUN device, and one process holds all of them. It reads packets, and delays, drops, reorders,
damages or throttles them, or answers them with a reset, as the settings of each *way* (from one host to another) say.
The kernels at both ends are real, so retransmission, keepalive and resets are those of TCP.

`Switch` starts that process and tells it what to do. A request is answered when it has taken effect.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import heapq
import itertools
import multiprocessing
import os
import random
import selectors
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from packets import ACK, RST, SYN, Flow, address, ends, read, reset, with_flipped_bit

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_LARGEST = 65535
_ANSWER_SECONDS = 30.0
_BATCH = 64

LARGE_MTU = 60_000
"""A large MTU needs fewer packets, because Python is slow."""


@dataclasses.dataclass(frozen=True)
class Way:
    """What happens to packets from one host to another."""

    cut: bool = False
    """Packets vanish."""
    refused: bool = False
    """Packets are answered with a reset, and vanish."""
    delay: float = 0.0
    jitter: float = 0.0
    """Each packet may take up to this much longer, so packets overtake each other."""
    loss: float = 0.0
    """The fraction of packets that vanish."""
    rate: float | None = None
    """Bytes per second."""
    queue: int = 256 << 10
    """The bytes that may queue if there is a rate; more vanish."""


Pair = tuple[int, int]


class _Device:
    """The end of a TUN device in the network namespace of a process."""

    def __init__(self, pid: int, address: str, mtu: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/proc/self/ns/net").open() as home, Path(f"/proc/{pid}/ns/net").open() as there:
            _enter(libc, there.fileno())
            try:
                self.descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(self.descriptor, _TUNSETIFF, struct.pack("16sH22x", b"cable", _IFF_TUN | _IFF_NO_PI))
                for command in (
                    f"ip address add {address}/24 dev cable",
                    f"ip link set cable mtu {mtu} txqueuelen 2000 up",
                ):
                    subprocess.run(command.split(), check=True)
            finally:
                _enter(libc, home.fileno())


def _enter(libc: ctypes.CDLL, namespace: int) -> None:
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class _Fabric:
    """The process: forwards packets until its pipe is closed."""

    def __init__(self, pipe: Connection, seed: int) -> None:
        self._pipe = pipe
        self._random = random.Random(seed)
        self._devices: list[_Device] = []
        self._hosts: dict[bytes, int] = {}
        self._ways: dict[Pair, Way] = {}
        self._free_at: dict[Pair, float] = {}  # the time at which the last byte of a throttled way is sent
        self._late: list[tuple[float, int, int, bytes]] = []  # due time, order, destination, packet
        self._order = itertools.count()
        self._expected: dict[Flow, int] = {}  # the next sequence number that the sender of this flow expects
        self._doomed: set[Flow] = set()
        self._flips: dict[Pair, list[tuple[int, int]]] = {}
        self._counts: Counter[str] = Counter()
        self._selector = selectors.DefaultSelector()
        self._selector.register(pipe, selectors.EVENT_READ)

    def run(self) -> None:
        while True:
            timeout = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._pipe:
                    try:
                        name, args = self._pipe.recv()
                    except EOFError:
                        return
                    self._pipe.send(getattr(self, f"on_{name}")(*args))
                else:
                    self._read(key.data)
            self._send_due()

    # What the test asks for.

    def on_plug(self, pid: int, text: str, mtu: int) -> None:
        device = _Device(pid, text, mtu)
        self._hosts[address(text)] = len(self._devices)
        self._selector.register(device.descriptor, selectors.EVENT_READ, len(self._devices))
        self._devices.append(device)

    def on_replug(self, rank: int, pid: int, text: str, mtu: int) -> None:
        """Replace the process of a host."""
        old = self._devices[rank]
        self._selector.unregister(old.descriptor)
        os.close(old.descriptor)
        self._devices[rank] = device = _Device(pid, text, mtu)
        self._selector.register(device.descriptor, selectors.EVENT_READ, rank)

    def on_change(self, pairs: list[Pair], changes: dict[str, Any]) -> None:
        for pair in pairs:
            self._ways[pair] = dataclasses.replace(self._ways.get(pair, Way()), **changes)

    def on_reset(self, pairs: list[Pair] | None) -> int:
        """End all connections between these hosts. Returns how many there were."""
        found = 0
        for flow, number in list(self._expected.items()):
            if flow in self._doomed or (pairs is not None and self._pair(flow) not in pairs):
                continue
            self._doomed.add(flow)
            self._send(self._hosts[flow.source], reset(flow.back, number))
            found += 1
        return found

    def on_flip(self, pair: Pair, skip: int, bit: int) -> None:
        """Invert one bit of the data of a packet, after ``skip`` others that have data."""
        self._flips.setdefault(pair, []).append((skip, bit))

    def on_counts(self) -> dict[str, int]:
        return dict(self._counts)

    # Packets.

    def _pair(self, flow: Flow) -> Pair:
        return self._hosts[flow.source], self._hosts[flow.target]

    def _read(self, rank: int) -> None:
        for _ in range(_BATCH):
            try:
                packet = os.read(self._devices[rank].descriptor, _LARGEST)
            except BlockingIOError:
                return
            found = ends(packet)
            if found is not None and found[1] in self._hosts:
                self._carry((rank, self._hosts[found[1]]), packet)

    def _carry(self, pair: Pair, packet: bytes) -> None:
        way = self._ways.get(pair, Way())
        segment = read(packet)
        if segment is not None:
            flow = segment.flow
            if segment.flags & SYN and not segment.flags & ACK:
                self._doomed -= {flow, flow.back}
            if way.refused or flow in self._doomed:
                self._counts["refused"] += 1
                if not segment.flags & RST:
                    self._refuse(pair[0], packet)
                return
            if segment.flags & ACK:
                self._expected[flow] = segment.acknowledged
            if segment.flags & RST:
                self._expected.pop(flow, None)
                self._expected.pop(flow.back, None)
            elif self._flips.get(pair) and len(packet) > segment.data:
                packet = self._flipped(pair, packet)
        if way.cut or (way.loss and self._random.random() < way.loss):
            self._counts["lost"] += 1
            return
        self._counts["carried"] += 1
        now = time.monotonic()
        due = now + way.delay + (self._random.random() * way.jitter if way.jitter else 0.0)
        if way.rate is not None:
            start = max(now, self._free_at.get(pair, 0.0))
            if (start - now) * way.rate > way.queue:
                self._counts["overflowed"] += 1
                return
            self._free_at[pair] = start + len(packet) / way.rate
            due += self._free_at[pair] - now
        if due <= now and not self._late:
            self._send(pair[1], packet)
        else:
            heapq.heappush(self._late, (due, next(self._order), pair[1], packet))

    def _flipped(self, pair: Pair, packet: bytes) -> bytes:
        skip, bit = self._flips[pair][0]
        segment = read(packet)
        assert segment is not None
        if skip:
            self._flips[pair][0] = skip - 1, bit
            return packet
        self._flips[pair].pop(0)
        self._counts["flipped"] += 1
        return with_flipped_bit(packet, segment, bit)

    def _refuse(self, to: int, packet: bytes) -> None:
        segment = read(packet)
        assert segment is not None
        if segment.flags & ACK:
            answer = reset(segment.flow.back, segment.acknowledged)
        else:
            answer = reset(segment.flow.back, 0, (segment.number + 1) % (1 << 32))
        self._send(to, answer)

    def _send(self, to: int, packet: bytes) -> None:
        try:
            os.write(self._devices[to].descriptor, packet)
        except OSError:  # its queue is full, or its host is gone
            self._counts["lost"] += 1

    def _send_due(self) -> None:
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, to, packet = heapq.heappop(self._late)
            self._send(to, packet)


def _serve(pipe: Connection, seed: int) -> None:
    _Fabric(pipe, seed).run()


class Switch:
    """See the module's docstring. Hosts are numbered in the order in which they are plugged in."""

    def __init__(self, seed: int = 0, mtu: int = LARGE_MTU) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._mtu = mtu
        self._size = 0

    def plug(self, pid: int, address: str) -> None:
        self._ask("plug", pid, address, self._mtu)
        self._size += 1

    def replug(self, rank: int, pid: int, address: str) -> None:
        self._ask("replug", rank, pid, address, self._mtu)

    def change(self, pairs: Iterable[Pair] | None = None, **changes: Any) -> None:
        """Change these ways, or all of them; see `Way`."""
        self._ask("change", self._all() if pairs is None else list(pairs), changes)

    def heal(self) -> None:
        """Reset all ways to their initial settings."""
        self.change(**dataclasses.asdict(Way()))

    def reset(self, pairs: Iterable[Pair] | None = None) -> int:
        return int(self._ask("reset", None if pairs is None else list(pairs)))

    def flip(self, pair: Pair, bit: int, skip: int = 0) -> None:
        self._ask("flip", pair, skip, bit)

    def counts(self) -> dict[str, int]:
        return dict(self._ask("counts"))

    def close(self) -> None:
        self._pipe.close()
        self._process.join()
        self._process.close()

    def _all(self) -> list[Pair]:
        return [(a, b) for a in range(self._size) for b in range(self._size) if a != b]

    def _ask(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        assert self._pipe.poll(_ANSWER_SECONDS), f"the switch does not answer: {name}{args}"
        return self._pipe.recv()


def both(a: int, b: int) -> list[Pair]:
    """The ways between two hosts."""
    return [(a, b), (b, a)]


def around(host: int, others: Iterable[int]) -> list[Pair]:
    """All ways from and to a host."""
    return [pair for other in others if other != host for pair in both(host, other)]
