"""News: how a launcher tells its workers that one of them has ended, and how, so that their errors can say so.

Each worker has a datagram socket in the directory of the launch (`agent.endings`), and the launcher sends to all
sockets there. A file in that directory promises news: a worker that loses a connection then waits a moment for it. A
launch over several hosts has such a directory on each host, and the file says that the news covers all hosts.

A process is named as in `transport.processes`, so that a reused process id cannot be mistaken for the old process.

Launchers and workers both import this module, so it needs only the standard library.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

EXPECTED = "news"
"""The file that promises news."""
OF_ALL_HOSTS = "of all hosts"
"""The content of that file if the news covers all hosts, not only this machine."""
SOCKETS = "news-"
"""The prefix of the sockets' names."""


def promise(directory: str, *, of_all_hosts: bool = False) -> None:
    """Promise the workers of this launch news of workers that end, on this machine or on all hosts."""
    path = Path(directory, EXPECTED)
    path.touch(mode=0o600)
    path.write_text(OF_ALL_HOSTS if of_all_hosts else "")


def tell(directory: str, process: str, ending: str, *, replaced: bool = False) -> None:
    """Tell all workers how a process has ended, and whether another one takes its place. Never blocks."""
    news = json.dumps({"process": process, "ending": ending, "replaced": replaced}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for name in _sockets(directory):
            try:
                sock.sendto(news, socket.MSG_DONTWAIT, os.path.join(directory, name))
            except OSError:
                continue  # this worker has ended too, or does not read; its connections will tell it


def _sockets(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.startswith(SOCKETS)]
    except OSError:
        return []
