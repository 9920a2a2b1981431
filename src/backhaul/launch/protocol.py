"""The messages between the launcher and the steward of a host, over the two pipes of one ssh connection. No I/O.

::

    launcher                                  steward, on the host
      first line: JSON, where to find us  ──>   (`ssh.BOOT` reads it)
                                          <──   MARK, after whatever the host's shell printed; Hello
      Setup: key, environment, directory  ──>
                                          <──   Ready, or Refused
      Listen, at the first host           ──>   Listening: the port on which the group will meet
      Reach, at every host                ──>   Reached: whether it can be reached from there, and from which address
      Start, for each worker              ──>   Started; Output …; Ended: how; Over: its whole process group is gone
      Stop: a signal to all workers       ──>   SIGKILL follows
      Signal: one for their programs      ──>
      News: how a worker has ended        ──>   told to the workers of this host
      Grant                               <──   Ask, again and again (`lease`)
      Credit: output that was written     ──>   bounds what is under way
      end of input                        ──>   the launcher is gone: all workers are killed

After the mark come frames: a length of 4 bytes, big-endian, and that many bytes of msgpack. The two
pipes are as trusted as ssh: anyone who can write to them can run any program as that user anyway.
"""

from __future__ import annotations

from typing import Any

import msgspec

from backhaul.errors import ProtocolError

VERSION = 2
MARK = b"\0backhaul steward\0"
"""Precedes the first frame. Everything before it is output of the host's shell."""

WINDOW = 1 << 18
"""Bytes of output that a steward may have in flight."""
CHUNK = 1 << 15
"""The most output in one frame."""

_LARGEST = 1 << 24
_LENGTH_BYTES = 4


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class Setup(Message, frozen=True):
    host: str
    """The launcher's name for this host."""
    environment: dict[str, str]
    """Variables for all workers, the key among them."""
    workdir: str
    script: str | None
    """The script that must exist on the host; None for a module."""
    lease: float


class Listen(Message, frozen=True):
    address: str
    port: int


class Reach(Message, frozen=True):
    address: str
    port: int
    seconds: float


class Start(Message, frozen=True):
    rank: int
    name: str
    argv: list[str]
    environment: dict[str, str]


class Stop(Message, frozen=True):
    signum: int
    grace: float


class Signal(Message, frozen=True):
    signum: int


class Grant(Message, frozen=True):
    number: int


class Credit(Message, frozen=True):
    size: int


class News(Message, frozen=True):
    process: str
    ending: str
    replaced: bool


class Hello(Message, frozen=True):
    protocol: int
    version: str
    address: str
    """The host's own address on the ssh connection; empty if there is none."""


class Ready(Message, frozen=True):
    pass


class Refused(Message, frozen=True):
    reason: str


class Listening(Message, frozen=True):
    port: int
    error: str = ""


class Reached(Message, frozen=True):
    own_address: str
    """This host's address on the route to it."""
    error: str = ""


class Started(Message, frozen=True):
    rank: int
    pid: int
    process: str


class Output(Message, frozen=True):
    rank: int
    stream: int
    data: bytes
    """Empty at the end of the stream."""


class Ended(Message, frozen=True):
    rank: int
    returncode: int
    ending: str


class Over(Message, frozen=True):
    rank: int


class Ask(Message, frozen=True):
    number: int


ToSteward = Setup | Listen | Reach | Start | Stop | Signal | Grant | Credit | News
ToLauncher = Hello | Ready | Refused | Listening | Reached | Started | Output | Ended | Over | Ask

_encode = msgspec.msgpack.Encoder().encode


def frame(message: Message) -> bytes:
    data = _encode(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


class Reader:
    """Bytes -> messages of one kind. Raises `ProtocolError` for other bytes."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        found: list[Message] = []
        while len(self._buffer) >= _LENGTH_BYTES:
            length = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if length > _LARGEST:
                raise ProtocolError(f"a frame of {length} bytes is too large")
            end = _LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            try:
                found.append(self._decode(self._buffer[_LENGTH_BYTES:end]))
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"a frame cannot be read: {error}") from None
            del self._buffer[:end]
        return found


class StewardReader:
    """A host's bytes -> messages. Keeps the shell's output before the mark apart."""

    def __init__(self) -> None:
        self.noise = b""
        self.greeted = False
        self._reader = Reader(ToLauncher)

    def feed(self, data: bytes) -> list[Message]:
        if self.greeted:
            return self._reader.feed(data)
        before, mark, rest = (self.noise + data).partition(MARK)
        self.noise = before if mark else before[-_LARGEST:]
        self.greeted = bool(mark)
        return self._reader.feed(rest) if mark else []
