"""Tells the workers of a launch how one of them has ended, so that their errors can say so.

Each worker has a datagram socket in the directory of the launch (`agent.endings`), and the launcher sends to all that
are there. A file beside them says that it will: a worker that loses a connection then waits a moment for the news. A
launch over several hosts has such a directory on each, and the file says that news come of all of them.

A process is named as `transport.processes` names it, so that its number cannot be mistaken for that of another one.

Launchers and workers both import this, so it needs no more than the standard library.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

EXPECTED = "news"
"""The file that says that news will come."""
OF_ALL_HOSTS = "of all hosts"
"""What stands in that file if the news are not of this machine alone."""
SOCKETS = "news-"
"""How the names of the sockets begin."""


def promise(directory: str, *, of_all_hosts: bool = False) -> None:
    """Say that the workers of this launch will be told how others have ended, on this machine or on all hosts."""
    path = Path(directory, EXPECTED)
    path.touch(mode=0o600)
    path.write_text(OF_ALL_HOSTS if of_all_hosts else "")


def tell(directory: str, process: str, ending: str, *, replaced: bool = False) -> None:
    """Tell all workers how a process has ended, and whether another one takes its place. Waits for nobody."""
    news = json.dumps({"process": process, "ending": ending, "replaced": replaced}).encode()
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
