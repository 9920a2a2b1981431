"""The dashboard over HTTP: who may see it, and its answers."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import torch

from backhaul import autograd, rpc
from backhaul.__main__ import main
from backhaul.seeing.dashboard.server import Dashboard
from backhaul.seeing.guest import Member, transport_for
from backhaul.testing import InProcessCluster

PATIENCE = 20.0


@pytest.fixture
def workers() -> Iterator[InProcessCluster]:
    with InProcessCluster(2, sockets=True) as found:
        yield found


@pytest.fixture
def dashboard(workers: InProcessCluster) -> Iterator[Dashboard]:
    members = [Member(each.info, each.agent.membership.find(each.info).addresses) for each in workers]
    with Dashboard(members, transport_for(), interval=0.05) as found:
        yield found


def request(
    dashboard: Dashboard, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=PATIENCE)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{dashboard.port}")
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def ask(dashboard: Dashboard, path: str, **arguments: str) -> Any:
    more = "".join(f"&{name}={quote(value)}" for name, value in arguments.items())
    status, _, body = request(dashboard, f"/api/{path}?token={dashboard.token}{more}")
    found = json.loads(body)
    assert status == 200, found
    return found


def test_requests_without_the_token_are_refused(dashboard: Dashboard) -> None:
    for path in ("/", "/?token=", "/?token=wrong", "/api/view", "/api/stuck?token=x", "/favicon.ico"):
        status, _, body = request(dashboard, path)
        assert status == 403
        assert b"worker" not in body
    assert request(dashboard, f"/?token={dashboard.token}")[0] == 200


def test_a_page_whose_name_was_pointed_to_loopback_sees_nothing(dashboard: Dashboard) -> None:
    path = f"/api/view?token={dashboard.token}"
    for host in ("evil.example", f"evil.example:{dashboard.port}", "127.0.0.1", f"127.0.0.1:{dashboard.port + 1}"):
        assert request(dashboard, path, host=host)[0] == 403
    assert request(dashboard, path, host=f"localhost:{dashboard.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get_is_answered(dashboard: Dashboard, method: str) -> None:
    assert request(dashboard, f"/api/view?token={dashboard.token}", method)[0] == 405


def test_the_page_may_load_nothing_from_elsewhere(dashboard: Dashboard) -> None:
    status, headers, body = request(dashboard, f"/?token={dashboard.token}")
    policy = headers["Content-Security-Policy"]
    assert status == 200
    assert policy.startswith("default-src 'none'; script-src 'nonce-")
    assert "unsafe" not in policy
    assert headers["Cache-Control"] == "no-store"
    assert headers["Referrer-Policy"] == "no-referrer"
    nonce = policy.partition("'nonce-")[2].partition("'")[0]
    page = body.decode()
    assert page.count(f'nonce="{nonce}"') == 2
    assert "__NONCE__" not in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    assert "innerHTML" not in page
    other = request(dashboard, f"/?token={dashboard.token}")[1]["Content-Security-Policy"]
    assert other != policy  # a nonce is used once


def test_unknown_paths_are_not_found(dashboard: Dashboard) -> None:
    for path in ("/api/", "/api/inspect", "/../server.py", "/page.js", "/api/drawing"):
        assert request(dashboard, f"{path}?token={dashboard.token}")[0] == 404


def test_the_requests_of_the_page_are_answered(dashboard: Dashboard, workers: InProcessCluster) -> None:
    workers[0].rpc_sync("worker1", torch.add, args=(torch.ones(4), 1))
    assert dashboard.lookout.wait_until(lambda view: all(row.state == "live" for row in view.rows()), PATIENCE)
    view = ask(dashboard, "view")
    assert [(worker["name"], worker["state"]) for worker in view["workers"]] == [
        ("worker0", "live"),
        ("worker1", "live"),
    ]
    threads = ask(dashboard, "threads", worker="worker0")["threads"]
    assert any(
        frame["function"] == "test_the_requests_of_the_page_are_answered"
        for thread in threads
        for frame in thread["stack"]
    )
    assert ask(dashboard, "stuck")["chains"] == []
    status, _, body = request(dashboard, f"/api/threads?token={dashboard.token}&worker=nobody")
    assert status == 502
    assert "there is no worker 'nobody'" in json.loads(body)["error"]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_the_drawing_of_a_live_context(dashboard: Dashboard, workers: InProcessCluster) -> None:
    pytest.importorskip("backhaul.drawing")
    with workers[0].as_current(), autograd.context() as context:
        y = rpc.rpc_sync("worker1", double, args=(torch.ones(3, requires_grad=True),))
        assert dashboard.lookout.wait_until(lambda view: view.contexts(), PATIENCE)
        for which in (str(int(context)), "latest"):
            status, headers, body = request(dashboard, f"/api/drawing?token={dashboard.token}&context={which}")
            assert status == 200, body
            assert headers["Content-Type"].startswith("image/svg+xml")
            assert b"<svg" in body
            assert b"worker1" in body
        del y
    status, _, body = request(dashboard, f"/api/drawing?token={dashboard.token}&context=latest")
    assert status == 502
    assert "no context is open" in json.loads(body)["error"]


def test_a_worker_that_is_lost_stays_in_the_view(dashboard: Dashboard, workers: InProcessCluster) -> None:
    assert dashboard.lookout.wait_until(lambda view: all(row.state == "live" for row in view.rows()), PATIENCE)
    workers[1].shutdown(graceful=False)
    assert dashboard.lookout.wait_until(lambda view: view.rows()[1].state == "lost", PATIENCE)
    lost = ask(dashboard, "view")["workers"][1]
    assert lost["since"] > 0
    assert "its process has ended" in lost["reason"]
    assert ask(dashboard, "view")["workers"][0]["state"] == "live"


def test_the_commands_say_that_there_is_no_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    for command, code in (("dashboard", 1), ("stuck", 2), ("top --once", 1)):
        assert main([*command.split(), "/"]) == code
        assert "you have no running cluster on this machine in /" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_the_command(workers: InProcessCluster) -> None:
    socket = workers[0].agent.membership.find("worker0").addresses.unix
    assert socket is not None
    where = socket.rpartition("/")[0]
    command = [sys.executable, "-m", "backhaul", "dashboard", "--no-browser", where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://127.0.0.1:" in line
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (0, "")
