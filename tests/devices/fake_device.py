"""A device without a GPU: streams, events and memory that fail when something is used before its event.

Work is enqueued on streams, and done later, in an order that a seed chooses: any order that streams and events allow.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


class Race(AssertionError):
    """Two copies without an order between them use the same memory."""


@dataclass
class _Work:
    do: Callable[[], None] | None
    needs: list[_Work] = field(default_factory=list)
    done: bool = False


class FakeDevice:
    """A `devices.discipline.Device`. Memory is given by number; each piece holds one value."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: dict[int, deque[_Work]] = {}
        self._recorded: dict[int, _Work] = {}
        self.memory: dict[int, object] = {}
        self._history: list[tuple[int, bool, _Work]] = []  # (memory, whether it is written, the work)
        self._before: dict[int, _Work] = {}  # the last work of each stream

    def _enqueue(self, stream: int, do: Callable[[], None] | None, *uses: tuple[int, bool]) -> _Work:
        work = _Work(do)
        last = self._before.get(stream)
        if last is not None:
            work.needs.append(last)
        self._before[stream] = work
        self._streams.setdefault(stream, deque()).append(work)
        for memory, writes in uses:
            for other_memory, other_writes, other in self._history:
                if memory == other_memory and (writes or other_writes) and not _is_after(work, other):
                    raise Race(f"memory {memory} is used by two copies that nothing keeps in order")
            self._history.append((memory, writes, work))
        return work

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        def do() -> None:
            self.memory[target] = self.memory.get(source)

        self._enqueue(stream, do, (source, False), (target, True))

    def record(self, event: int, stream: int) -> None:
        self._recorded[event] = self._enqueue(stream, None)

    def wait(self, event: int, stream: int) -> None:
        work = self._enqueue(stream, None)
        recorded = self._recorded.get(event)
        if recorded is not None:
            work.needs.append(recorded)

    def write(self, memory: int, value: object, stream: int) -> None:
        """A user's operation that writes memory."""
        self._enqueue(stream, lambda: self.memory.__setitem__(memory, value), (memory, True))

    def run(self) -> None:
        """Do all enqueued work."""
        while any(self._streams.values()):
            ready = [queue for queue in self._streams.values() if queue and all(need.done for need in queue[0].needs)]
            if not ready:
                raise AssertionError("streams wait for each other")
            work = self._random.choice(ready).popleft()
            if work.do is not None:
                work.do()
            work.done = True


def _is_after(work: _Work, other: _Work) -> bool:
    seen: set[int] = set()
    todo = [work]
    while todo:
        each = todo.pop()
        if each is other:
            return True
        if id(each) not in seen:
            seen.add(id(each))
            todo += each.needs
    return False
