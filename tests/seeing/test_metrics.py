"""Metrics: scraped over HTTP as Prometheus does, and equal to `rpc.debug_info`."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

import backhaul.autograd as dist_autograd
from awaiting import await_events
from backhaul import rpc
from backhaul.errors import MisuseError, OptionError
from backhaul.inspection.metrics import port_of
from backhaul.options import METRICS_PORT_VARIABLE, RpcOptions
from backhaul.seeing import metrics
from backhaul.testing import InProcessCluster

ROOT = Path(__file__).parents[2]


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fail() -> None:
    raise ValueError("on purpose")


BYTES = ("backhaul_bytes", "backhaul_bytes_total", "worker", "peer", "direction", "path")


def scrape(address: str) -> dict[str, Metric]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def values(families: dict[str, Metric], family: str, sample: str, *by: str) -> dict[tuple[str, ...], float]:
    """The values of the samples of a name, by these labels."""
    return {
        tuple(each.labels[label] for label in by): each.value
        for each in families[family].samples
        if each.name == sample
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def used(registry: CollectorRegistry) -> Iterator[tuple[InProcessCluster, metrics.Exposition]]:
    """Two workers of one process with exposed metrics, after known calls and a pass."""
    with InProcessCluster(2, sockets=True) as pair:
        pair[0].rpc_sync("worker1", int)
        with pair[1].as_current():
            metrics.register(registry)
        with pair[0].as_current():
            exposition = metrics.start(0, registry=registry)
            x = torch.ones(2, requires_grad=True)
            for _ in range(3):
                rpc.rpc_sync("worker1", double, (x,))
            with pytest.raises(ValueError, match="on purpose"):
                rpc.rpc_sync("worker1", fail)
            kept = rpc.remote("worker1", double, (x,))
            kept.to_here()
            with dist_autograd.context() as context:
                dist_autograd.backward(context, [rpc.rpc_sync("worker1", double, (x,)).sum()])
            yield pair, exposition


def test_the_scraped_figures_match_the_calls(used: tuple[InProcessCluster, metrics.Exposition]) -> None:
    pair, exposition = used

    def all_has_come() -> bool:
        bytes_ = values(scrape(exposition.address), *BYTES)
        return bytes_["worker0", "worker1", "sent", "unix"] == bytes_["worker1", "worker0", "received", "unix"]

    assert await_events(pair[1], all_has_come, 10)
    found = scrape(exposition.address)
    calls = values(found, "backhaul_calls", "backhaul_calls_total", "worker", "direction", "function", "peer")
    assert calls["worker0", "sent", "double", "worker1"] == 5
    assert calls["worker0", "sent", "to_here", "worker1"] == 1
    assert calls["worker0", "sent", "fail", "worker1"] == 1
    failed = values(found, "backhaul_calls_failed", "backhaul_calls_failed_total", "worker", "direction", "function")
    assert failed["worker0", "sent", "fail"] == 1
    assert failed["worker0", "sent", "double"] == 0
    errors = values(found, "backhaul_errors", "backhaul_errors_total", "worker", "direction", "kind")
    assert errors == {("worker0", "sent", "ValueError"): 1, ("worker1", "served", "ValueError"): 1}
    sent = values(found, *BYTES)
    assert sent["worker0", "worker1", "sent", "unix"] == sent["worker1", "worker0", "received", "unix"] > 0
    assert values(found, "backhaul_passes", "backhaul_passes_total", "worker") == {("worker0",): 1, ("worker1",): 0}
    parts = values(found, "backhaul_pass_part_seconds", "backhaul_pass_part_seconds_total", "worker", "part")
    assert parts["worker0", "run"] > 0
    assert parts["worker1", "run"] > 0
    assert values(found, "backhaul_references", "backhaul_references", "worker", "state")["worker1", "owned"] == 1
    assert values(found, "backhaul_peer_up", "backhaul_peer_up", "worker", "peer")["worker0", "worker1"] == 1
    info = values(found, "backhaul_worker_info", "backhaul_worker_info", "worker", "rank", "torch")
    assert info["worker0", "0", torch.__version__] == 1


def test_the_histograms_are_histograms(used: tuple[InProcessCluster, metrics.Exposition]) -> None:
    found = scrape(used[1].address)
    samples = [
        each
        for each in found["backhaul_call_seconds"].samples
        if (each.labels["worker"], each.labels["function"], each.labels["direction"]) == ("worker0", "double", "sent")
    ]
    buckets = [(float(each.labels["le"]), each.value) for each in samples if each.name.endswith("_bucket")]
    assert [bound for bound, _ in buckets] == sorted(bound for bound, _ in buckets)
    assert [count for _, count in buckets] == sorted(count for _, count in buckets)
    assert buckets[-1] == (float("inf"), 5)
    (count,) = [each.value for each in samples if each.name.endswith("_count")]
    (seconds,) = [each.value for each in samples if each.name.endswith("_sum")]
    assert count == 5
    assert 0 < seconds < 60


def test_debug_info_has_the_same_figures(used: tuple[InProcessCluster, metrics.Exposition]) -> None:
    found = scrape(used[1].address)
    said = rpc.debug_info()
    calls = values(found, "backhaul_calls", "backhaul_calls_total", "worker", "function", "direction")
    assert {each["function"]: each["count"] for each in said["meter"]["calls"]} == {
        function: count for (worker, function, _), count in calls.items() if worker == "worker0"
    }
    (peer,) = said["peers"]
    sent = values(found, "backhaul_bytes", "backhaul_bytes_total", "worker", "direction", "path")
    for direction in ("sent", "received"):
        assert peer["bytes"]["unix"][direction] == sent["worker0", direction, "unix"]
    references = values(found, "backhaul_references", "backhaul_references", "worker", "state")
    assert said["references"] == {state: count for (worker, state), count in references.items() if worker == "worker0"}


def test_counters_survive_a_connection(used: tuple[InProcessCluster, metrics.Exposition]) -> None:
    pair, exposition = used
    names = ("worker", "direction", "path")
    before = values(scrape(exposition.address), "backhaul_bytes", "backhaul_bytes_total", *names)
    pair[0].agent.cut_off(1)
    after = values(scrape(exposition.address), "backhaul_bytes", "backhaul_bytes_total", *names)
    assert after.keys() >= before.keys()
    assert all(after[key] >= before[key] for key in before)

    def lost() -> float:
        found = scrape(exposition.address)
        return values(found, "backhaul_links_lost", "backhaul_links_lost_total", "worker")["worker0",]

    assert await_events(pair[0], lambda: lost() == 1, 10)


def test_the_server_ends_with_the_worker(registry: CollectorRegistry) -> None:
    with InProcessCluster(1) as alone:
        exposition = alone[0].inspection.expose(0, registry=registry)
        assert scrape(exposition.address)["backhaul_worker_info"].samples
    with pytest.raises(urllib.error.URLError):
        scrape(exposition.address)
    assert b'worker="worker0"' not in generate_latest(registry)


def test_a_worker_can_be_exposed_twice(registry: CollectorRegistry) -> None:
    with InProcessCluster(1) as alone:
        first, second = (alone[0].inspection.expose(0, registry=registry) for _ in range(2))
        first.close()
        first.close()
        assert len(scrape(second.address)["backhaul_worker_info"].samples) == 1
        assert alone[0].inspection.meter.on


def test_nothing_is_on_by_default() -> None:
    with InProcessCluster(2) as pair:
        assert not any(worker.agent.observers for worker in pair)
        assert not any(worker.inspection.when_closed for worker in pair)


# Options.


def free_ports(count: int) -> int:
    """The first of several consecutive ports that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        try:
            for port in range(first + 1, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


def test_each_worker_has_a_port_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    first = free_ports(2)
    with InProcessCluster(2, options=RpcOptions(metrics_port=first)):
        for port in (first, first + 1):
            assert scrape(f"http://127.0.0.1:{port}/metrics")["backhaul_worker_info"].samples


def test_the_port_follows_the_rank_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert port_of(9000, 11) == 9003
    assert port_of(0, 11) == 0
    monkeypatch.delenv("LOCAL_RANK")
    assert port_of(9000, 11) == 9011


def test_the_port_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RpcOptions().metrics_port_or_inherited() is None
    monkeypatch.setenv(METRICS_PORT_VARIABLE, "9000")
    assert RpcOptions().metrics_port_or_inherited() == 9000
    assert RpcOptions(metrics_port=9001).metrics_port_or_inherited() == 9001
    monkeypatch.setenv(METRICS_PORT_VARIABLE, "many")
    with pytest.raises(OptionError, match="BACKHAUL_METRICS_PORT: 'many' must be a port"):
        RpcOptions().metrics_port_or_inherited()


def test_a_port_that_is_taken_says_so_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"metrics cannot be served on port {port} of 127.0.0.1"):
            InProcessCluster(1, options=RpcOptions(metrics_port=port))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org"])
