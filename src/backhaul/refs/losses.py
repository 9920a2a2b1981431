"""The exceptions that users of a reference get if its value is lost. Pure."""

from __future__ import annotations

from backhaul.errors import RpcTimeoutError, WorkerLostError
from backhaul.ids import RefId, WorkerInfo


class Names(dict[int, WorkerInfo]):
    """The workers that are known here, by rank."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: dict[int, tuple[str, int]] = {}
        """Rank -> text that says which process has replaced which, and the life of the new process."""

    def name(self, rank: int) -> str:
        info = self.get(rank)
        return f"rank {rank}" if info is None else info.name


def stale(ref: RefId, owner: WorkerInfo) -> WorkerLostError:
    """The error for a value of an earlier process that had the owner's place."""
    text = f"the value {ref} is gone: another process was worker {owner.name!r} when it was made. Create it again"
    return WorkerLostError(text, owner.name)


def lost_creation(ref: RefId, names: Names) -> WorkerLostError:
    """The error for a value whose creator is dead, or whose request never came."""
    name = names.name(ref.creator)
    return WorkerLostError(f"the value {ref} will not be made: the request of worker {name!r} for it is lost", name)


def lost_value(ref: RefId, names: Names) -> WorkerLostError:
    """The error for a value whose owner is dead, or has freed the value."""
    name = names.name(ref.owner)
    text, life = names.replaced.get(ref.owner, ("", 0))
    if text and not (life and ref.life == life):
        return WorkerLostError(f"the value {ref} is gone: {text}", name)
    return WorkerLostError(f"the value {ref} is gone: its owner, worker {name!r}, is lost or has freed it", name)


def of_creation(error: BaseException) -> BaseException:
    """The error for a reference whose creation on another worker has failed with ``error``."""
    text = f"RRef creation by rpc.remote has failed: {error}"
    if isinstance(error, WorkerLostError):
        return type(error)(text, error.worker)
    return RpcTimeoutError(text) if isinstance(error, RpcTimeoutError) else error
