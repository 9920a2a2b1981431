"""Systems whose unix sockets do not tell the peer's user: workers use TCP with the launcher's secret."""

from __future__ import annotations

import socket

import pytest
import torch

from backhaul import rpc
from backhaul.errors import OptionError
from backhaul.options import RpcOptions
from backhaul.testing import InProcessCluster
from backhaul.transport import sockets
from backhaul.transport.stream import StreamTransport


@pytest.fixture(params=["no family", "no credentials"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no family":
        monkeypatch.setattr(sockets, "UNIX", None)
    else:
        monkeypatch.delattr(socket, "SO_PEERCRED")


@pytest.mark.usefixtures("elsewhere")
def test_workers_meet_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SECRET", "17" * 32)
    with InProcessCluster(2, sockets=True) as workers, workers[0].as_current():
        assert workers[1].agent.transport.addresses.unix is None
        host, _ = workers[1].agent.transport.addresses.tcp or ("", 0)
        assert host == "127.0.0.1"
        x = torch.rand(300, 300)
        assert torch.equal(rpc.rpc_sync("worker1", torch.neg, args=(x,)), -x)


@pytest.mark.usefixtures("elsewhere")
def test_without_a_secret_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKHAUL_SECRET", raising=False)
    with pytest.raises(OptionError, match="needs a secret that all workers share: start them with `backhaul run`"):
        StreamTransport(RpcOptions()).listen()
    with pytest.raises(OptionError, match="no unix sockets that tell whose process"):
        StreamTransport(RpcOptions(transport="unix")).listen()
