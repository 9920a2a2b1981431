"""Every exception that Backhaul raises on its own account.

::

    BackhaulError(RuntimeError)
    ├── MisuseError                 yours: the call cannot work as written
    │   ├── OptionError(ValueError)     an argument or option out of its range
    │   ├── NotInitializedError         no worker here: call init_rpc first
    │   ├── ForkedError                 a worker does not survive a fork
    │   ├── UnknownWorkerError          no worker of that name or rank
    │   ├── ContextError                a distributed autograd context that is over, or not the right one
    │   └── UnsendableError(TypeError)  a value or function that cannot travel
    ├── ProtocolError               theirs: bytes that no correct peer sends
    ├── AuthenticationError         a peer that may not talk to us, or we to it
    ├── RefusedError                a peer that we may talk to, but that does not do this for us
    │   └── QuotaError                  it does, but not so much of it
    ├── WorkerLostError(ConnectionError)   the peer died, left or cannot be reached
    │   ├── WorkerUnresponsiveError        the peer is there but does not answer
    │   └── WorkerSuspectedError           the peer cannot be reached now; whether it is dead is not known
    ├── RpcTimeoutError(TimeoutError)      the deadline passed
    ├── LeakError                   references were left at a graceful shutdown (option forbid_leaks)
    ├── PartialError                work on several workers at once: some have done it and some have not
    └── RemoteError                 user code raised there, and its type cannot be had here

An exception that user code raises on another worker is raised here as the same
type where that type can be had; `RemoteTraceback` is then its ``__cause__``.
"""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType

_PACKAGE = os.path.dirname(__file__) + os.sep


class BackhaulError(RuntimeError):
    """Base of all errors of Backhaul itself."""


class MisuseError(BackhaulError):
    """The call cannot work as written; the message says what to do instead."""


class OptionError(MisuseError, ValueError):
    """An argument or an option is out of its range."""


class NotInitializedError(MisuseError):
    """There is no worker in this process or context."""


class ForkedError(MisuseError):
    """The worker was made before a fork; the child has to make its own."""


class UnknownWorkerError(MisuseError):
    """No worker has that name or rank; the message lists those that exist."""


class ContextError(MisuseError):
    """A distributed autograd context that does not exist, is over, or is not the one that it should be."""


class UnsendableError(MisuseError, TypeError):
    """A value or a function that cannot travel to another worker."""


class ProtocolError(BackhaulError):
    """Bytes that no correct peer sends. The connection they came on is closed."""


class AuthenticationError(BackhaulError):
    """One side of a connection did not prove that it belongs to the group."""


class RefusedError(BackhaulError):
    """In federation: the other worker does not let this one do that.

    Its text is the same whether there is such a thing or not. What was refused, and why, is in the other's log.
    """


class QuotaError(RefusedError):
    """More than the other worker allows this one to have of something at a time: see `options.Quotas`."""


class WorkerLostError(BackhaulError, ConnectionError):
    """The peer died, left the group or cannot be reached.

    ``worker`` is its name.
    """

    explained = False
    """The message says why; there is nothing to be learnt about it from a launcher."""

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str]]:
        return type(self), (str(self), self.worker)


class WorkerUnresponsiveError(WorkerLostError):
    """The peer's process may be there, but it has not answered for too long."""


class WorkerSuspectedError(WorkerLostError):
    """The peer cannot be reached now, and whether it is dead is not known.

    Nothing was sent. References to the peer's values are kept, and work again once it answers.
    """


class RpcTimeoutError(BackhaulError, TimeoutError):
    """A call, or another wait, was not over at its deadline."""


class LeakError(BackhaulError):
    """Values that other workers still hold at the end of a graceful shutdown."""


class PartialError(BackhaulError):
    """Work on several workers at once that not all of them have done.

    ``done`` names those that have, ``errors`` has what the others raised, by their names. A worker whose error is a
    `WorkerLostError` or an `RpcTimeoutError` may have done its part before.
    """

    def __init__(
        self, what: str, done: Sequence[str] = (), errors: Mapping[str, BaseException] = MappingProxyType({})
    ) -> None:
        super().__init__(what, tuple(done), dict(errors))
        self.what = what
        self.done = tuple(done)
        self.errors = dict(errors)

    def __str__(self) -> str:
        lines = [f"{self.what} failed on {len(self.errors)} of {len(self.errors) + len(self.done)} workers"]
        for worker, error in self.errors.items():
            doubt = ", and may have been done" if isinstance(error, WorkerLostError | RpcTimeoutError) else ""
            lines.append(f"  on {worker!r} it failed{doubt}: {type(error).__name__}: {error}")
        lines.append("  it is done on " + (", ".join(map(repr, self.done)) or "no worker"))
        return "\n".join(lines)


class RemoteError(BackhaulError):
    """User code raised on another worker, and the exception's type cannot be had here.

    ``worker`` names the worker, ``type_name`` the type, ``remote_traceback`` is its text.
    """

    def __init__(self, message: str, worker: str = "", type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, str, str, str]]:
        return type(self), (str(self), self.worker, self.type_name, self.remote_traceback)


class RemoteTraceback(Exception):
    """The text of a traceback on another worker: the ``__cause__`` of what is raised here."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"\n\nTraceback on worker {self.worker!r}:\n{self.text}"


def kept(error: BaseException, worker: str) -> BaseException:
    """A copy of an exception that can be kept for long: the text of its traceback is its cause.

    A traceback refers to frames, these to the frames that called them, and all of them to what they
    work on: kept in a future, or for a value that could not be made, it would come to keep its own keeper.
    """
    found = fresh(error)
    frames = user_frames(error.__traceback__)
    if frames is not None:
        text = "".join(traceback.format_exception(type(error), error, frames))
        found.__cause__ = RemoteTraceback(worker, text)
    return found.with_traceback(None)


def fresh(error: BaseException) -> BaseException:
    """A copy of a kept exception, to be raised in its place: it will collect the frames that it passes."""
    try:
        found = copy.copy(error)
    except Exception:  # its __init__ wants other arguments than it passed on
        found = type(error).__new__(type(error), *error.args)
        found.__dict__.update(error.__dict__)
    if type(found) is not type(error):
        return error
    found.__cause__ = error.__cause__
    found.__suppress_context__ = error.__suppress_context__
    return found.with_traceback(error.__traceback__)


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the leading frames of this package, which tell a user nothing."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frames = frames.tb_next
    return frames
