"""Processes that act as separate hosts: each has its own network namespace and host name."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess

CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


def become_host() -> None:
    """Move this process to its own network namespace and host name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET | CLONE_NEWUTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(f"host-{os.getpid()}")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for variable in ("BACKHAUL_SECRET", "BACKHAUL_KEY_FILE", "BACKHAUL_HOST"):
        os.environ.pop(variable, None)
