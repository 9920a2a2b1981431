"""The targets of `make fuzz`, with a few inputs in every run of the tests."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.insert(0, str(FUZZ))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns once that sparse tensors are in beta
    from live import live
    from seeds import seeds
    from targets import TARGETS, Finding, bounded, resident

    FIRST = {name: list(seeds(name)) for name in TARGETS}

EXAMPLES = {"frames": 500, "greetings": 300, "values": 400, "tensors": 400, "compressed": 300, "references": 300}
EXAMPLES |= {"gradients": 60, "contexts": 60, "notices": 60, "operators": 60}


@pytest.fixture(autouse=True)
def _no_worker_stays() -> Iterator[None]:
    yield
    live.close()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Use one thread, because torch's threads would count as memory of an input."""
    torch.set_num_threads(1)


def mutated(name: str, number: int) -> bytes:
    """An input of a target with some bytes changed, lost, repeated, inserted, or taken from another input."""
    choose = random.Random(number)
    data = bytearray(choose.choice(FIRST[name]))
    for _ in range(choose.randrange(4)):
        place = choose.randrange(len(data) + 1)
        count = choose.randrange(1, 9)
        kind = choose.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << choose.randrange(8)
        elif kind == 1:
            data[place : place + count] = choose.choice([b"\0", b"\xff", b"\x7f", b"\x80", b"\x01"]) * count
        elif kind == 2:
            del data[place : place + count]
        elif kind == 3:
            data[place:place] = data[place : place + count]
        elif kind == 4:
            data[place:place] = choose.randbytes(count)
        else:
            other = choose.choice(FIRST[name])
            data[place:] = other[choose.randrange(len(other) + 1) :]
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_the_first_inputs_pass(name: str) -> None:
    for data in FIRST[name]:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_inputs_pass(name: str) -> None:
    @settings(
        max_examples=EXAMPLES[name],
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.integers(0, 1 << 64))
    @example(0)
    def run(number: int) -> None:
        TARGETS[name](mutated(name, number))

    run()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=50, deadline=None, database=None)
@given(data=st.binary(max_size=300))
def test_random_inputs_pass(name: str, data: bytes) -> None:
    TARGETS[name](data)


def test_make_fuzz_runs_every_target() -> None:
    assert runpy.run_path(str(FUZZ / "run.py"))["NAMES"] == tuple(TARGETS)


def test_no_case_of_an_operator_ends_a_child() -> None:
    """The same as `make fuzz` tries a million of."""
    command = [
        sys.executable,
        str(FUZZ / "operator_cases.py"),
        "--cases",
        "1000",
        "--seed",
        str(random.randrange(1 << 40)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1000 cases in" in done.stdout


# Inputs that once found a bug.

FOUND = {
    "a notice about a value of another owner, which is then freed as ours": (
        "references",
        "0087156c75ad56b1efbf74558e",
    ),
    "a reference that this worker is about to make, made up by a peer": (
        "references",
        "00 09007209 02000000 02000000 03010000 01000000",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_inputs_that_once_failed_pass(name: str) -> None:
    target, data = FOUND[name]
    TARGETS[target](bytes.fromhex(data))


def test_inputs_that_take_too_much_memory_or_time_are_found() -> None:
    kept: list[bytes] = []

    def greedy(data: bytes) -> None:
        before = resident()
        while resident() - before < 40 << 20:
            kept.append(bytes(1 << 20))

    with pytest.raises(Finding, match=r"0 bytes took \d+ MiB"):
        bounded(greedy)(b"")

    def slow(data: bytes) -> None:
        end = time.thread_time() + 1.01
        while time.thread_time() < end:
            pass

    with pytest.raises(Finding, match=r"0 bytes took 1\.0 s"):
        bounded(slow)(b"")
