"""Both ends of a channel that shares segments, in one process, and functions that inspect them."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transport_group import SOON, receive, run, send

from backhaul.options import RpcOptions
from backhaul.transport import segments
from backhaul.transport.segments import Borrowing, Budget, Lending
from backhaul.transport.stream import StreamChannel
from backhaul.wire.frames import encode, place
from backhaul.wire.messages import Ping
from backhaul.wire.tensors import view_of

MiB = 1 << 20
PLENTY = 512 * MiB


class Link:
    """A channel from ``near`` to ``far``. The budget belongs to ``near``."""

    def __init__(self, size: int = PLENTY, budget: Budget | None = None, family: int = socket.AF_UNIX) -> None:
        self.budget = Budget(size) if budget is None else budget
        one, other = socket.socketpair() if family == socket.AF_UNIX else tcp_pair()
        self.near = StreamChannel(one, RpcOptions(), self.budget)
        self.far = StreamChannel(other, RpcOptions(), Budget(PLENTY))

    @property
    def lending(self) -> Lending:
        assert self.near._lending is not None
        return self.near._lending

    @property
    def borrowing(self) -> Borrowing:
        assert self.far._borrowing is not None
        return self.far._borrowing

    @property
    def passed(self) -> int:
        """The number of received descriptors."""
        return self.borrowing._count

    def trip(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        got: list[torch.Tensor] = []
        run(lambda: send(self.near, Ping(1), tensors), lambda: got.extend(receive(self.far).tensors))
        return got

    def expect(self, size: int) -> None:
        """Send a first buffer, because the first buffer of a size goes through the stream."""
        self.trip(torch.zeros(size, dtype=torch.uint8))

    def raw(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send bytes, with descriptors along with the first byte, as a bad peer may do."""
        beside: list[Any] = []
        if descriptors:
            beside.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)))
        assert self.near._socket.sendmsg([data], beside) == len(data)

    def close(self) -> None:
        self.near.close()
        self.far.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), SOON)
        other, _ = server.accept()
    one.settimeout(None)
    return one, other


def numbered(number: int, size: int = MiB) -> torch.Tensor:
    """Bytes that show their message and their place in it."""
    return (torch.arange(size // 8) * 7919 + number).view(torch.uint8)


def data_of(tensor: torch.Tensor) -> bytes:
    return bytes(view_of(tensor, tensor.nbytes))


def in_segment(tensor: torch.Tensor) -> bool:
    place = tensor.untyped_storage().data_ptr()
    return any(lease.address <= place < lease.address + lease.size for lease in segments._living())


def resident() -> int:
    """The bytes of memory that segments take in this process. Memory that is mapped twice counts once."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):
            ours = "memfd:backhaul" in line
        elif ours and line.startswith("Pss:"):
            total += int(line.split()[1]) * 1024
    return total


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memfd(size: int, seals: int = segments._SEALS) -> int:
    made = os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(made, size)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def placed_frame(tensors: Sequence[torch.Tensor], ids: Sequence[int]) -> bytes:
    """A message whose buffers are said to be in these segments."""
    return bytes(place(encode(Ping(1), tensors), ids))
