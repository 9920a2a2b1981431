"""What the workers of one launch share, and the environment variables that tell them."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from types import TracebackType

from backhaul.directories import PrivateDirectory
from backhaul.errors import OptionError
from backhaul.security.keys import KEY_FILE_VARIABLE

LOOPBACK = "127.0.0.1"

INIT_METHOD_VARIABLE = "BACKHAUL_INIT_METHOD"
NAME_VARIABLE = "BACKHAUL_NAME"
RESTARTS_VARIABLE = "BACKHAUL_RESTARTS"
"""Tells a restarted worker how many restarts it has had."""
RUNTIME_DIR_VARIABLE = "BACKHAUL_RUNTIME_DIR"
SECRET_VARIABLE = "BACKHAUL_SECRET"

NOT_INHERITED = (KEY_FILE_VARIABLE, NAME_VARIABLE, RESTARTS_VARIABLE)
"""Variables that workers on other hosts must not inherit from their login: they would override those of the launch."""


def added(env: Mapping[str, str] | None) -> dict[str, str]:
    """The variables that a user adds to the workers' environment. Raises `OptionError` unless all of it is text."""
    found = {} if env is None else dict(env)
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise OptionError(f"env: {name!r}: {value!r} must be a variable and its value, both strings")
    return found


class Session:
    """A private directory, a secret and a free port; `close` removes the directory."""

    def __init__(self) -> None:
        self._private = PrivateDirectory()
        self.directory = self._private.path
        self.secret = secrets.token_hex(32)
        self.master_port = free_port()

    @property
    def init_method(self) -> str:
        return f"file://{self.directory}/store"

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """The variables of worker ``rank``: torchrun's and ours."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self.master_port),
            INIT_METHOD_VARIABLE: self.init_method,
            SECRET_VARIABLE: self.secret,
            RUNTIME_DIR_VARIABLE: self.directory,
        }

    def close(self) -> None:
        self._private.remove()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()


def free_port() -> int:
    """A loopback port on which nothing listens now.

    Another program may take the port before a worker binds it. Backhaul itself meets
    through a file and does not depend on the port. The port is for scripts that
    also use ``torch.distributed``.
    """
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
