"""What Ray knows about the end of a worker's process, for peers that cannot reach it (`Agent.ask_engine`).

Each worker writes its actor into the store of its group, under the name of its process. A worker that cannot
reach a peer looks up the peer's actor, and asks Ray's control service (GCS) about it. While all is well, nothing is
asked.

Ray's public functions report on actors only through its dashboard, which need not run. So this module reads Ray's
table of actors as Ray itself does. If a version of Ray has no such table, a worker on another node whose process has
ended stays suspected until ``lost_after``, or until its successor greets.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import ray

from backhaul.agent.endings import Ending
from backhaul.agent.exits import awaited_at_exit
from backhaul.ids import Addresses
from backhaul.transport.processes import own_name

if TYPE_CHECKING:
    from torch.distributed import Store

_log = logging.getLogger(__name__)

T = TypeVar("T")

_ASK_SECONDS = 1.0
_GOES_ON = ("ALIVE", "PENDING_CREATION", "DEPENDENCIES_UNREADY")


class Life(msgspec.Struct, frozen=True):
    """A Ray process, as it describes itself to the group. A driver has no actor."""

    actor: str | None
    node: str
    pid: int


def own_life(pid: int) -> Life:
    context = ray.get_runtime_context()
    return Life(context.get_actor_id(), context.get_node_id(), pid)


def ending_of(life: Life, actor: Mapping[str, Any] | None, node_lives: bool) -> Ending | None:
    """How the process ended, from what Ray says about its actor and its node; None if it still runs. Pure."""
    if actor:
        state = actor.get("State")
        if state == "DEAD":
            return Ending(str(life.pid), f"has ended; Ray says: {cause_of(actor.get('DeathCause'))}")
        where = actor.get("Address") or {}
        moved = (actor.get("Pid"), where.get("NodeID")) != (life.pid, life.node)
        if state == "RESTARTING" or (state == "ALIVE" and moved):
            return Ending(str(life.pid), "has ended; Ray restarts its actor", replaced=True)
        if state in _GOES_ON and node_lives:
            return None
    return None if node_lives else Ending(str(life.pid), f"has ended; Ray says: node {life.node} is dead")


def cause_of(cause: Any) -> str:
    """The first sentence of Ray's explanation for a death; the others list possible causes."""
    text = str(getattr(getattr(cause, "actor_died_error_context", None), "error_message", "") or "")
    return first_sentence(text) or "the actor is dead"


def first_sentence(text: str) -> str:
    return text.strip().partition(". ")[0].strip(" .\n").replace("The actor", "the actor")


class Obituaries:
    """Tells how peers of one group have ended. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Life] = {}
        self._complained = False

    def announce(self, life: Life) -> None:
        """Tell the others which actor this process is."""
        self._store.set(_key(own_name()), msgspec.json.encode(life).decode())

    def __call__(self, addresses: Addresses) -> Ending | None:
        """How the peer at these addresses ended, according to Ray; None if Ray does not report an end."""
        try:
            return _within(_ASK_SECONDS, lambda: self._ask(addresses.process))
        except TimeoutError:
            return None
        except Exception as error:
            if not self._complained:
                self._complained = True
                _log.warning("Ray did not report whether an unresponsive worker has ended: %r", error)
            return None

    def _ask(self, process: str) -> Ending | None:
        life = self._known.get(process)
        if life is None:
            if not process:
                return None
            with awaited_at_exit(_ASK_SECONDS):
                if not self._store.check([_key(process)]):
                    return None
                life = self._known[process] = msgspec.json.decode(self._store.get(_key(process)), type=Life)
        return ending_of(life, None if life.actor is None else _actor(life.actor), _node_lives(life.node))


def _key(process: str) -> str:
    return f"backhaul/ray/{process}"


def _actor(id: str) -> Mapping[str, Any] | None:
    from ray._private.state import actors

    found: Mapping[str, Any] | None = actors(id)
    return found


def _node_lives(id: str) -> bool:
    return all(node["Alive"] for node in ray.nodes() if node["NodeID"] == id)


def _within(seconds: float, question: Callable[[], T]) -> T:
    """The answer, or `TimeoutError`: Ray and the store may wait minutes for a host that is gone."""
    answers: list[T] = []
    errors: list[Exception] = []

    def ask() -> None:
        try:
            answers.append(question())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name="ray-question", daemon=True)
    thread.start()
    thread.join(seconds)
    if answers:
        return answers[0]
    raise errors[0] if errors else TimeoutError
