"""The bare limits work, with both ends in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul.bench.ports import CLIENT, KEY_FILE, PORTS, SERVER
from backhaul.bench.workloads import WORKLOADS
from backhaul.security.keys import make_key_file


@pytest.mark.parametrize("system", ["ping-pong", "tcp", "ssl"])
def test_a_socket_sends_back_what_it_gets(system: str, tmp_path: Path) -> None:
    make_key_file(os.fspath(tmp_path / KEY_FILE))
    roles = (SERVER, CLIENT)
    port: Any
    with PORTS[system](SERVER, roles, os.fspath(tmp_path)), PORTS[system](CLIENT, roles, os.fspath(tmp_path)) as port:
        port.noop()
        for size in (1, 1000, 1 << 20):
            tensor = torch.rand(size)
            assert torch.equal(port.echo(tensor), tensor)
        port.noop()


def test_every_tls_workload_has_an_equal_plain_one() -> None:
    plain = {f"TLS {name}": workload for name, workload in WORKLOADS.items()}
    over_tls = [workload for workload in WORKLOADS.values() if workload.figures[0].ours == "backhaul-tls"]
    assert len(over_tls) == 3
    for workload in over_tls:
        assert workload.name in plain
        assert {"backhaul-tls", "backhaul", "torch", "ssl", "tcp"} == set(workload.systems)
        assert getattr(workload.run, "args", None) == getattr(plain[workload.name].run, "args", None)
