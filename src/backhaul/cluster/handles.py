"""The handles of a cluster: its workers as the driver sees them, however their processes were started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from backhaul.errors import MisuseError, UnknownWorkerError, WorkerLostError
from backhaul.launch import interactive

if TYPE_CHECKING:
    from backhaul.agent.future import Future
    from backhaul.agent.retrying import Retry
    from backhaul.ids import WorkerInfo
    from backhaul.worker import Worker


class WorkerHandle:
    """A worker of a cluster, as the driver sees it."""

    def __init__(self, driver: Worker | None, info: WorkerInfo) -> None:
        """``driver`` is None if this process is not in the group."""
        self._driver = driver
        self.info = info

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def pid(self) -> int:
        """The id of the worker's process, on its machine."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        """Whether the worker's process runs, as far as this process knows."""
        raise NotImplementedError

    def rpc_sync(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = -1.0,
        *,
        retry: Retry | int = 0,
    ) -> Any:
        """`backhaul.rpc.rpc_sync` to this worker."""
        return self._caller().rpc_sync(self.name, func, args, kwargs, timeout, retry=retry)

    def rpc_async(
        self,
        func: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = -1.0,
        *,
        retry: Retry | int = 0,
    ) -> Future[Any]:
        """`backhaul.rpc.rpc_async` to this worker."""
        return self._caller().rpc_async(self.name, func, args, kwargs, timeout, retry=retry)

    def _caller(self) -> Worker:
        if self._driver is None:
            raise MisuseError(
                f"this process is not in the group of worker {self.name!r} and cannot call it: run functions on the "
                "workers with run(), or leave out driver=False"
            )
        return self._driver


Handle = TypeVar("Handle", bound=WorkerHandle)


class Workers(Sequence[Handle]):
    """The workers of a cluster, by rank; a context manager. Subclasses say how processes start and end."""

    def __init__(self, workers: Sequence[Handle]) -> None:
        self._owner = os.getpid()
        self._closed = False
        self._workers = list(workers)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}{' (closed)' if self._closed else ''} {self._workers}>"

    def __len__(self) -> int:
        return len(self._workers)

    @overload
    def __getitem__(self, index: int) -> Handle: ...
    @overload
    def __getitem__(self, index: slice) -> list[Handle]: ...
    def __getitem__(self, index: int | slice) -> Handle | list[Handle]:
        return self._workers[index]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(graceful=kind is None)

    def close(self, graceful: bool = True, timeout: float = 0) -> None:
        """Leave the group and end the workers. May be called again."""
        raise NotImplementedError

    def _of_name(self, name: str) -> Handle:
        """The worker to restart. Raises `MisuseError` or `UnknownWorkerError`."""
        if self._closed:
            raise MisuseError(f"this cluster is closed, and worker {name!r} with it; start another one")
        for worker in self._workers:
            if worker.name == name:
                return worker
        names = ", ".join(repr(worker.name) for worker in self._workers)
        raise UnknownWorkerError(f"there is no worker {name!r} to restart; this cluster has {names}")

    def _shut_down(self, driver: Worker, graceful: bool, timeout: float) -> None:
        """Make the driver leave the group."""
        from backhaul import rpc

        try:
            with driver.as_current():
                rpc.shutdown(graceful, timeout)
        except WorkerLostError:
            pass  # logged when it happened, and raised by every call that waited for that worker

    def _define(self, definitions: list[interactive.Definition]) -> None:
        self._define_on(self._workers, definitions)

    def _define_on(self, workers: Sequence[Handle], definitions: list[interactive.Definition]) -> None:
        """Send the definitions to the workers. A lost worker needs none, and the next call to it raises."""
        futures = []
        for worker in workers:
            try:
                futures.append(worker.rpc_async(interactive.apply, (definitions,)))
            except WorkerLostError:
                continue
        for future in futures:
            try:
                future.wait()
            except WorkerLostError:
                continue
