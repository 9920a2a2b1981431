"""A worker's recording in pieces: large recordings, and workers that take long to hand theirs over."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import msgspec
import pytest
import torch
from trace_reading import Reading

import backhaul
from backhaul import rpc
from backhaul.agent.observing import Event, Invoked
from backhaul.profiler import holder, parcel, profile
from backhaul.testing import InProcessCluster

OPERATORS = 200_000


def test_a_packed_recording_is_unpacked_to_the_same() -> None:
    threads = [
        {"native": 1, "name": "one", "rows": [["Read", at, 0, {}] for at in range(2 * parcel.BLOCK_ROWS + 1)]},
        {"native": 2, "name": "two", "rows": []},
    ]
    operators = [{"name": f"op{number}"} for number in range(parcel.BLOCK_ROWS + 1)]
    kineto = b'{"traceEvents": []}' + b" " * parcel.BLOCK_BYTES
    blocks = parcel.pack({"pid": 7}, threads, iter(operators), kineto)
    assert parcel.unpack(blocks) == {"pid": 7, "threads": threads, "operators": operators, "kineto": kineto.decode()}


def test_no_block_has_many_rows() -> None:
    rows = [["Read", at, 0, {}] for at in range(7 * parcel.BLOCK_ROWS)]
    operators = ({"name": "op"} for _ in range(3 * parcel.BLOCK_ROWS))
    kineto = b"x" * (2 * parcel.BLOCK_BYTES)
    _, *blocks = parcel.pack({}, [{"native": 1, "name": "one", "rows": rows}], operators, kineto)
    sizes = []
    for block in blocks:
        kind, data = msgspec.msgpack.decode(block)
        sizes.append((kind, len(data[1]) if kind == parcel.ROWS else len(data)))
    assert sizes == [
        *[(parcel.ROWS, parcel.BLOCK_ROWS)] * 7,
        *[(parcel.OPERATORS, parcel.BLOCK_ROWS)] * 3,
        *[(parcel.KINETO, parcel.BLOCK_BYTES)] * 2,
    ]


def test_bytes_that_are_not_text_do_not_spoil_a_recording() -> None:
    assert parcel.unpack(parcel.pack({}, [], [], b"a\xffb"))["kineto"] == "a\ufffdb"


def test_the_collector_runs_again_after_the_last_pause() -> None:
    assert gc.isenabled()
    with parcel.collector_paused():
        with parcel.collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with parcel.collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_worker_that_has_not_packed_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No worker can pack until the other was asked twice. A worker that packs before it answers is lost here."""
    monkeypatch.setattr(holder, "_ASK_EVERY", 0.0)
    asked: list[str] = []

    def observe(event: Event) -> None:
        if isinstance(event, Invoked) and event.what.endswith("packed"):
            asked.append(event.what)
            if len(asked) == 2:
                parcel._lock.release()

    with InProcessCluster(2) as workers, workers[1].as_current():
        with profile(workers=["worker0"], clock_rounds=1) as prof:
            rpc.rpc_sync("worker0", many, args=(500,))
            forget = workers[0].agent.observers.add(observe)
            monkeypatch.setattr(holder, "_PATIENCE", 20.0)
            parcel._lock.acquire()
        forget()
        prof.export_chrome_trace(tmp_path / "trace.json")
    assert len(asked) > 2
    reading = Reading(tmp_path / "trace.json")
    assert len(reading.slices("cpu_op", name="aten::tanh")) == 500
    assert len(reading.slices("backhaul.function", "worker0", "many")) == 1
    assert gc.isenabled()


def many(count: int) -> None:
    x = torch.rand(4)
    for _ in range(count):
        x.tanh()


def look_at(name: str, seconds: float) -> bool:
    """Calls a worker repeatedly. A peer that owes an answer is watched."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rpc.rpc_sync(name, many, args=(1,))
    return True


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("error")
def test_a_large_recording_loses_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing takes longer than the holder waits for any single answer; another worker watches the packing one."""
    options = rpc.RpcOptions(unresponsive_after=20.0, lost_after=20.0)
    env = {"PYTHONPATH": os.path.dirname(__file__)}
    with backhaul.cluster(2, output=False, env=env, options=options):
        with profile(clock_rounds=1) as prof:
            rpc.rpc_sync("worker1", many, args=(OPERATORS,), timeout=200)
            looking = rpc.rpc_async("worker2", look_at, args=("worker1", 30.0), timeout=200)
            monkeypatch.setattr(holder, "_PATIENCE", 15.0)
        assert looking.wait()
    assert sum(row.count for row in prof.key_averages() if row.worker == "worker1") >= OPERATORS
