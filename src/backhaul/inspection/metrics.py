"""Metrics: the figures of workers in Prometheus's format, and a small server for them.

The metrics are computed at each scrape, from the same snapshot and meter that `backhaul.rpc.debug_info`
returns; nothing is copied into counters of `prometheus_client`. Counters only grow while a worker lives.

All workers of a process that use one registry share one collector, because a registry accepts each metric only once.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from backhaul.errors import MisuseError, OptionError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from backhaul.inspection.inspection import Inspection

_log = logging.getLogger("backhaul.metrics")

LOOPBACK = "127.0.0.1"
_LOCAL_RANK_VARIABLE = "LOCAL_RANK"
_JOIN_SECONDS = 5.0

# Global to the process: a registry of Prometheus takes one collector for all workers of the process.
_collectors: weakref.WeakKeyDictionary[CollectorRegistry, Collector] = weakref.WeakKeyDictionary()
_registering = threading.Lock()  # around these


def prometheus() -> Any:
    """The module `prometheus_client`. Raises `MisuseError` if it is not installed."""
    try:
        import prometheus_client
    except ImportError as error:
        raise MisuseError("metrics need prometheus_client: pip install 'backhaul[metrics]'") from error
    return prometheus_client


def port_of(first: int, rank: int) -> int:
    """The metrics port of a worker: ``first`` plus its rank on this host, which launchers announce. 0 stays 0."""
    if first == 0:
        return 0
    local = os.environ.get(_LOCAL_RANK_VARIABLE, "")
    return first + (int(local) if local.isdecimal() else rank)


def register(inspection: Inspection, registry: CollectorRegistry | None = None) -> Callable[[], None]:
    """Make a registry expose a worker's figures; returns a function that ends this."""
    if registry is None:
        registry = prometheus().REGISTRY
    with _registering:
        collector = _collectors.get(registry)
        if collector is None:
            prometheus()
            collector = _collectors[registry] = Collector()
            registry.register(collector)
    return collector.add(inspection)


