"""A crew: real worker processes that a test drives one by one, and may kill.

The processes are forked from one that has imported torch and done nothing else, so a start takes milliseconds instead
of the seconds that the imports take. Their environment is that of the test, as with freshly started processes.

When a limit passes, the error says where each process of the crew is: on a signal, each writes the stacks of its
threads, which works even if a thread holds the GIL forever.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from backhaul import rpc

_START_SECONDS = 110
_WRITE_SECONDS = 5
_PRELOADED = ["pytest", "hypothesis", "torch", "torch.distributed", "torch.nn.parallel", "backhaul.rpc", "backhaul.nn"]


def _serve(
    pipe: Connection,
    environment: dict[str, str],
    stacks: str | None,
    setup: Callable[[], None] | None,
    place: dict[str, Any] | None,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if stacks is not None:
        faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115 as long as it lives
    torch.set_num_threads(1)
    if setup is not None:
        setup()
    if place is not None:
        rpc.init_rpc(**place)
    pipe.send(None)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer: tuple[bool, Any] = True, function(*args)
        except BaseException as error:
            answer = False, error
        try:
            pipe.send(answer)
        except Exception as error:
            pipe.send((False, RuntimeError(f"cannot be sent to the test: {answer[1]!r}: {error}")))


class _Outcome(Future[Any]):
    """The time limit of a function in a process. At the limit, the error says where the processes are."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def result(self, timeout: float | None = None) -> Any:
        if not wait([self], timeout).done:
            raise TimeoutError(f"not done in {timeout} s\n{self._where()}")
        return super().result()


class Hand:
    """One process. It runs the test's functions on its main thread, one at a time.

    ``stacks`` is a file for the stacks of its threads.
    """

    def __init__(
        self, setup: Callable[[], None] | None, place: dict[str, Any] | None, stacks: Path | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._pipe, theirs = context.Pipe()
        self._stacks = stacks
        self.where = self.stand  # and the others' stacks, in a crew
        args = (theirs, dict(os.environ), None if stacks is None else str(stacks), setup, place)
        self.process: BaseProcess = context.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()

    def stand(self) -> str:
        """The stacks of all threads of the process, if available."""
        if self._stacks is None or not self.process.is_alive():
            return "it does not say"
        before = self._written()
        self.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _WRITE_SECONDS
        text = before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            text, last = self._written(), text
            if text == last != before:  # the process has finished writing
                break
        return text[len(before) :] or "it does not say"

    def _written(self) -> str:
        assert self._stacks is not None
        return self._stacks.read_text() if self._stacks.exists() else ""

    def await_start(self) -> None:
        assert self._pipe.poll(_START_SECONDS), f"the process did not start in time\n{self.where()}"
        try:
            self._pipe.recv()
        except EOFError:
            self.process.join()
            raise AssertionError(f"the process died at its start, with {self.process.exitcode}") from None

    def start(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run the function in the process; returns a future of the outcome."""
        future = _Outcome(lambda: self.where())
        self._pipe.send((function, args))

        def receive() -> None:
            try:
                good, value = self._pipe.recv()
            except (EOFError, OSError) as error:
                future.set_exception(error)
            else:
                if good:
                    future.set_result(value)
                else:
                    future.set_exception(value)

        threading.Thread(target=receive, daemon=True).start()
        return future

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
        return self.start(function, *args).result(timeout)

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        while number == signal.SIGSTOP and not self._stands_still():
            time.sleep(0.001)  # its threads stop one after the other, without an event

    def _stands_still(self) -> bool:
        states = [
            file.read_text().rpartition(")")[2].split()[0]
            for file in Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        ]
        return set(states) == {"T"}

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        if self.process.is_alive():
            self.kill()
        self._pipe.close()
        self.process.close()


class Crew(list[Hand]):
    """Processes that are workers ``worker0``, ``worker1``, … of one group.

    ``group=None`` starts them without `init_rpc`; ``setup`` runs first in each.
    """

    def __init__(
        self,
        size: int,
        *,
        setup: Callable[[], None] | None = None,
        group: bool = True,
        world_size: int | None = -1,
        **options: Any,
    ) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.init_method = f"file://{Path(self.directory.name) / 'store'}"
        self.setup = setup
        self._options = options
        world_size = size if world_size == -1 else world_size
        super().__init__(
            Hand(setup, self.place(rank, world_size) if group else None, Path(self.directory.name) / f"stacks{rank}")
            for rank in range(size)
        )
        for hand in self:
            hand.where = self.where
        try:
            for hand in self:
                hand.await_start()
        except BaseException:
            self.close()
            raise

    def place(self, rank: int, world_size: int | None) -> dict[str, Any]:
        """The arguments of a worker of this crew for `init_rpc`."""
        options = rpc.RpcOptions(init_method=self.init_method, **self._options)
        return {"name": f"worker{rank}", "rank": rank, "world_size": world_size, "rpc_backend_options": options}

    def where(self) -> str:
        """The stacks of all threads of all processes."""
        return "\n".join(f"-- worker{rank}, {hand.process}:\n{hand.stand()}" for rank, hand in enumerate(self))

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for hand in self:
            hand.close()
        self.directory.cleanup()
