"""Every exception that Backhaul raises on its own account.

::

    BackhaulError(RuntimeError)
    ├── MisuseError                 yours: the call cannot work as written
    │   ├── OptionError(ValueError)     an argument or option out of its range
    │   ├── NotInitializedError         no worker here: call init_rpc first
    │   ├── ForkedError                 a worker does not survive a fork
    │   ├── UnknownWorkerError          no worker of that name or rank
    │   └── UnsendableError(TypeError)  a value or function that cannot travel
    ├── ProtocolError               theirs: bytes that no correct peer sends
    ├── AuthenticationError         a peer that may not talk to us, or we to it
    ├── WorkerLostError(ConnectionError)   the peer died, left or cannot be reached
    │   └── WorkerUnresponsiveError        the peer is there but does not answer
    ├── RpcTimeoutError(TimeoutError)      the deadline passed
    └── RemoteError                 user code raised there, and its type cannot be had here

An exception that user code raises on another worker is raised here as the same
type where that type can be had; `RemoteTraceback` is then its ``__cause__``.
"""

from __future__ import annotations


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


class UnsendableError(MisuseError, TypeError):
    """A value or a function that cannot travel to another worker."""


class ProtocolError(BackhaulError):
    """Bytes that no correct peer sends. The connection they came on is closed."""


class AuthenticationError(BackhaulError):
    """One side of a connection did not prove that it belongs to the group."""


class WorkerLostError(BackhaulError, ConnectionError):
    """The peer died, left the group or cannot be reached.

    ``worker`` is its name.
    """

    def __init__(self, message: str, worker: str = "") -> None:
        super().__init__(message)
        self.worker = worker

    def __reduce__(self) -> tuple[type[WorkerLostError], tuple[str, str]]:
        return type(self), (str(self), self.worker)


class WorkerUnresponsiveError(WorkerLostError):
    """The peer's process may be there, but it has not answered for too long."""


class RpcTimeoutError(BackhaulError, TimeoutError):
    """A call, or another wait, was not over at its deadline."""


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
