"""Rest: what idle processes use, read from the kernel without disturbing them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SETTLE_SECONDS = 0.2  # after which a worker without work is idle
_SWITCHES = "voluntary_ctxt_switches:"


class Rest(NamedTuple):
    """CPU seconds and wake-ups of all processes together, and the private memory of each in bytes."""

    cpu_seconds: float
    wake_ups: int
    bytes: list[int]


def watch(pids: Sequence[int], seconds: float) -> Rest:
    """What the processes use in ``seconds``, after a moment to settle."""
    time.sleep(_SETTLE_SECONDS)
    cpu, switches = _cpu_seconds(pids), _switches(pids)
    time.sleep(seconds)
    used = _cpu_seconds(pids) - cpu
    wake_ups = sum(count - switches.get(thread, 0) for thread, count in _switches(pids).items())
    return Rest(used, wake_ups, list(map(_own_bytes, pids)))


def _cpu_seconds(pids: Sequence[int]) -> float:
    """The CPU time that the processes have used so far, in user and kernel mode.

    Read from their CPU clocks, named as in clock_getcpuclockid(3): /proc counts in hundredths of a second, and
    an idle worker often uses less than one.
    """
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def _switches(pids: Sequence[int]) -> dict[str, int]:
    """Thread -> how often it has gone to sleep so far, which is how often it was woken, give or take one."""
    found = {}
    for pid in pids:
        for status in Path(f"/proc/{pid}/task").glob("*/status"):
            try:
                lines = status.read_text().splitlines()
            except OSError:  # just ended
                continue
            found[status.parent.name] = sum(int(line.split()[1]) for line in lines if line.startswith(_SWITCHES))
    return found


def _own_bytes(pid: int) -> int:
    """Memory that would become free if the process ended, because no other process shares it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))
