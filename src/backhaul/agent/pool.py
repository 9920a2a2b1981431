"""Pool: threads for jobs. The pool grows without bound and keeps a few idle threads warm."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
_IDLE_SECONDS = 10.0

Job = Callable[[], None]


class _Spare:
    """A thread of the pool. It sleeps on its lock until it gets a job."""

    __slots__ = ("job", "lock", "thread")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.job: Job | None = None
        self.thread: threading.Thread | None = None


class Pool:
    """Runs each job at once, on an idle thread if there is one, else on a new thread. Thread-safe.

    ``enter`` runs first on every new thread. Idle threads beyond ``keep`` end after a while.
    """

    def __init__(self, name: str, keep: int, enter: Callable[[], None]) -> None:
        self._name = name
        self._keep = keep
        self._enter = enter
        # Appending and popping are atomic. A thread on the list is idle, and a caller that pops it must give it a job.
        # Last in, first out: the thread that ran last is the warmest.
        self._idle: list[_Spare] = []
        self._threads: set[threading.Thread] = set()
        self._starting = threading.Lock()
        self._closed = False

    def run(self, job: Job) -> None:
        """Run ``job`` on another thread now. Never waits. Raises `RuntimeError` if no thread can be started."""
        try:
            spare = self._idle.pop()
        except IndexError:
            spare = _Spare()
            spare.job = job
            spare.thread = threading.Thread(target=self._serve, args=(spare,), name=self._name, daemon=True)
            with self._starting:
                self._threads.add(spare.thread)
                try:
                    spare.thread.start()
                except BaseException:  # no thread can be started
                    self._threads.discard(spare.thread)
                    raise
        else:
            spare.job = job
            spare.lock.release()

    def run_or_do(self, job: Job) -> None:
        """Run ``job`` on another thread, or on this one if no thread can be started or the pool is closed."""
        if self._closed:
            job()
            return
        try:
            self.run(job)
        except RuntimeError:
            job()

    @property
    def size(self) -> int:
        return len(self._threads)

    def close(self, deadline: float) -> None:
        """End the idle threads, and wait for the others until the deadline."""
        self._closed = True
        while self._idle:
            try:
                self._idle.pop().lock.release()
            except IndexError:
                break
        while True:  # a thread may start another one while this one waits for it
            with self._starting:
                # Copied in one step: threads that end take themselves off the set meanwhile.
                threads = [thread for thread in list(self._threads) if thread is not threading.current_thread()]
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if not threads or time.monotonic() >= deadline:
                return

    def _serve(self, spare: _Spare) -> None:
        self._enter()
        try:
            while spare.job is not None:
                job, spare.job = spare.job, None
                try:
                    job()
                except Exception:
                    _log.exception("a job of the pool failed")
                del job
                if self._closed:
                    return
                self._idle.append(spare)
                # close() may have looked before this thread was on the list.
                if self._is_closed() and self._withdraw(spare):
                    return
                self._sleep(spare)
        finally:
            if spare.thread is not None:
                self._threads.discard(spare.thread)

    def _is_closed(self) -> bool:
        return self._closed

    def _sleep(self, spare: _Spare) -> None:
        """Sleep until this thread has a job, or must end without one."""
        while not spare.lock.acquire(timeout=_IDLE_SECONDS if len(self._idle) > self._keep else -1):
            if len(self._idle) > self._keep and self._withdraw(spare):
                return

    def _withdraw(self, spare: _Spare) -> bool:
        """Take a thread off the list. False if another thread has just popped it to give it a job."""
        try:
            self._idle.remove(spare)
        except ValueError:
            return False
        return True
