"""Every exception that Backhaul raises on its own account.

::

    BackhaulError(RuntimeError)
    ├── MisuseError                 yours: the call cannot work as written
    │   ├── OptionError(ValueError)     an argument or option out of its range
    │   ├── NotInitializedError         no worker here: call init_rpc first
    │   ├── ForkedError                 a worker does not survive a fork
    │   ├── UnknownWorkerError          no worker of that name or rank
    │   ├── ContextError                a distributed autograd context that has ended, or is not the expected one
    │   └── UnsendableError(TypeError)  a value or function that cannot be sent
    ├── ProtocolError               theirs: bytes that no correct peer sends
    ├── AuthenticationError         one side of a connection may not talk to the other
    ├── RefusedError                the peer may talk to us, but refuses this request
    │   └── QuotaError                  the request exceeds a quota of the peer
    ├── WorkerLostError(ConnectionError)   the peer died, left or is unreachable
    │   ├── WorkerUnresponsiveError        the peer may be running but does not answer
    │   └── WorkerSuspectedError           the peer is unreachable now and may be dead
    ├── RpcTimeoutError(TimeoutError)      the deadline passed
    ├── LeakError                   references were left at a graceful shutdown (option forbid_leaks)
    ├── PartialError                an operation on several workers succeeded on some and failed on others
    └── RemoteError                 user code raised there, and the exception's type is not available here

An exception that user code raises on another worker is raised here with the same
type if that type is available; its ``__cause__`` is then a `RemoteTraceback`.
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
    """The worker was made before a fork; the child process must make its own."""


class UnknownWorkerError(MisuseError):
    """No worker has that name or rank; the message lists those that exist."""


class ContextError(MisuseError):
    """The distributed autograd context does not exist, has ended, or is not the expected one."""


class UnsendableError(MisuseError, TypeError):
    """The value or function cannot be sent to another worker."""


class ProtocolError(BackhaulError):
    """The peer sent bytes that no correct peer sends. The connection is closed."""


class AuthenticationError(BackhaulError):
    """One side of a connection did not prove that it belongs to the group."""


class RefusedError(BackhaulError):
    """In a federation: the other worker does not allow this request.

    The message is the same whether or not the requested thing exists. The other worker logs what it refused and why.
    """


class QuotaError(RefusedError):
    """The request exceeds a quota that the other worker has for this one: see `options.Quotas`."""


class WorkerLostError(BackhaulError, ConnectionError):
    """The peer died, left the group or is unreachable.

    ``worker`` is the peer's name.
    """

    explained = False
    """True if the message already says why; a launcher then has nothing to add."""

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str]]:
        return type(self), (str(self), self.worker)


class WorkerUnresponsiveError(WorkerLostError):
    """The peer's process may be running, but has not answered for too long."""


class WorkerSuspectedError(WorkerLostError):
    """The peer is unreachable now, and may be dead.

    Nothing was sent. References to the peer's values are kept, and work again once the peer answers.
    """


class RpcTimeoutError(BackhaulError, TimeoutError):
    """A call, or another wait, did not finish before its deadline."""


class LeakError(BackhaulError):
    """Other workers still hold values of this worker at the end of a graceful shutdown."""


class PartialError(BackhaulError):
    """An operation on several workers failed on at least one of them.

    ``done`` names the workers on which the operation succeeded. ``errors`` maps the names of the others to what they
    raised. A worker whose error is a `WorkerLostError` or an `RpcTimeoutError` may still have done its part.
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
            doubt = ", but may have done its part" if isinstance(error, WorkerLostError | RpcTimeoutError) else ""
            lines.append(f"  worker {worker!r} failed{doubt}: {type(error).__name__}: {error}")
        lines.append("  done on " + (", ".join(map(repr, self.done)) or "no worker"))
        return "\n".join(lines)


class RemoteError(BackhaulError):
    """User code raised on another worker, and the exception's type is not available here.

    ``worker`` names the worker, ``type_name`` names the type, and ``remote_traceback`` is the text of the traceback.
    """

    def __init__(self, message: str, worker: str = "", type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type[RemoteError], tuple[str, str, str, str]]:
        return type(self), (str(self), self.worker, self.type_name, self.remote_traceback)


class RemoteTraceback(Exception):
    """The text of a traceback on another worker. It is the ``__cause__`` of the exception raised here."""

    def __init__(self, worker: str, text: str) -> None:
        super().__init__(worker, text)
        self.worker = worker
        self.text = text

    def __str__(self) -> str:
        return f"\n\nTraceback on worker {self.worker!r}:\n{self.text}"


def kept(error: BaseException, worker: str) -> BaseException:
    """A copy of an exception without its traceback, safe to store. The traceback's text becomes the cause.

    A traceback refers to frames, and frames refer to their callers and to all local variables. An exception stored
    in a future, or in place of a value, would therefore keep its own holder alive.
    """
    found = fresh(error)
    frames = user_frames(error.__traceback__)
    if frames is not None:
        text = "".join(traceback.format_exception(type(error), error, frames))
        found.__cause__ = RemoteTraceback(worker, text)
    return found.with_traceback(None)


def fresh(error: BaseException) -> BaseException:
    """A copy of a stored exception. Raise the copy: a raised exception collects frames, and the stored one must not."""
    try:
        found = copy.copy(error)
    except Exception:  # its __init__ takes other arguments than those in `args`
        found = type(error).__new__(type(error), *error.args)
        found.__dict__.update(error.__dict__)
    if type(found) is not type(error):
        return error
    found.__cause__ = error.__cause__
    found.__suppress_context__ = error.__suppress_context__
    return found.with_traceback(error.__traceback__)


def user_frames(frames: TracebackType | None) -> TracebackType | None:
    """The traceback without its leading frames from this package, which tell a user nothing."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        frames = frames.tb_next
    return frames
