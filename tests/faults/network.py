"""Hosts: a crew whose processes live in separate network namespaces, with a `Switch` between them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from switch import LARGE_MTU, Switch

from backhaul import rpc
from crew import Crew, Hand
from hosts import become_host

SECRET = bytes(range(32))
_JOIN_SECONDS = 90.0


def address_of(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def join(place: dict[str, Any]) -> str:
    rpc.init_rpc(**place)
    return rpc.get_worker_info().name


class Hosts(Crew):
    """Workers ``worker0``, ``worker1``, … on hosts that reach each other only through `switch`, with TCP and TLS."""

    def __init__(
        self,
        size: int,
        *,
        dynamic: bool = False,
        seed: int = 0,
        mtu: int = LARGE_MTU,
        join: bool = True,
        **options: Any,
    ) -> None:
        options = {"secret": SECRET, "transport": "tcp", "connect_timeout": 5.0, **options}
        self._dynamic = dynamic
        self.switch = Switch(seed, mtu)  # first: a crew that cannot start closes itself
        super().__init__(size, setup=become_host, group=False, **options)
        try:
            for rank, hand in enumerate(self):
                assert hand.process.pid is not None
                self.switch.plug(hand.process.pid, address_of(rank))
            if join:
                self.join_all()
        except BaseException:
            self.close()
            raise

    def place(self, rank: int, world_size: int | None) -> dict[str, Any]:
        place = super().place(rank, world_size)
        place["rpc_backend_options"].host = address_of(rank)
        return place

    def join_all(self) -> None:
        if self._dynamic:
            for rank, hand in enumerate(self):
                hand.run(join, self.place(rank, None), timeout=_JOIN_SECONDS)
            return
        joining: list[Future[Any]] = [hand.start(join, self.place(rank, len(self))) for rank, hand in enumerate(self)]
        for each in joining:
            each.result(_JOIN_SECONDS)

    def replace(self, rank: int) -> Hand:
        """Start another process on that host, which has not joined yet. The old process must be gone."""
        self[rank].close()
        hand = self[rank] = Hand(become_host, None, Path(self.directory.name) / f"stacks{rank}")
        hand.where = self.where
        hand.await_start()
        assert hand.process.pid is not None
        self.switch.replug(rank, hand.process.pid, address_of(rank))
        return hand

    def close(self) -> None:
        super().close()
        self.switch.close()


@functools.lru_cache(maxsize=1)
def missing() -> str:
    """Why this machine cannot have hosts; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "needs root, for network namespaces and TUN devices"
    if shutil.which("ip") is None:
        return "needs the command ip"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
        subprocess.run(["unshare", "--net", "true"], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"needs /dev/net/tun and network namespaces: {error}"
    return ""


needs_hosts = pytest.mark.skipif(bool(missing()), reason=missing() or "it is all there")
