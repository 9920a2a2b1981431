"""Which variable of the environment says what: one row for each thing that a worker has to know about its place.

Theory of operation
-------------------
Each launcher that shows itself in the environment says some rows (`launchers`). The list of launchers goes from the
inside to the outside: of torchrun inside of srun, torchrun has started this process. The first launcher in the list
that says a row wins it.

A launcher that loses a rank or a world size may well say something else: a task of Slurm that runs torchrun has a rank
among the tasks. Such nestings are known, launcher by launcher. Any other contradiction is a **problem** of the row,
which names both variables and their values. The same holds for a variable that is no number. A problem is raised when
the row is used (`Row.take`): a rank that the program gives itself makes the row of no interest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from backhaul.environments import launchers
from backhaul.environments.launchers import Launcher, Said
from backhaul.errors import OptionError

ROWS = ("rank", "world_size", "local_rank", "nodes", "address", "port", "restart", "run")
"""The fields that launchers say."""

_COMPARED = ("rank", "world_size", "address", "port")
_WORDS = {"rank": "ranks", "world_size": "world sizes", "address": "addresses to meet at", "port": "ports to meet at"}
_OVERRIDES = {"rank": "BACKHAUL_RANK", "world_size": "BACKHAUL_WORLD_SIZE"}


class Row(NamedTuple):
    """One thing, decided."""

    value: Any = None
    """None if nothing says it."""
    source: str = ""
    """The variable that says it, or what it follows from."""
    over: tuple[str, ...] = ()
    """What else says something about it and was passed over, as ``VARIABLE=value``."""
    problem: str = ""
    """Why the row cannot be used, and what to do about it."""

    def take(self) -> Any:
        """The value. Raises `OptionError` if there is a problem with it."""
        if self.problem:
            raise OptionError(self.problem)
        return self.value


class Table(NamedTuple):
    """What the environment says."""

    launchers: tuple[str, ...]
    """Those that show themselves, from the inside to the outside."""
    name: Row
    rank: Row
    world_size: Row
    local_rank: Row
    nodes: Row
    """On how many machines the workers are."""
    address: Row
    """The host of the store in which the group meets."""
    port: Row
    restart: Row
    """How often the group, or this worker, has been started before."""
    run: Row
    """Names this run of the group: its part of the store."""
    key: Row
    """Where the key of the cluster comes from; never the key itself."""
    hints: tuple[str, ...]
    """What keeps a launcher in the environment from saying more."""
    agent_store: bool
    """The launcher hosts the store, and restarts all workers at once."""


def read(environ: Mapping[str, str] | None = None, host_name: Callable[[], str] = launchers.own_name) -> Table:
    """The table for an environment, by default that of this process. Raises nothing.

    ``host_name`` gives the full name of this machine. It is asked only where the name is part of what a launcher says.
    """
    environ = os.environ if environ is None else environ
    found = [each for reader in launchers.READERS if (each := reader(environ, host_name)) is not None]
    rows = {field: _decide(field, found) for field in ROWS}
    rows["world_size"] = _complete(rows["rank"], rows["world_size"], found)
    return Table(
        launchers=tuple(each.name for each in found if each.starts),
        name=_name(environ, rows["rank"]),
        key=_key(environ),
        hints=tuple(hint for each in found for hint in each.hints),
        agent_store=next((each.agent_store for each in found if each.starts), False),
        **rows,
    )


def _decide(field: str, found: list[Launcher]) -> Row:
    saying = [(each, said) for each in found if (said := each.says(field)) is not None]
    if not saying:
        return Row()
    winner, said = saying[0]
    over = tuple(str(other) for _, other in saying[1:])
    problem = said.problem
    if field in _COMPARED and not problem:
        problem = next(
            (text for each, other in saying[1:] if (text := _contradiction(field, winner, said, each, other))), ""
        )
    return Row(None if problem else said.value, said.source, over, problem)


def _contradiction(field: str, winner: Launcher, said: Said, loser: Launcher, other: Said) -> str:
    if said.derived or other.derived or loser.name in winner.inside:
        return ""
    if other.problem or said.value == other.value:
        return other.problem
    override = _OVERRIDES.get(field)
    way_out = f"set {override}, which comes first" if override else "unset one of them"
    return (
        f"{said} ({winner.name}) and {other} ({loser.name}) give this worker different {_WORDS[field]}, and nothing "
        f"tells which launcher has started it: {way_out}, or give init_rpc what it needs"
    )


def _complete(rank: Row, world_size: Row, found: list[Launcher]) -> Row:
    """A rank of a launcher that has a world size, but does not say it, is a problem. A bare RANK is a dynamic group."""
    if rank.value is None or world_size.value is not None or world_size.problem:
        return world_size
    saying = next(each for each in found if each.says("rank") is not None)
    return world_size._replace(problem=saying.how_many) if saying.how_many else world_size


def _name(environ: Mapping[str, str], rank: Row) -> Row:
    if environ.get("BACKHAUL_NAME"):
        return Row(environ["BACKHAUL_NAME"], "BACKHAUL_NAME")
    return Row() if rank.value is None else Row(f"worker{rank.value}", "the rank")


def _key(environ: Mapping[str, str]) -> Row:
    over = ("BACKHAUL_SECRET",) if environ.get("BACKHAUL_SECRET") else ()
    if environ.get("BACKHAUL_KEY_FILE"):
        return Row(environ["BACKHAUL_KEY_FILE"], "BACKHAUL_KEY_FILE", over)
    return Row("(not shown)", "BACKHAUL_SECRET") if over else Row()