def test_metrics_are_exposed_only_on_loopback(host: str) -> None:
    with InProcessCluster(1) as alone, pytest.raises(OptionError, match="on loopback only"):
        alone[0].inspection.expose(0, host)


def test_without_prometheus_client() -> None:
    with InProcessCluster(1) as alone, alone[0].as_current(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(MisuseError, match=r"pip install 'backhaul\[metrics\]'"):
            metrics.start(0)
        assert not alone[0].agent.observers


def test_a_worker_imports_neither_prometheus_nor_opentelemetry() -> None:
    code = (
        "import sys, backhaul.worker, backhaul.rpc; "
        "print([name for name in sys.modules if name.split('.')[0] in ('prometheus_client', 'opentelemetry')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


# The dashboard for Grafana.

DASHBOARD: dict[str, Any] = json.loads((ROOT / "docs/grafana-dashboard.json").read_text())


def expressions() -> list[str]:
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return [*found, *(each["definition"] for each in DASHBOARD["templating"]["list"] if "definition" in each)]


def exposed(registry: CollectorRegistry) -> dict[str, set[str]]:
    """The names of all samples, with their labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_uses_only_existing_metrics(
    used: tuple[InProcessCluster, metrics.Exposition], registry: CollectorRegistry
) -> None:
    generate_latest(registry)  # `heard` is known at the second scrape
    there = exposed(registry)
    named: set[str] = set()
    for expression in expressions():
        for name, labels in re.findall(r"(backhaul_\w+)(?:{([^}]*)})?", expression):
            assert name in there, f"{name} in {expression}"
            used_labels = set(re.findall(r"(\w+)(?==|!=|=~)", labels))
            assert used_labels <= there[name], expression
            named.add(name)
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            (name, *_) = re.findall(r"backhaul_\w+", expression)
            assert set(labels.replace(" ", "").split(",")) <= there[name], expression
    # The dashboard shows all metrics.
    families = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert families == {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named}


def test_the_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
