"""Which hosts there are, and which worker runs where: turns ``--hosts`` and hostfiles into seats. Pure.

Ranks follow the order of the hosts. The first host has the first ranks, and so rank 0.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from backhaul.errors import OptionError

LOCALHOST = "localhost"
"""The host that needs no ssh: the launcher's own."""

_MOST = 4096
_EXAMPLE = "write them as --hosts a:2,b:2, with the number of workers after each"
_FIELDS = ("slots", "address", "python", "workdir", "ssh")


@dataclass(frozen=True)
class Host:
    """A host, as ssh names it, and its deviations from the options of the command line."""

    target: str
    """The argument for ssh: a name, an address, or ``user@name``."""
    slots: int = 1
    """The number of workers there."""
    address: str | None = None
    """The address at which workers of other hosts reach the workers of this one."""
    python: str | None = None
    workdir: str | None = None
    ssh: str | None = None

    @property
    def name(self) -> str:
        """The host's name for people: the target without the user."""
        return self.target.rpartition("@")[2]

    @property
    def is_local(self) -> bool:
        return self.target == LOCALHOST


@dataclass(frozen=True)
class Seat:
    """One worker's place."""

    rank: int
    name: str
    host: int
    """The number of its host."""
    local_rank: int
    local_world_size: int

    def environment(self, world_size: int, hosts: int) -> dict[str, str]:
        """The variables that torchrun sets for a worker at this place."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.host),
            "GROUP_WORLD_SIZE": str(hosts),
        }


def seats(hosts: Sequence[Host], names: Sequence[str]) -> list[Seat]:
    """The places of all workers, by rank; ``names`` has one for each."""
    found: list[Seat] = []
    for number, host in enumerate(hosts):
        for local_rank in range(host.slots):
            rank = len(found)
            found.append(Seat(rank, names[rank], number, local_rank, host.slots))
    return found


def parse_hosts(text: str) -> list[Host]:
    """The hosts of ``a:2,user@b,[fe80::1]:4``. Raises `OptionError`."""
    return _checked([_parse_host(item.strip(), "--hosts") for item in text.split(",")], "--hosts")


def parse_hostfile(text: str, path: str) -> list[Host]:
    """The hosts of a file: one on each line, ``b:2`` or ``b slots=2``; ``#`` starts a comment.

    ``address=``, ``python=``, ``workdir=`` and ``ssh=`` override the command line. Raises `OptionError`.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"line {number} of {path}"
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise OptionError(f"{where}: {error}: {line.strip()!r}") from None
        if words:
            found.append(_with_fields(_parse_host(words[0], where), words[1:], where))
    return _checked(found, path)


def _with_fields(host: Host, words: Sequence[str], where: str) -> Host:
    given: dict[str, str] = {}
    for word in words:
        field, equals, value = word.partition("=")
        if field not in _FIELDS or not equals or not value:
            raise OptionError(f"{where}: {word!r} is not one of {', '.join(f'{each}=…' for each in _FIELDS)}")
        if field in given:
            raise OptionError(f"{where}: {field}= is given twice")
        given[field] = value
    slots = host.slots if "slots" not in given else _slots(given["slots"], where)
    return Host(host.target, slots, given.get("address"), given.get("python"), given.get("workdir"), given.get("ssh"))


def _parse_host(text: str, where: str) -> Host:
    bracketed = re.fullmatch(r"((?:[^@\[\]]+@)?)\[([^\]]+)\](?::(.*))?", text)
    if bracketed:
        user, address, slots = bracketed.groups()
        target = user + address
    else:
        target, colon, slots = text.partition(":")
        if ":" in slots:
            raise OptionError(f"{where}: put an IPv6 address into brackets, as in [fe80::1]:2; got {text!r}")
        slots = slots if colon else None
    if not target or target.endswith("@") or target.startswith("-") or re.search(r"\s", target):
        raise OptionError(f"{where}: {text!r} names no host; {_EXAMPLE}")
    return Host(target, 1 if slots is None else _slots(slots, where))


def _slots(text: str, where: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise OptionError(f"{where}: the number of workers on a host must be 1 to {_MOST}, not {text!r}; {_EXAMPLE}")
    return int(text)


def _checked(hosts: list[Host], where: str) -> list[Host]:
    if not hosts:
        raise OptionError(f"{where} names no hosts")
    seen: set[str] = set()
    for host in hosts:
        if host.target in seen:
            raise OptionError(
                f"{where}: host {host.target!r} is named twice; name it once with all its workers, as in "
                f"{host.target}:2"
            )
        seen.add(host.target)
    return hosts
