"""Child processes of a process in which Backhaul is installed have it installed from their start.

Forked children need nothing. Other children are told before they import anything of the program.
"""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.spawn
from typing import Any

from backhaul.launch import members

STATEMENT = "from backhaul.dropin import install; install()"


class _Beginning:
    """Runs its code when unpickled."""

    def __init__(self, code: str) -> None:
        self._code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code,)


def tell_children() -> None:
    """Make processes install Backhaul that are spawned, made by a fork server, or workers of a `backhaul.cluster`."""
    _tell_spawned()
    _tell_fork_servers()
    members.beginning.append(STATEMENT)


def _tell_spawned() -> None:
    """A spawned process unpickles its instructions before it imports the main module; they include its search path."""
    ask = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = ask(name)
        path = f"import sys; sys.path[:] = {data['sys_path']!r}; " if "sys_path" in data else ""
        return {"backhaul": _Beginning(path + STATEMENT), **data}

    # These patches are global to the process, because a process starts processes, and not a worker.
    multiprocessing.spawn.get_preparation_data = get_preparation_data


def _tell_fork_servers() -> None:
    """Make fork servers import this package first.

    The server would import the main module before all others, but that must come after us. So each process does it
    itself.
    """
    server: Any = multiprocessing.forkserver._forkserver
    start = server.ensure_running

    def ensure_running() -> None:
        wanted = server._preload_modules
        if wanted:
            server._preload_modules = ["backhaul.dropin.__main__", *(each for each in wanted if each != "__main__")]
        try:
            start()
        finally:
            server._preload_modules = wanted

    # There is one server for the process.
    server.ensure_running = multiprocessing.forkserver.ensure_running = ensure_running
