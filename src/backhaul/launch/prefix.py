"""The worker's name in front of every line that it prints.

Everything is bytes: a worker's output need not be text, and passes unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import IO

Write = Callable[[bytes], None]

OUT, ERR = 1, 2

# A line without an end is cut at this length, so that memory stays bounded.
_LONGEST_LINE = 1 << 16

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)


def prefix(name: str, index: int, colour: bool) -> bytes:
    """``[name] ``; coloured by ``index`` if ``colour``."""
    plain = f"[{name}] "
    return f"\x1b[{_COLOURS[index % len(_COLOURS)]}m{plain}\x1b[0m".encode() if colour else plain.encode()


def wants_colour(stream: IO[str], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``stream`` is a terminal and NO_COLOR is not set."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and stream.isatty()


class LinePrefixer:
    """Turns chunks of one stream into whole lines, each with the prefix."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def finish(self) -> bytes:
        """The last line, if it has no line end."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""


class PrefixedOutput:
    """Writes the output of many workers so that lines stay whole.

    Call it with the worker's name and index, the stream and a chunk of bytes; an empty
    chunk is the stream's end. Not thread-safe: one thread carries the output.
    """

    def __init__(self, out: Write, err: Write, colour_out: bool = False, colour_err: bool = False) -> None:
        self._write = {OUT: out, ERR: err}
        self._colour = {OUT: colour_out, ERR: colour_err}
        self._prefixers: dict[tuple[str, int], LinePrefixer] = {}

    def __call__(self, name: str, index: int, stream: int, data: bytes) -> None:
        key = name, stream
        if key not in self._prefixers:
            self._prefixers[key] = LinePrefixer(prefix(name, index, self._colour[stream]))
        lines = self._prefixers[key].feed(data) if data else self._prefixers.pop(key).finish()
        if lines:
            self._write[stream](lines)


def prefixed_output(out: Write, err: Write, *, colour: bool = True) -> PrefixedOutput:
    """Output to the standard output and error of this process. ``colour``: with colours where they are terminals."""
    return PrefixedOutput(out, err, colour and wants_colour(sys.stdout), colour and wants_colour(sys.stderr))
