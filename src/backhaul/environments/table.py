"""Which variable of the environment decides what: one row for each fact about a worker's place.

Theory of operation
-------------------
Each launcher that the environment reveals fills some rows (`launchers`). The list of launchers goes from the
innermost to the outermost: with torchrun inside srun, torchrun started this process. The first launcher in the list
that fills a row wins it.

A launcher that loses a rank or a world size may legitimately say something else: a task of Slurm that runs torchrun has
a rank among the tasks. Such nestings are known, launcher by launcher. Any other contradiction is a **problem** of the
row, which names both variables and their values. A variable that must be a number but is not is a problem too. A
problem is raised when the row is used (`Row.take`): if the program gives a rank itself, that row does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from backhaul.environments import launchers
from backhaul.environments.launchers import Launcher, Said
from backhaul.errors import OptionError

ROWS = ("rank", "world_size", "local_rank", "nodes", "address", "port", "restart", "run")
"""The fields that launchers fill."""

_COMPARED = ("rank", "world_size", "address", "port")
_WORDS = {"rank": "ranks", "world_size": "world sizes", "address": "addresses to meet at", "port": "ports to meet at"}
_OVERRIDES = {"rank": "BACKHAUL_RANK", "world_size": "BACKHAUL_WORLD_SIZE"}


class Row(NamedTuple):
    """One decided fact."""

    value: Any = None
    """None if nothing decides it."""
    source: str = ""
    """The deciding variable, or what the value is derived from."""
    over: tuple[str, ...] = ()
    """The overruled variables, as ``VARIABLE=value``."""
    problem: str = ""
    """Why the row is unusable, and what to do about it."""

    def take(self) -> Any:
        """The value. Raises `OptionError` if the row has a problem."""
        if self.problem:
            raise OptionError(self.problem)
        return self.value


class Table(NamedTuple):
    """The facts in an environment."""

    launchers: tuple[str, ...]
    """The revealed launchers, from the innermost to the outermost."""
    name: Row
    rank: Row
    world_size: Row
    local_rank: Row
    nodes: Row
    """The number of machines that the workers are on."""
    address: Row
    """The host of the store in which the group meets."""
    port: Row
    restart: Row
    """How many times the group, or this worker, has been restarted."""
    run: Row
    """Names this run of the group: its part of the store."""
    key: Row
    """The source of the cluster's key; never the key itself."""
    hints: tuple[str, ...]
    """Why launchers in the environment do not say more, and what to do about it."""
    agent_store: bool
    """Whether the launcher hosts the store, and restarts all workers at once."""


def read(environ: Mapping[str, str] | None = None, host_name: Callable[[], str] = launchers.own_name) -> Table:
    """The table for an environment, by default this process's. Raises nothing.

    ``host_name`` returns the full name of this machine. It is called only if the name is part of what a launcher says.
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
        f"{said} ({winner.name}) and {other} ({loser.name}) give this worker different {_WORDS[field]}, and it is "
        f"unclear which launcher started it: {way_out}, or give init_rpc the values"
    )


def _complete(rank: Row, world_size: Row, found: list[Launcher]) -> Row:
    """The rank, with a problem if its launcher should give a world size but does not. A bare RANK: a dynamic group."""
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
