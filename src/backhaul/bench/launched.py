"""Idle workers as the launchers leave them: the launched scripts, and what their workers use.

``python -m backhaul.bench.launched DIRECTORY`` is a driver of two parked workers. Under ``backhaul run -n 3`` the same
command is a worker that has called the others and waits in ``shutdown`` until the first worker calls it too. Each
worker that has nothing more to do creates a file in the directory, named after its process.

The driver and the first worker wait for the end of a pipe that the benchmark holds open. So they end when the benchmark
says so, and also when it is killed; and waiting does not wake them up.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from backhaul.bench.rest import Rest, watch

CLUSTER, RUN = "cluster(2)", "backhaul run -n 3"
_HERE = ("-m", "backhaul.bench.launched")
_COMMANDS = {
    CLUSTER: ((sys.executable, *_HERE), 2),
    RUN: ((sys.executable, "-m", "backhaul", "run", "-n", "3", *_HERE), 3),
}
"""Launcher -> its command line, to which a directory is added, and the number of its idle workers."""

_PIPE, _OUTPUT = "pipe", "output"
_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


class NotLaunched(Exception):
    """The workers did not become idle in time, or did not end well."""


def rest_of(launcher: str, seconds: float) -> Rest:
    """What a launcher's workers use while they are idle for ``seconds``. Raises `NotLaunched`."""
    command, count = _COMMANDS[launcher]
    with tempfile.TemporaryDirectory(prefix="backhaul-bench-") as name:
        directory = Path(name)
        with _launched([*command, name], directory) as process:
            return watch(_pids(process, directory, count), seconds)


@contextlib.contextmanager
def _launched(command: Sequence[str], directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    os.mkfifo(directory / _PIPE)
    pipe = os.open(directory / _PIPE, os.O_RDWR)  # for reading too, else open() would wait for a reader
    with open(directory / _OUTPUT, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield process
    except BaseException:
        process.terminate()
        raise
    finally:
        os.close(pipe)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers end with it
            process.wait()
    if process.returncode:
        raise NotLaunched(f"the launcher ended with exit code {process.returncode}{_last_words(directory)}")


def _pids(launcher: subprocess.Popen[bytes], directory: Path, count: int) -> Sequence[int]:
    deadline = time.monotonic() + _START_SECONDS
    while len(names := [name for name in os.listdir(directory) if name.isdigit()]) < count:
        if launcher.poll() is not None:
            raise NotLaunched(f"the launcher ended with exit code {launcher.returncode}{_last_words(directory)}")
        if time.monotonic() > deadline:
            raise NotLaunched(f"{len(names)} of {count} workers started in time{_last_words(directory)}")
        time.sleep(0.02)
    return sorted(map(int, names))


def _last_words(directory: Path) -> str:
    said = (directory / _OUTPUT).read_text(errors="replace").strip()
    return f"; it said:\n{said}" if said else ""


# -- launched code ------------------------------------------------------------------------------


def note(directory: str) -> None:
    Path(directory, str(os.getpid())).touch()


def await_end(directory: str) -> None:
    # Else open() would wait for a benchmark that is gone.
    pipe = os.open(Path(directory, _PIPE), os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(pipe, True)
    os.read(pipe, 1)
    os.close(pipe)


def work(directory: str) -> None:
    """A worker of ``backhaul run``."""
    from backhaul import rpc

    rpc.init_rpc()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        rpc.rpc_sync(f"worker{rank}", os.getpid)
    note(directory)
    if os.environ["RANK"] == "0":
        await_end(directory)
    rpc.shutdown()


def drive(directory: str) -> None:
    """The driver of a cluster."""
    from backhaul.cluster import cluster

    with cluster(2) as workers:
        for worker in workers:
            worker.rpc_sync(note, (directory,))
        await_end(directory)


if __name__ == "__main__":
    (work if "RANK" in os.environ else drive)(sys.argv[1])
