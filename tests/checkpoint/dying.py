"""Saves in processes that are killed during a save."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from backhaul import checkpoint
from backhaul.nn import RemoteModule, parameter_rrefs
from backhaul.optim import DistributedOptimizer

SIZE = 200
CHANGING = {"mkdir", "open", "flock", "write", "flush", "fsync", "close", "__exit__", "replace", "unlink", "rmdir"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def numbered(number: int) -> dict[str, Any]:
    """Objects of one process that all contain the same number."""
    model = nn.Linear(SIZE, SIZE)
    for parameter in model.parameters():
        nn.init.constant_(parameter, number)
    optimizer = torch.optim.SGD(model.parameters(), lr=number + 1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return {"model": model, "optimizer": optimizer, "number": number}


def number_in(path: Path) -> int:
    """The number in a checkpoint, checked in all its objects."""
    found = checkpoint.read(path)
    number: int = found["number"]
    assert found["optimizer"]["param_groups"][0]["lr"] == number + 1
    states = [state["momentum_buffer"] for state in found["optimizer"]["state"].values()]
    for tensor in (*found["model"].values(), *states):
        assert bool((tensor == number).all()), f"{tensor} is not {number}"
    assert len(states) == 2
    return number


def data_directories(path: Path) -> int:
    return len(list(path.glob("data-*")))


def die_at(event: int) -> None:
    """Kill this thread's process at the given one of all calls that change files."""
    left = [event]

    def profile(_: FrameType, what: str, function: Any) -> None:
        if what == "c_call" and changes_files(function):
            if left[0] == 0:
                die()
            left[0] -= 1

    sys.setprofile(profile)


def changes_files(function: Any) -> bool:
    of_file = type(getattr(function, "__self__", None)).__module__ == "_io"
    of_system = getattr(function, "__module__", None) in ("posix", "fcntl", "_io", "io")
    return (of_file or of_system) and function.__name__ in CHANGING


def forked(work: Callable[[], None]) -> int:
    """Run a function in a forked copy of this process; returns the process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return child


def killed(child: int) -> bool:
    """Wait for a child; returns whether it was killed."""
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def kill_at_each_call(stride: int) -> tuple[int, int, int]:
    """Kill a save at each call that changes files, one after the other.

    Returns how many saves were killed, how many of these had succeeded, and how many left files behind.
    """
    deaths, came_through, left = 0, 0, 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        path = Path(directory) / "checkpoint"
        event = 0
        while True:
            old, new = 2 * event, 2 * event + 1
            checkpoint.save(numbered(old), path)
            assert data_directories(path) == 1, "a left-over has stayed"
            objects = numbered(new)

            def work(objects: dict[str, Any] = objects, event: int = event) -> None:
                die_at(event)
                checkpoint.save(objects, path)

            if not killed(forked(work)):
                assert number_in(path) == new
                return deaths, came_through, left
            found = number_in(path)
            assert found in (old, new), f"{found} is neither {old} nor {new}"
            deaths += 1
            came_through += found == new
            left += data_directories(path) > 1
            event += stride


def kill_at_random(times: int, seed: int) -> list[int]:
    """Kill a process that saves over and over, this many times; returns the number of saves of each."""
    generator = random.Random(seed)
    done = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        checkpoint.save(numbered(0), path)
        for _ in range(times):
            first = number_in(path) + 1
            reader, writer = os.pipe()

            def work(first: int = first, writer: int = writer) -> None:
                number = first
                while True:
                    checkpoint.save(numbered(number), path)
                    os.write(writer, b".")
                    number += 1

            child = forked(work)
            os.close(writer)
            # After some saves, at a random moment of the next.
            reported = 0
            for _ in range(generator.randrange(3)):
                reported += len(os.read(reader, 1))
            select.select([], [], [], generator.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            assert killed(child)
            while said := os.read(reader, 1000):
                reported += len(said)
            os.close(reader)
            # The last save that the process reported, unless the next one had already succeeded.
            found = number_in(path)
            assert found - first + 1 in (reported, reported + 1)
            done.append(found - first + 1)
    return done


class Mortal(nn.Module):
    """A module that may kill its process when it is saved."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((SIZE, SIZE), float(number)))
        self.when = "never"

    def arm(self, when: str) -> None:
        self.when = when

    def get_extra_state(self) -> Any:
        if self.when == "before it writes":
            die()
        return Deadly() if self.when == "while it writes" else None

    def set_extra_state(self, state: Any) -> None:
        pass


class Deadly:
    def __reduce__(self) -> Any:
        die()


class Fatal:
    """Kills its process when the caller collects its own part: when all workers have written."""

    def state_dict(self) -> Any:
        die()

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


HELD: dict[str, Any] = {}


def hold(number: int, workers: list[str]) -> None:
    """Make a model on workers, and an optimizer for it."""
    model = nn.ModuleList([RemoteModule(worker, Mortal, (number,)) for worker in workers])
    HELD["model"] = model
    HELD["optimizer"] = DistributedOptimizer(torch.optim.SGD, parameter_rrefs(model), lr=0.5)


def arm(worker: str, when: str) -> None:
    """Kill a worker through an object that it holds."""
    (module,) = [module for module in HELD["model"] if module.on == worker]
    module.module_rref.rpc_sync().arm(when)


def save_held(path: Path, number: int, fatal: bool = False) -> None:
    more = {"fatal": Fatal()} if fatal else {}
    checkpoint.save({**HELD, "number": number, **more}, path)


def load_held(path: Path) -> tuple[Any, list[float]]:
    """The saved number, and those in the model now."""
    number = checkpoint.load(path, HELD)["number"]
    return number, [value.mean().item() for key, value in HELD["model"].state_dict().items() if key.endswith("weight")]
