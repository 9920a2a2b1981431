"""The contents of ``torch.distributed.rpc.server_process_global_profiler``: a profile of all served requests."""

from __future__ import annotations

import threading
from typing import Any

from torch.autograd import profiler_util
from torch.autograd.profiler_legacy import profile

from backhaul.agent.observing import Event, Invoked, Returned
from backhaul.remote_profile.profilers import Listener, Options
from backhaul.worker import current

__all__ = ["_server_process_global_profile"]

_EventList: Any = profiler_util.EventList


class _server_process_global_profile(profile):
    """Records every function that the current worker runs for others between `__enter__` and `__exit__`.

    These two may run on different threads, so that another worker can call them through a reference. Afterwards
    ``process_global_function_events`` has one list of events for each request, and the other members are those of
    torch's legacy profile, over all requests. A function that still runs at the end is left out.
    """

    process_global_function_events: list[list[Any]]

    def __enter__(self) -> Any:
        """Start recording."""
        if not self.enabled:
            return None
        if self.entered:
            raise RuntimeError("autograd profiler traces are not reentrant")
        self.entered = True
        options = Options(shapes=self.record_shapes, memory=self.profile_memory, cuda=self.use_cuda)
        self._requests = _Requests(current(), options)
        return self

    def __exit__(self, *_: object) -> Any:
        """Stop recording, and read the events."""
        if not self.enabled:
            return None
        found = [listener.events() for listener in self._requests.stop()]
        self.process_global_function_events = [events for events in found if events]
        events: Any = _EventList(
            [event for each in found for event in each],
            use_device="cuda" if self.use_cuda else None,
            profile_memory=self.profile_memory,
        )
        events._build_tree()
        self.function_events = events
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_requests"}


class _Requests:
    """Records the requests of a worker, each on the thread that runs it."""

    def __init__(self, worker: Any, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Listener, int]] = {}  # by thread, with the nesting depth of its functions
        self._done: list[Listener] = []
        self._stopped = False
        self._forget = worker.agent.observers.add(self._observe)

    def stop(self) -> list[Listener]:
        """The recordings of finished requests. Unfinished ones are followed to their end and dropped."""
        thread = threading.get_ident()
        with self._lock:
            self._stopped = True
            mine = self._open.pop(thread, None)
        if mine is not None:
            mine[0].end()
        self._leave()
        return self._done

    def _observe(self, event: Event) -> None:
        if type(event) is Invoked:
            self._began(event.thread)
        elif type(event) is Returned:
            self._returned(event.thread)

    def _began(self, thread: int) -> None:
        with self._lock:
            if thread in self._open:
                listener, depth = self._open[thread]
                self._open[thread] = listener, depth + 1
                return
            if self._stopped:
                return
            listener = Listener(self._options)
            self._open[thread] = listener, 1
        listener.begin()

    def _returned(self, thread: int) -> None:
        with self._lock:
            listener, depth = self._open.get(thread, (None, 0))
            if listener is None:
                return
            if depth > 1:
                self._open[thread] = listener, depth - 1
                return
            del self._open[thread]
        listener.end()
        if self._stopped:
            self._leave()
        else:
            self._done.append(listener)

    def _leave(self) -> None:
        """Stop observing once no request is being recorded. Otherwise the observer would stay forever."""
        with self._lock:
            over = self._stopped and not self._open
        if over:
            self._forget()
