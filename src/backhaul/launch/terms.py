"""Terms: what a launch over several hosts starts, where and how. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backhaul.launch.placement import Host, Seat
from backhaul.launch.session import INIT_METHOD_VARIABLE, NAME_VARIABLE
from backhaul.options import HOST_VARIABLE


@dataclass(frozen=True)
class Terms:
    """What is launched, where and how."""

    version: str
    """The version of Backhaul that all hosts must have."""
    hosts: Sequence[Host]
    seats: Sequence[Seat]
    argv: Sequence[str]
    """The arguments of Python on each host."""
    environment: Mapping[str, str]
    """Variables for all workers, the key among them."""
    workdir: str
    script: str | None = None
    named: bool = False
    """Whether workers get their names from the launcher."""
    restarts: int = 0
    rejoin: bool = False
    host_timeout: float = 30.0
    connect_timeout: float = 60.0
    grace: float = 5.0
    master_addr: str | None = None
    master_port: int = 0
    listen_on: str | None = None
    """The address that all workers listen on; None means the address of their host that faces the first host."""

    def worker_environment(self, seat: Seat, address: str, port: str, listen_on: str) -> dict[str, str]:
        """The variables that only the worker at ``seat`` gets."""
        quoted = f"[{address}]" if ":" in address else address
        return {
            **seat.environment(len(self.seats), len(self.hosts)),
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            INIT_METHOD_VARIABLE: f"tcp://{quoted}:{port}",
            HOST_VARIABLE: listen_on,
            **({NAME_VARIABLE: seat.name} if self.named else {}),
        }
