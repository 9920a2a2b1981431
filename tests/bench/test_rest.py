"""What idle processes use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from backhaul.bench import launched
from backhaul.bench.rest import watch

SLEEPS = "import time; print(flush=True); time.sleep(60)"
WAKES = "import time; print(flush=True)\nwhile True: time.sleep(0.01)"


@pytest.mark.parametrize(("program", "least", "most"), [(SLEEPS, 0, 5), (WAKES, 10, 60)])
def test_wake_ups_are_counted(program: str, least: int, most: int) -> None:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        rest = watch([process.pid], 0.5)
        process.kill()

    assert least <= rest.wake_ups <= most
    assert 0 <= rest.cpu_seconds < 0.4
    assert rest.bytes[0] > 0


@pytest.mark.parametrize(("launcher", "count"), [("cluster(2)", 2), ("backhaul run -n 3", 3)])
def test_workers_that_a_launcher_left_idle_are_found_and_end(launcher: str, count: int) -> None:
    rest = launched.rest_of(launcher, 0.1)

    assert len(rest.bytes) == count


def test_a_launcher_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such worker')")
    monkeypatch.setitem(launched._COMMANDS, "broken", (command, 2))
    with pytest.raises(launched.NotLaunched, match=r"(?s)exit code 1; it said:.*no such worker"):
        launched.rest_of("broken", 0.1)


@pytest.mark.parametrize("gone", ["before", "later"])
def test_launched_workers_end_with_the_benchmark(gone: str, tmp_path: Path) -> None:
    """The workers end even if the benchmark is killed, because then nothing holds the pipe open."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    thread = threading.Thread(target=launched.await_end, args=(str(tmp_path),), daemon=True)
    if gone == "before":
        os.close(pipe)
    thread.start()
    if gone == "later":
        thread.join(0.1)
        assert thread.is_alive()
        os.close(pipe)
    thread.join(30)
    assert not thread.is_alive()
