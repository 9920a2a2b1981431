"""Parcel: one worker's recording as blocks of bytes, made and read piece by piece.

A recording may have a million rows. Encoding them in one go would hold the GIL for seconds, and a worker that answers
nothing for so long counts as lost. So no block has more than a few thousand rows.

    block 0        msgpack of the head: small figures, and the threads without their rows
    other blocks   msgpack of (kind, data):  ROWS       number of a thread, and some of its rows
                                             OPERATORS  operators
                                             KINETO     bytes of Kineto's own trace
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec

BLOCK_ROWS = 5_000
BLOCK_BYTES = 8 * 1024 * 1024

ROWS, OPERATORS, KINETO = 0, 1, 2

_encode = msgspec.msgpack.encode


def pack(
    head: dict[str, Any], threads: Sequence[dict[str, Any]], operators: Iterable[dict[str, Any]], kineto: bytes
) -> list[bytes]:
    """The blocks of a recording."""
    names = [{key: value for key, value in thread.items() if key != "rows"} for thread in threads]
    blocks = [_encode({**head, "threads": names})]
    for number, thread in enumerate(threads):
        blocks += [_encode((ROWS, (number, rows))) for rows in _slices(thread["rows"])]
    blocks += [_encode((OPERATORS, rows)) for rows in _slices(operators)]
    blocks += [_encode((KINETO, kineto[at : at + BLOCK_BYTES])) for at in range(0, len(kineto), BLOCK_BYTES)]
    return blocks


def unpack(blocks: Iterable[bytes]) -> dict[str, Any]:
    """The head, with ``rows`` in its threads, ``operators``, and ``kineto`` as text."""
    each = iter(blocks)
    found: dict[str, Any] = msgspec.msgpack.decode(next(each))
    for thread in found["threads"]:
        thread["rows"] = []
    operators: list[dict[str, Any]] = []
    kineto: list[bytes] = []
    for block in each:
        kind, data = msgspec.msgpack.decode(block)
        if kind == ROWS:
            number, rows = data
            found["threads"][number]["rows"] += rows
        elif kind == OPERATORS:
            operators += data
        else:
            kineto.append(data)
    return {**found, "operators": operators, "kineto": b"".join(kineto).decode(errors="replace")}


def _slices(rows: Iterable[Any]) -> Iterator[list[Any]]:
    each = iter(rows)
    while part := list(islice(each, BLOCK_ROWS)):
        yield part


# Global to the process, because its workers share the garbage collector.
_lock = threading.Lock()
_pauses = 0  # pauses that have begun and not ended
_was_on = False  # before the first pause


@contextmanager
def collector_paused() -> Iterator[None]:
    """A context in which Python's garbage collector does not run by itself.

    Torch makes an object for each operator and keeps all of them. The collector would scan these again and
    again while holding the GIL: for 2.5 s at a time with 300,000 operators.
    """
    global _pauses, _was_on
    with _lock:
        if _pauses == 0:
            _was_on = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_on:
                gc.enable()
