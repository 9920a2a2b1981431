"""Retrying: repeats calls that the user declares repeatable when their worker is lost.

Only the loss of the called worker repeats a call: the connection ended, or the worker cannot be reached. Then it is not
known whether the function has run, so the user must say that it may run twice. An exception of the function never
repeats the call, not even a `WorkerLostError` that the function raises about another worker.

Before each repetition, the worker or its replacement must answer.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from backhaul.agent.future import Future
from backhaul.errors import BackhaulError, MisuseError, OptionError, RemoteTraceback, WorkerLostError

if TYPE_CHECKING:
    from backhaul.agent.agent import Agent
    from backhaul.agent.routes import To

DEFAULT_WITHIN = 60.0
_PROBE_SECONDS = 2.0
_PAUSE = 0.2


@dataclasses.dataclass(frozen=True)
class Retry:
    """Repeat a call at most ``times`` times, and not later than ``within`` seconds after the first loss."""

    times: int
    within: float = DEFAULT_WITHIN

    def __post_init__(self) -> None:
        if isinstance(self.times, bool) or not isinstance(self.times, int) or self.times < 0:
            raise OptionError(f"retry: times={self.times!r} must be a whole number of repetitions")
        if isinstance(self.within, bool) or not isinstance(self.within, int | float) or not self.within > 0:
            raise OptionError(f"retry: within={self.within!r} must be a number of seconds")


def checked(retry: Any) -> Retry:
    """A `Retry` from the user's ``retry`` argument, which is a `Retry` or a number of repetitions.

    Raises `OptionError`.
    """
    return retry if isinstance(retry, Retry) else Retry(retry)


class _Attempts:
    """How often a call may still be repeated, and until when."""

    def __init__(self, retry: Retry, arguments: Any) -> None:
        self._retry = retry
        self._left = retry.times
        self._tensors = [(leaf, leaf._version) for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        self.deadline = 0.0

    def repeats(self, error: WorkerLostError) -> bool:
        """Whether to repeat the call after this error. Uses up one repetition."""
        if isinstance(error.__cause__, RemoteTraceback) or not self._left:
            return False
        now = time.monotonic()
        self.deadline = self.deadline or now + self._retry.within
        self._left -= 1
        return now < self.deadline

    def require_unchanged(self) -> None:
        """Raise `MisuseError` if a tensor argument has changed since the first attempt."""
        if any(tensor._version != version for tensor, version in self._tensors):
            raise MisuseError(
                "a call with retry= cannot be repeated: a tensor among its arguments has been changed in place since "
                "it was made. Leave the arguments alone until the call is done, or pass copies"
            )


class Retrying:
    """Makes calls that may be repeated. Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._under_way = 0
        agent.idle_checks.append(lambda: not self._under_way)

    def call(self, to: To, retry: Retry, arguments: Any, call: Callable[[], Any]) -> Any:
        """The value of ``call()``, repeated if worker ``to`` is lost. Raises what the last attempt raises."""
        attempts = _Attempts(retry, arguments)
        while True:
            try:
                return call()
            except WorkerLostError as error:
                if not attempts.repeats(error) or not await_worker(self._agent, to, attempts.deadline):
                    raise
            attempts.require_unchanged()

    def call_async(self, to: To, retry: Retry, arguments: Any, call: Callable[[], Future[Any]]) -> Future[Any]:
        """`call`, but returns a future of the value. Raises at once if the call itself is wrong."""
        attempts = _Attempts(retry, arguments)
        outer: Future[Any] = Future()
        with self._lock:
            self._under_way += 1

        def settle(value: Any, error: BaseException | None = None) -> None:
            with self._lock:
                self._under_way -= 1
            outer.settle(value, error)

        def ended(done: Any) -> None:
            try:
                value = done.value()
            except WorkerLostError as error:
                lost(error)
            except BaseException as error:
                settle(None, error)
            else:
                settle(value)

        def lost(error: WorkerLostError) -> None:
            if attempts.repeats(error):
                self._agent.pool.run(lambda: again(error))
            else:
                settle(None, error)

        def again(error: WorkerLostError) -> None:
            if not await_worker(self._agent, to, attempts.deadline):
                settle(None, error)
                return
            try:
                attempts.require_unchanged()
                made = call()
            except WorkerLostError as later:
                lost(later)
            except BaseException as wrong:
                settle(None, wrong)
            else:
                made.when_done(ended)

        try:
            made = call()
        except WorkerLostError as error:
            lost(error)
        except BaseException:
            with self._lock:
                self._under_way -= 1
            raise
        else:
            made.when_done(ended)
        return outer


def await_worker(agent: Agent, to: To, deadline: float) -> bool:
    """Wait until a worker answers. Asks at least once. False at the deadline, or if ``agent`` is shut down."""
    describe = {"kind": "connection", "peer": str(to)}
    with agent.serving.pause(lambda: describe):
        while not agent.closed.is_set():
            try:
                left = max(0.0, deadline - time.monotonic())
                return agent.is_reachable(agent.membership.find(to).info, min(left, _PROBE_SECONDS) or _PROBE_SECONDS)
            except BackhaulError:
                if time.monotonic() >= deadline:
                    return False
                with agent.presence.changed:
                    agent.presence.changed.wait(_PAUSE)
    return False
