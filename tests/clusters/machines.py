"""Hosts as namespaces, and how to wait for their actions."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
_START = 90.0


class Host:
    """A network namespace that is connected to others, with its own name and /etc/hosts."""

    def __init__(self, name: str, address: str, space: str, hosts: Path) -> None:
        self.name = name
        self.address = address
        self.space = space
        self._hosts = hosts

    def start(self, command: str, cwd: Path, env: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Run a shell command on the host. Everything that it starts ends with the returned process."""
        # The shell stays as the first process of its namespace, and reaps orphans: Slurm waits for that.
        prepare = f"mount --bind {self._hosts} /etc/hosts; mount -t proc proc /proc; hostname {self.name}"
        unshare = "unshare --mount --uts --pid --fork --kill-child --propagation private"
        argv = [
            "nsenter",
            f"--net=/run/netns/{self.space}",
            *unshare.split(),
            "bash",
            "-c",
            f"{prepare} && {command}; exit $?",
        ]
        with output.open("ab") as file:
            return subprocess.Popen(argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def await_that(condition: Callable[[], bool], logs: Path, needs: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    """Wait for something that the processes ``needs`` cause. Fails with the ends of all logs in ``logs``."""
    deadline = time.monotonic() + _START
    while not condition():
        ended = [process.args for process in needs if process.poll() is not None]
        if ended or time.monotonic() >= deadline:
            files = [path for path in sorted(logs.rglob("*")) if path.name == "log" or path.suffix in (".out", ".log")]
            texts = "".join(f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}\n" for path in files)
            raise AssertionError(f"ended: {ended}\n{texts}" if ended else f"not within {_START:g} s\n{texts}")
        time.sleep(0.3)
