"""Between two hosts: their setup, the table, and a short run."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from backhaul.bench import between, hosts
from backhaul.bench.between import Result
from backhaul.bench.hosts import CONNECTIONS_VARIABLE, LOOPBACK, PLAIN, PORTS, SSL, TCP, TLS, TORCH, VARIABLE, Hosts
from backhaul.bench.ports import CLIENT, KEY_FILE, SERVER
from backhaul.bench.rows import Row
from backhaul.bench.workloads import Figure
from backhaul.errors import OptionError
from backhaul.security.keys import make_key_file


def test_without_namespaces_the_hosts_are_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with Hosts() as made:
        assert made.why_loopback.startswith("no network namespaces (")
        assert [hosts.enter(role) for role in (SERVER, CLIENT)] == [LOOPBACK, LOOPBACK]
    assert VARIABLE not in os.environ


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_namespaces_are_made_and_removed() -> None:
    def present() -> set[str]:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        return {line.split()[0] for line in listed.splitlines()}

    with Hosts() as made:
        if made.why_loopback:
            pytest.skip(made.why_loopback)
        pair = json.loads(os.environ[VARIABLE])
        assert {host[0] for host in pair} <= present()
        ping = ["ip", "netns", "exec", pair[0][0], "ip", "route", "get", pair[1][1]]
        assert pair[0][2] in subprocess.run(ping, capture_output=True, text=True, check=True).stdout
    assert not {host[0] for host in pair} & present()


@pytest.mark.parametrize("system", [SSL, TCP])
def test_bare_ports_over_the_address_of_their_host(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, json.dumps([LOOPBACK, LOOPBACK]))
    make_key_file(os.fspath(tmp_path / KEY_FILE))
    roles = (SERVER, CLIENT)
    with PORTS[system](SERVER, roles, os.fspath(tmp_path)), PORTS[system](CLIENT, roles, os.fspath(tmp_path)) as port:
        tensor = torch.rand(1000)
        assert torch.equal(port.echo(tensor), tensor)


def test_the_table_names_the_targets_and_the_hosts() -> None:
    rounds = {TLS: [0.1, 0.1], PLAIN: [0.05, 0.05], TORCH: [0.09, 0.09], SSL: [0.08, 0.08], TCP: [0.04, 0.04]}
    rows = [
        Row(Figure("echo 64 MiB", ours=TLS), rounds),
        Row(Figure("echo 1 MiB", ours=TLS), {TLS: [1.0], TORCH: [0.1]}),
        Row(Figure("echo 64 MiB", ours=TLS), {TLS: [1.0], TORCH: [0.75], SSL: [1.0]}),
        Row(Figure("echo 16 MiB", ours=TLS), {TLS: [1.0], PLAIN: [1.0], TORCH: [0.1]}),
    ]
    file = io.StringIO()
    between.write(Result(rows, [], 0.5, "two tins"), file)
    first, _, large, small, limited, other = file.getvalue().splitlines()
    assert first.startswith("between two tins; rounds: 2; load before: 0.50")
    assert large.rstrip().endswith("TLS 0.8x: met, plain 1x: met")
    assert small.rstrip().endswith("TLS 0.5x: missed")
    assert limited.rstrip().endswith("TLS 0.8x: missed (bare ssl: 0.75x)")
    assert other.rstrip().endswith("  plain 1x: missed")


@pytest.mark.slow
def test_a_smoke_run_prints_and_writes_its_rows(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        between.main(["--smoke", "--only", "no-op", "--only", "echo 1 MiB", "--json", str(tmp_path / "out.json")]) == 0
    )
    data = json.loads((tmp_path / "out.json").read_text())
    assert [row["work"] for row in data["rows"]] == ["no-op", "echo 1 MiB"]
    for row in data["rows"]:
        assert {TLS, PLAIN, SSL, TCP} <= row["systems"].keys()


@pytest.mark.slow
def test_several_connections_for_one_tensor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CONNECTIONS_VARIABLE, "")  # restored at the end
    arguments = ["--smoke", "--only", "echo 64 MiB", "--connections", "3", "--json", str(tmp_path / "out.json")]
    assert between.main(arguments) == 0
    assert os.environ[CONNECTIONS_VARIABLE] == "3"
    with pytest.raises(OptionError, match="connections: 0 must be between 1 and 16"):
        between.main(["--connections", "0"])
