"""Tells the workers of a launch how one of them has ended, so that their errors can say so.

Each worker has a datagram socket in the directory of the launch (`agent.endings`), and the launcher sends to all that
are there. A file beside them says that it will: a worker that loses a connection then waits a moment for the news.

Launchers and workers both import this, so it needs no more than the standard library.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

EXPECTED = "news"
"""The file that says that news will come."""
SOCKETS = "news-"
"""How the names of the sockets begin."""


def promise(directory: str) -> None:
    """Say that the workers of this launch will be told how others have ended."""
    Path(directory, EXPECTED).touch(mode=0o600)


def tell(directory: str, pid: int, ending: str, *, replaced: bool = False) -> None:
    """Tell all workers how a process has ended, and whether another one takes its place. Waits for nobody."""
    news = json.dumps({"pid": pid, "ending": ending, "replaced": replaced}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for name in _sockets(directory):
            try:
                sock.sendto(news, socket.MSG_DONTWAIT, os.path.join(directory, name))
            except OSError:
                continue  # it has ended as well, or does not read: its peers are told by their connections


def _sockets(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.startswith(SOCKETS)]
    except OSError:
        return []
