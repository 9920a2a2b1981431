"""A model of `agent.waiting` in a `link_simulation`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simulated_threads import Steps, Until

if TYPE_CHECKING:
    from simulated_reading import Reading


class Sleeper:
    """A `waiting.Waiter`, or the bell of a `waiting.Vigil`."""

    def __init__(self) -> None:
        self.woken = False

    def wake(self) -> None:
        self.woken = True


class Listener:
    """A thread of ``backward``."""

    def __init__(self) -> None:
        self.vigil = Sleeper()
        self.arrived = 0
        self.failed = False
        self.over = False


def keep_vigil(vigil: Sleeper, lines: list[Reading], done: Any, until: float, beside: Any = None) -> Steps:
    """`Vigil.wait`."""
    reading: list[tuple[Reading, int]] = []
    waiting: list[Reading] = []
    for line in lines:
        while not (token := line.begin_reading()):
            yield
            if line.state.line_up(vigil):
                waiting.append(line)
                break
            yield
            if line.lost or line.looks_once:
                break
        if token:
            reading.append((line, token))
        yield
    ready: list[Reading] = []
    if not done():
        yield Until(
            lambda: vigil.woken or any(line.readable for line, _ in reading),
            until,
            beside=None if beside is None or any(line is beside[0] for line, _ in reading) else beside,
        )
        for line, _ in reading:
            line.world.judge_polled(line)
        ready = [line for line, _ in reading if line.readable]
    vigil.woken = False
    yield
    for line in waiting:
        other = line.state.leave(vigil)
        yield
        if other is not None:
            other.wake()
    for line, token in reading:
        yield from line.end_vigil(token, comes=line in ready)
