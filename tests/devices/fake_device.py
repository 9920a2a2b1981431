"""A device without a GPU: streams, events and memory that fail when something is used before its event.

Work is enqueued on streams, and done later, in an order that a seed chooses: any order that streams and events allow.
`Race` does not depend on that order. It is raised when work is enqueued that some order would do too early.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


class Race(AssertionError):
    """Two pieces of work without an order between them use the same memory, or work finds a wrong value there."""


@dataclass
class _Work:
    do: Callable[[], None] | None
    stream: int
    number: int  # of the work of its stream
    needs: list[_Work]
    after: dict[int, int] = field(default_factory=dict)  # by stream: the number of the last work that this comes after
    done: bool = False

    def is_after(self, other: _Work) -> bool:
        return self.after.get(other.stream, 0) >= other.number


@dataclass
class _Block:
    """A piece of memory, as torch's allocator sees it."""

    stream: int  # where it was allocated
    users: set[int] = field(default_factory=set)  # other streams that use it, as far as the allocator knows
    awaited: list[_Work] = field(default_factory=list)  # what those had enqueued when it was freed


class FakeDevice:
    """A `devices.discipline.Device` and `HostDevice`. Memory is given by number; each piece holds one value."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._streams: dict[int, deque[_Work]] = {}
        self._last: dict[int, _Work] = {}  # of each stream
        self._recorded: dict[int, _Work] = {}
        self.memory: dict[int, object] = {}
        self._writer: dict[int, _Work] = {}
        self._readers: dict[int, list[_Work]] = {}  # since the last write
        self._blocks: dict[int, _Block] = {}
        self._free: list[int] = []
        self._addresses = itertools.count(1_000_000)

    def _enqueue(self, stream: int, do: Callable[[], None] | None, *uses: tuple[int, bool], after: int = 0) -> None:
        """``uses``: pieces of memory, and whether each is written. ``after``: the event that the work waits for."""
        last = self._last.get(stream)
        needs = [each for each in (last, self._recorded.get(after)) if each is not None]
        work = _Work(do, stream, 1 if last is None else last.number + 1, needs)
        for each in needs:
            for other, number in each.after.items():
                work.after[other] = max(number, work.after.get(other, 0))
        work.after[stream] = work.number
        self._last[stream] = work
        self._streams.setdefault(stream, deque()).append(work)
        for memory, writes in uses:
            writer = self._writer.get(memory)
            earlier = [] if writer is None else [writer]
            if writes:
                earlier += self._readers.get(memory, ())
            if not all(map(work.is_after, earlier)):
                raise Race(f"memory {memory} is used by two pieces of work that nothing keeps in order")
            if writes:
                self._writer[memory] = work
                self._readers[memory] = []
            else:
                self._readers.setdefault(memory, []).append(work)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        def do() -> None:
            self.memory[target] = self.memory.get(source)

        self._enqueue(stream, do, (source, False), (target, True))

    copy_to_host = copy

    def record(self, event: int, stream: int) -> None:
        self._enqueue(stream, None)
        self._recorded[event] = self._last[stream]

    def wait(self, event: int, stream: int) -> None:
        self._enqueue(stream, None, after=event)

    def is_over(self, event: int) -> bool:
        return event not in self._recorded or self._recorded[event].done

    # What the user's operations and torch do.

    def write(self, memory: int, value: object, stream: int) -> None:
        """An operation that writes memory."""
        self._enqueue(stream, lambda: self.memory.__setitem__(memory, value), (memory, True))

    def read(self, memory: int, value: object, stream: int) -> None:
        """An operation that reads memory and must find this value there."""

        def do() -> None:
            if self.memory.get(memory) != value:
                raise Race(f"memory {memory} has {self.memory.get(memory)} instead of {value}")

        self._enqueue(stream, do, (memory, False))

    def allocate(self, stream: int) -> int:
        """Memory for the work of a stream. It may have been freed before the device was done with it."""
        for memory in self._free:
            block = self._blocks[memory]
            if block.stream == stream and all(work.done for work in block.awaited):
                self._free.remove(memory)
                # The host knows that this work is over, so all work that follows comes after it.
                known = block.users - {stream}
                self._readers[memory] = [each for each in self._readers.get(memory, ()) if each.stream not in known]
                if memory in self._writer and self._writer[memory].stream in known:
                    del self._writer[memory]
                self._blocks[memory] = _Block(stream)
                return memory
        memory = next(self._addresses)
        self._blocks[memory] = _Block(stream)
        return memory

    def use(self, memory: int, stream: int) -> None:
        """As torch's ``record_stream``: the allocator must know of the work of another stream."""
        self._blocks[memory].users.add(stream)

    def free(self, memory: int) -> None:
        block = self._blocks[memory]
        block.awaited = [self._last[user] for user in block.users if user != block.stream and user in self._last]
        self._free.append(memory)

    def host_reads(self, memory: int) -> object:
        """The value that the host finds in memory."""
        if memory not in self._writer or not self._writer[memory].done:
            raise Race(f"the host reads memory {memory} before the device has written it")
        return self.memory[memory]

    def run(self) -> None:
        """Do all enqueued work."""
        while self.step():
            pass

    def step(self) -> bool:
        """Do one piece of enqueued work. False if there is none."""
        if not any(self._streams.values()):
            return False
        ready = [queue for queue in self._streams.values() if queue and all(need.done for need in queue[0].needs)]
        if not ready:
            raise AssertionError("streams wait for each other")
        work = self._random.choice(ready).popleft()
        if work.do is not None:
            work.do()
        work.done = True
        work.needs = []
        return True
