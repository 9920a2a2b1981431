"""Messages that are too large; exhausted memory, descriptors, threads and disks: a clear error in the right place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import baseline
import limits
import load
import pytest
import torch
import training
from measuring import Measure

from backhaul import checkpoint, rpc
from backhaul.worker import current
from crew import Crew

pytestmark = pytest.mark.timeout(200)

RECOVERED_WITHIN = 5.0
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts and cgroups")


@pytest.fixture(params=["unix", "tcp"])
def crew(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    monkeypatch.setenv("BACKHAUL_SECRET", "5a" * 32)
    with Crew(3, transport=request.param) as crew:
        baseline.note_all(crew)
        yield crew


def join(place: dict[str, Any], changes: dict[str, Any]) -> None:
    for name, value in changes.items():
        setattr(place["rpc_backend_options"], name, value)
    rpc.init_rpc(**place)


def too_large(
    crew: Crew, size: int, measure: Measure, *, error: str = "", attempt: Callable[[str, int], str] = load.try_large
) -> None:
    """Send worker1 a message that it cannot take. Only that call fails, with the reason."""
    crew[0].run(load.start_calls, ["worker1", "worker2"])
    running = crew[2].start(load.call, "worker1", load.block, "unrelated")
    crew[1].run(load.await_entered, "unrelated")
    begun = time.time()
    found = crew[0].run(attempt, "worker1", size)
    assert found.startswith(error), found
    assert "LostError" not in found, found
    assert "bytes" in found, "it names the sizes"
    measure.note(found.splitlines()[0][:150])
    measure.seconds("after", time.time() - begun, within=RECOVERED_WITHIN)
    crew[1].run(load.open_gate, "unrelated")
    assert not running.result(20).error
    books = crew[0].run(load.stop_calls)
    load.assert_sound(books, [crew[rank].run(load.runs) for rank in (1, 2)])
    assert not books[0].failed, books[0].failed
    crew[0].run(load.call_until_good, "worker1", RECOVERED_WITHIN)


@pytest.fixture(params=["unix", "tcp"])
def limited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Crew]:
    """worker1 takes messages of up to 8 MiB, and the others do not know that."""
    monkeypatch.setenv("BACKHAUL_SECRET", "5a" * 32)
    with Crew(3, group=False, transport=request.param) as crew:
        joining = [
            hand.start(join, crew.place(rank, 3), {"max_message_bytes": 8 << 20} if rank == 1 else {})
            for rank, hand in enumerate(crew)
        ]
        for each in joining:
            each.result(60)
        yield crew


@pytest.mark.slow
@pytest.mark.fault("a message larger than the callee's max_message_bytes", "that call fails and says so; no other does")
def test_a_message_larger_than_the_limit(measure: Measure, limited: Crew) -> None:
    too_large(limited, 8 << 20, measure)


@pytest.mark.slow
@pytest.mark.fault("values larger than the callee's max_message_bytes", "that call fails and says so; no other does")
def test_values_larger_than_the_limit(measure: Measure, limited: Crew) -> None:
    too_large(limited, 20 << 20, measure, error="MemoryError", attempt=load.try_text)


@pytest.mark.slow
@pytest.mark.fault(
    "a tensor larger than the callee's address space", "a MemoryError that names the size; no call fails"
)
def test_a_tensor_larger_than_the_address_space(measure: Measure, crew: Crew) -> None:
    crew[1].run(limits.limit_memory, 300 << 20)
    too_large(crew, 128 << 20, measure, error="MemoryError")
    crew[1].run(limits.limit_memory, -1)
    assert crew[0].run(load.try_large, "worker1", 128 << 20) == "sent"


@pytest.mark.slow
@needs_root
@pytest.mark.fault("a tensor larger than the callee's memory cgroup", "a MemoryError that names the size; it lives on")
def test_a_tensor_larger_than_the_memory_cgroup(measure: Measure, crew: Crew) -> None:
    assert crew[1].process.pid is not None
    room = crew[1].run(limits.resident) + (200 << 20)
    with limits.cgroup("memory", crew[1].process.pid, {"memory.limit_in_bytes": room}):
        too_large(crew, 128 << 20, measure, error="MemoryError")


@pytest.mark.slow
@needs_root
@pytest.mark.fault("/dev/shm is full", "large tensors pass: segments do not need it")
def test_no_room_in_dev_shm(measure: Measure) -> None:
    with Crew(2, setup=tiny_shm) as crew:
        baseline.note_all(crew)
        for _ in range(2):  # the first tensor of its size goes through the socket
            assert crew[0].run(load.try_large, "worker1", 16 << 20) == "sent"
            assert crew[1].run(load.try_large, "worker0", 16 << 20) == "sent"
        measure.note("64 MiB went through a segment")
        assert crew[0].run(shared_bytes) > 60 << 20


def tiny_shm() -> None:
    limits.small_disk("/dev/shm", "4k")
    limits.fill("/dev/shm/full")


def shared_bytes() -> int:
    return sum(line.channel.shared for line in current().agent.calling())


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tcp"])
@pytest.mark.fault(
    "no descriptor is left", "connections go on; a new one fails and says so; all works when there are some"
)
def test_no_descriptors(measure: Measure, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SECRET", "5a" * 32)
    with Crew(3, transport=transport, connect_timeout=4.0) as crew:
        crew[0].run(load.call_until_good, "worker1", RECOVERED_WITHIN)
        crew[1].run(limits.take_descriptors)
        assert not crew[0].run(load.call, "worker1", load.who).error, "the connection that there is"
        found = crew[0].run(load.try_large, "worker1", 4 << 20)
        measure.note(f"16 MiB over the old connection: {found[:90]}")
        for rank, to in ((1, "worker2"), (2, "worker1")):
            begun = time.monotonic()
            found = crew[rank].run(load.call_within, 8.0, to, load.who).error
            measure.seconds(f"worker{rank} to {to} failed after", time.monotonic() - begun, within=RECOVERED_WITHIN)
            measure.note(found[:120])
            assert found
            assert rank == 2 or "descriptors" in found or "Too many open files" in found, found
        crew[1].run(limits.give_descriptors_back)
        begun = time.monotonic()
        for rank, to in ((0, "worker1"), (1, "worker2"), (2, "worker1")):
            crew[rank].run(load.call_until_good, to, RECOVERED_WITHIN)
        measure.seconds("recovered after", time.monotonic() - begun, within=RECOVERED_WITHIN)


@pytest.mark.slow
@needs_root
@pytest.mark.fault("no thread is left", "calls wait or fail with an error that says so; the connection is not deaf")
def test_no_threads(measure: Measure, crew: Crew) -> None:
    """Each nested call needs a thread, and none is left. Afterwards all works again, and the worker can leave."""
    assert crew[1].process.pid is not None
    with limits.cgroup("pids", crew[1].process.pid, {"pids.max": crew[1].run(limits.count_threads)}):
        assert not crew[1].run(limits.can_start_a_thread)
        blocked = [crew[0].start(load.call_many, "worker1", load.block, 8, 20.0)]
        found = crew[2].run(load.call_within, 10.0, "worker1", load.who)
        measure.note(f"a call meanwhile: {found.error[:100] or 'good'}")
        for number in range(8):
            crew[1].run(load.open_gate, str(number))
        outcomes = blocked[0].result(60)
        measure.note(f"{sum(not text for text in outcomes)} of 8 blocking calls were good")
        assert all(not text or "thread" in text or text.startswith("RpcTimeoutError") for text in outcomes), outcomes
    begun = time.monotonic()
    for rank in (0, 2):
        crew[rank].run(load.call_until_good, "worker1", RECOVERED_WITHIN)
    crew[1].run(load.call_until_good, "worker0", RECOVERED_WITHIN)
    measure.seconds("recovered after", time.monotonic() - begun, within=RECOVERED_WITHIN)
    assert crew[1].run(load.shut_down, False) == "done"


@pytest.mark.slow
@needs_root
@pytest.mark.fault("the disk is full in a checkpoint", "save() raises and names the worker; the last one is intact")
def test_no_disk(measure: Measure, tmp_path: Path) -> None:
    with Crew(2, group=False) as crew:
        crew[1].run(limits.small_disk, str(tmp_path), "256k")
        # Each worker writes its part. Only worker1 has parameters, and only its disk is small.
        joining = [hand.start(join, crew.place(rank, 2), {}) for rank, hand in enumerate(crew)]
        for each in joining:
            each.result(60)
        crew[0].run(training.make_trainer, ["worker1"])
        saved = str(tmp_path / "last")
        assert crew[1].run(save_here, saved, 1000) == "saved"
        begun = time.monotonic()
        found = crew[1].run(save_here, saved, 1 << 20)
        measure.seconds("failed after", time.monotonic() - begun, within=RECOVERED_WITHIN)
        assert "No space left" in found, found
        measure.note(found.splitlines()[0][:120])
        assert crew[1].run(elements_of, saved) == 1000
        assert crew[1].run(save_here, saved, 2000) == "saved"
        assert crew[1].run(elements_of, saved) == 2000


def save_here(path: str, elements: int) -> str:
    try:
        checkpoint.save({"values": torch.zeros(elements)}, path)
    except (OSError, rpc.BackhaulError) as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def elements_of(path: str) -> int:
    return int(checkpoint.read(path)["values"].numel())


# A peer that does not read.


def answer(size: int) -> torch.Tensor:
    return torch.ones(size)


@pytest.mark.slow
@pytest.mark.fault(
    "a peer that stops reading", "the sender's memory is bounded; other peers' p99 is under twice as long"
)
def test_a_peer_that_stops_reading(measure: Measure, crew: Crew, request: pytest.FixtureRequest) -> None:
    before_p99 = crew[2].run(load.p99, "worker0", 500)
    before = crew[0].run(limits.resident)
    crew[1].run(load.ask_without_reading, "worker0", answer, 1 << 20, 200)
    crew[1].signal(signal.SIGSTOP)
    p99 = crew[2].run(load.p99, "worker0", 500)
    time.sleep(3.0)
    grown = crew[0].run(limits.resident) - before
    crew[1].signal(signal.SIGCONT)
    measure.note(
        f"grew by {grown >> 20} MiB for 200 replies of 4 MiB; p99 {before_p99 * 1e3:.1f} -> {p99 * 1e3:.1f} ms"
    )
    # The queue and, between processes of one host, the same amount in segments.
    assert grown < (256 if "unix" in request.node.name else 128) << 20
    assert p99 < max(2 * before_p99, 0.02)
