"""``backhaul doctor --ready``: whether the workers of this machine, or pod, are up. For probes, so without torch.

A worker that has joined its group greets every process that connects to its unix socket, members or not. The
greeting proves that the process runs, is neither stopped nor hung, and accepts connections. A worker that still waits
for its group does not greet. Sockets of killed processes refuse connections, and do not count.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path

from backhaul.directories import PREFIX
from backhaul.doctor.places import RUNTIME_DIR_VARIABLE
from backhaul.errors import BackhaulError
from backhaul.ids import GUEST
from backhaul.security import handshake
from backhaul.security.handshake import HEAD_SIZE, Hello

PATIENCE = 2.0
"""Seconds within which all workers together must greet."""

_PAUSE = 0.05

_ROOTS = ("/tmp",)
"""The parent of the socket directories if the temporary directory's name is too long."""


def run(wanted: int, name: str | None) -> int:
    """Print which workers are up; the exit code is 0 if at least ``wanted`` are, and ``name`` is one of them."""
    deadline = time.monotonic() + PATIENCE
    up, silent = [], []
    for path in _sockets():
        try:
            up.append(greet(path, deadline))
        except (FileNotFoundError, ConnectionRefusedError):
            continue  # its process has ended
        except (OSError, BackhaulError) as error:
            silent.append(f"{path} {str(error) or 'does not answer'}")
    missing = [] if name is None or name in up else [f"worker {name!r} is not among them"]
    if len(up) < wanted:
        missing.append(
            f"{wanted} expected" if up else f"no worker of user {os.geteuid()} with a unix socket is up here"
        )
    ready = not missing and (name is not None or not silent)
    found = ", ".join(sorted(up)) or "none"
    reasons = "".join(f"; {each}" for each in (*missing, *silent))
    sys.stdout.write(f"{'ready' if ready else 'not ready'}: {found}{reasons}\n")
    return 0 if ready else 1


def greet(path: Path, deadline: float) -> str:
    """The name of the worker that listens at ``path``. Raises OSError, including TimeoutError, or `BackhaulError`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        _connect(sock, path, deadline)
        # The worker may have sent a reason before it closed.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            sock.sendall(handshake.encode(Hello("", GUEST, "guest", GUEST)))
        rest = handshake.length_of_welcome(_receive(sock, HEAD_SIZE, deadline))
        return handshake.decode_welcome(_receive(sock, rest, deadline)).name


def _connect(sock: socket.socket, path: Path, deadline: float) -> None:
    """Wait until the listener's queue has room: with a full one, the connection would be refused at once."""
    while True:
        _limit(sock, deadline)
        try:
            sock.connect(os.fspath(path))
        except BlockingIOError:
            time.sleep(_PAUSE)
        else:
            return


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        _limit(sock, deadline)
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionResetError("ends the connection during the greeting")
        data += part
    return data


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("does not answer: the worker waits for its group, hangs, or is very busy")
    sock.settimeout(left)


def _is_worker(path: Path) -> bool:
    """Whether this is a worker's socket: its name begins with a process id. The others are for news."""
    try:
        return path.name[0].isdecimal() and stat.S_ISSOCK(path.stat().st_mode)
    except FileNotFoundError:  # just removed; the directory may belong to several workers
        return False


def _sockets() -> list[Path]:
    """The unix sockets of this user's workers."""
    directories = {path for root in {tempfile.gettempdir(), *_ROOTS} for path in Path(root).glob(f"{PREFIX}*")}
    if os.environ.get(RUNTIME_DIR_VARIABLE):
        directories.add(Path(os.environ[RUNTIME_DIR_VARIABLE]))
    found = []
    for directory in directories:
        try:
            status = directory.stat()
            if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                found += [path for path in directory.iterdir() if _is_worker(path)]
        except OSError:  # just removed
            continue
    return sorted(found)