class Exposition:
    """A server on loopback from which Prometheus can scrape one worker's figures. `close` ends it."""

    def __init__(
        self, inspection: Inspection, port: int, host: str = LOOPBACK, registry: CollectorRegistry | None = None
    ) -> None:
        """Listen on ``port``; 0 means any free port. Raises `OptionError` if that fails."""
        if not _is_loopback(host):
            raise OptionError(
                f"metrics have no password, so they are served on loopback only, not on {host!r}: forward "
                "the port to other hosts, or run an agent of your monitoring on this one"
            )
        self._closed = False
        client = prometheus()
        self._unregister = register(inspection, registry)
        try:
            self._server, self._thread = client.start_http_server(
                port, host, client.REGISTRY if registry is None else registry
            )
        except (OSError, OverflowError) as error:
            self._unregister()
            raise OptionError(f"metrics cannot be served on port {port} of {host}: {error}") from error
        self.port: int = self._server.server_port
        self.address = f"http://{host}:{self.port}/metrics"
        _log.info("metrics of %s: %s", inspection.name, self.address)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._unregister()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(_JOIN_SECONDS)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Collector:
    """Computes the metrics of some workers of this process whenever a registry asks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shown: dict[int, tuple[Inspection, int]] = {}  # by identity, with how many times each was added

    def add(self, inspection: Inspection) -> Callable[[], None]:
        """Expose a worker; returns a function that ends this."""
        release = inspection.meter.hold()
        key = id(inspection)
        with self._lock:
            self._shown[key] = inspection, self._shown.get(key, (inspection, 0))[1] + 1

        def remove() -> None:
            with self._lock:
                if key not in self._shown:
                    return
                _, times = self._shown.pop(key)
                if times > 1:
                    self._shown[key] = inspection, times - 1
            release()

        return remove

    def describe(self) -> Iterator[Metric]:
        """The metrics without figures: the registry checks for duplicate names."""
        yield from _Families().all()

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        with self._lock:
            shown = [inspection for inspection, _ in self._shown.values()]
        for inspection in shown:
            families.add(inspection.debug_info())
        yield from families.all()


class _Families:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        from prometheus_client import core

        def counter(name: str, text: str, *labels: str) -> Any:
            return core.CounterMetricFamily(f"backhaul_{name}", text, labels=["worker", *labels])

        def gauge(name: str, text: str, *labels: str) -> Any:
            return core.GaugeMetricFamily(f"backhaul_{name}", text, labels=["worker", *labels])

        self.info = core.InfoMetricFamily("backhaul_worker", "The worker.", labels=["worker"])
        self.start = gauge("worker_start_time_seconds", "When the worker began, in seconds since 1970.")
        self.calls = counter("calls", "Finished calls.", "function", "peer", "direction")
        self.failed = counter("calls_failed", "Finished calls that raised.", "function", "peer", "direction")
        self.latency = core.HistogramMetricFamily(
            "backhaul_call_seconds",
            "How long calls took: sent ones from the request to the value, served ones from the request to the reply.",
            labels=["worker", "function", "direction"],
        )
        self.outstanding = gauge("requests_outstanding", "Requests that await their reply.", "peer")
        self.running = gauge("requests_running", "Requests of peers that are being handled.")
        self.frames = counter("frames", "Frames.", "direction")
        self.bytes = counter(
            "bytes",
            "Bytes by path: memory, unix, tls, tcp; segment is shared memory, device is GPU memory.",
            "peer",
            "direction",
            "path",
        )
        self.errors = counter("errors", "Failures, by the type of the error.", "direction", "kind")
        self.lost = counter("links_lost", "How many times a peer was lost.", "peer")
        self.up = gauge("peer_up", "Whether there is a connection with the peer.", "peer")
        self.silent = gauge("peer_silent_seconds", "How long a ping has been unanswered.", "peer")
        self.heard = gauge(
            "peer_heard_seconds", "Time since the last message of the peer, as of the latest figures.", "peer"
        )
        self.threads = gauge("threads", "Threads of the process by what they do for calls.", "state")
        self.pool = gauge("pool_threads", "Threads of the worker's pool.")
        self.contexts = gauge("contexts", "Distributed autograd contexts.")
        self.gates = gauge("gates_waiting", "Gates at which runs wait for gradients.")
        self.open_passes = gauge("passes_running", "Backward passes that this worker takes part in.")
        self.passes = counter("passes", "Finished backward passes that this worker started.")
        self.passes_failed = counter("passes_failed", "Backward passes that failed.")
        self.pass_seconds = counter("pass_seconds", "Total time of backward passes.")
        self.parts = counter(
            "pass_part_seconds",
            "Time that threads of this worker spent in passes: in runs, at gates, waiting for other workers.",
            "part",
        )
        self.references = gauge("references", "References by their relation to this worker.", "state")
        self.segments = gauge("segments", "Segments of shared memory for large tensors.")
        self.segment_bytes = gauge("segment_bytes", "Bytes of shared memory for large tensors.")

    def all(self) -> Iterator[Metric]:
        yield from vars(self).values()

    def add(self, figures: Mapping[str, Any]) -> None:
        """The figures of one worker, as `Inspection.debug_info` has them."""
        worker = figures["worker"]["name"]
        about = figures["worker"]
        self.info.add_metric(
            [worker], {name: str(about[name]) for name in ("rank", "group", "host", "pid", "python", "torch")}
        )
        self.start.add_metric([worker], figures["time"] - about["seconds"])
        self.running.add_metric([worker], len(figures["running"]))
        for error in figures["errors"]:
            self.errors.add_metric([worker, error["direction"], error["kind"]], error["count"])
        self._add_peers(worker, figures["peers"])
        threads = figures["threads"]
        states = Counter(f"waiting for a {wait['kind']}" for wait in figures["waiting"])
        states["handling"] = threads["handling"]
        states["other"] = max(0, threads["all"] - states.total())
        for state, count in states.items():
            self.threads.add_metric([worker, state], count)
        self.pool.add_metric([worker], threads["pool"])
        self.contexts.add_metric([worker], figures["autograd"]["contexts"])
        self.gates.add_metric([worker], figures["autograd"]["gates"])
        self.open_passes.add_metric([worker], figures["autograd"]["passes"])
        for state, count in figures["references"].items():
            self.references.add_metric([worker, state], count)
        self.segments.add_metric([worker], figures["segments"]["segments"])
        self.segment_bytes.add_metric([worker], figures["segments"]["bytes"])
        if figures["meter"] is not None:
            self._add_meter(worker, figures["meter"])

    def _add_peers(self, worker: str, peers: list[dict[str, Any]]) -> None:
        for peer in peers:
            name = peer["name"]
            self.outstanding.add_metric([worker, name], peer["outstanding"])
            self.up.add_metric([worker, name], peer["lines"] > 0)
            self.silent.add_metric([worker, name], peer["silent"])
            self.lost.add_metric([worker, name], peer["lost"])
            if peer["heard"] is not None:
                self.heard.add_metric([worker, name], peer["heard"])
            for path, count in peer["bytes"].items():
                self.bytes.add_metric([worker, name, "sent", path], count["sent"])
                self.bytes.add_metric([worker, name, "received", path], count["received"])

    def _add_meter(self, worker: str, meter: Mapping[str, Any]) -> None:
        bounds = [*map(str, meter["bounds"]), "+Inf"]
        histograms: dict[tuple[str, str], tuple[list[int], float]] = {}
        for calls in meter["calls"]:
            function, direction = calls["function"], calls["direction"]
            labels = [worker, function, calls["peer"], direction]
            self.calls.add_metric(labels, calls["count"])
            self.failed.add_metric(labels, calls["failed"])
            buckets, seconds = histograms.get((function, direction), ([0] * len(bounds), 0.0))
            added = [ours + more for ours, more in zip(buckets, calls["buckets"], strict=True)]
            histograms[function, direction] = added, seconds + calls["seconds"]
        for (function, direction), (buckets, seconds) in histograms.items():
            steps = list(zip(bounds, accumulate(buckets), strict=True))
            self.latency.add_metric([worker, function, direction], steps, sum_value=seconds)
        for direction, count in meter["frames"].items():
            self.frames.add_metric([worker, direction], count)
        passes = meter["passes"]
        self.passes.add_metric([worker], passes["count"])
        self.passes_failed.add_metric([worker], passes["failed"])
        self.pass_seconds.add_metric([worker], passes["seconds"])
        for part, name in (("run", "runs_seconds"), ("gate", "gate_seconds"), ("wait", "wait_seconds")):
            self.parts.add_metric([worker, part], passes[name])
