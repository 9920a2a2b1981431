"""``backhaul run --hosts a:2,b:2 script.py``: turns the command line into terms, and runs or shows them."""

from __future__ import annotations

import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backhaul.errors import OptionError
from backhaul.launch import ssh
from backhaul.launch.fleet import Fleet, Way
from backhaul.launch.job import Outcome
from backhaul.launch.placement import Host, parse_hostfile, parse_hosts, seats
from backhaul.launch.session import SECRET_VARIABLE
from backhaul.launch.terms import Terms
from backhaul.security.keys import KEY_FILE_VARIABLE, read_key_file


@dataclass(frozen=True)
class Wishes:
    """The options of the command line. None means not given."""

    version: str
    """The version of Backhaul here."""
    script: str
    module: bool = False
    argv: Sequence[str] = ()
    """The arguments of Python: the script and its own arguments included."""
    hosts: str | None = None
    hostfile: str | None = None
    ssh: str | None = None
    python: str | None = None
    workdir: str | None = None
    key_file: str | None = None
    listen_on: str | None = None
    master_addr: str | None = None
    master_port: int = 0
    restarts: int = 0
    rejoin: bool = False
    host_timeout: float = 30.0
    connect_timeout: float = 60.0


def hosts_of(wishes: Wishes) -> list[Host]:
    """Raises `OptionError`."""
    if wishes.hosts is not None:
        return parse_hosts(wishes.hosts)
    path = wishes.hostfile or ""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeError) as error:
        raise OptionError(f"cannot read the hostfile {path}: {getattr(error, 'strerror', error)}") from None
    return parse_hostfile(text, path)


def terms_of(
    wishes: Wishes, hosts: Sequence[Host], names: Sequence[str], environment: Mapping[str, str], *, named: bool
) -> Terms:
    """The terms of the launch, with the cluster's key and ``environment`` for all workers. Raises `OptionError`."""
    key_file = wishes.key_file or os.environ.get(KEY_FILE_VARIABLE)
    secret = read_key_file(key_file).hex() if key_file else secrets.token_hex(32)
    return Terms(
        version=wishes.version,
        hosts=hosts,
        seats=seats(hosts, names),
        argv=wishes.argv,
        environment={**environment, SECRET_VARIABLE: secret},
        workdir=wishes.workdir or os.getcwd(),
        script=None if wishes.module else wishes.script,
        named=named,
        restarts=wishes.restarts,
        rejoin=wishes.rejoin,
        host_timeout=wishes.host_timeout,
        connect_timeout=wishes.connect_timeout,
        master_addr=wishes.master_addr,
        master_port=wishes.master_port,
        listen_on=wishes.listen_on,
    )


def run(wishes: Wishes, terms: Terms, *, colour: bool) -> Outcome:
    """Start the workers and wait until the last has ended. Raises `BrokenPipeError` if the output has no reader."""
    inherited = {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}
    way = Way(wishes.ssh or ssh.DEFAULT, wishes.python or sys.executable, inherited)
    return Fleet(terms, way, colour=colour).run()


def describe(wishes: Wishes, terms: Terms) -> str:
    """What `run` would start, for people. Shows neither the key nor the values of variables passed on."""
    python = wishes.python or sys.executable
    first = terms.hosts[0]
    address = terms.master_addr or first.address or f"<the address of {first.name}>"
    port = str(terms.master_port) if terms.master_port else "<a free port>"
    lines = []
    for number, host in enumerate(terms.hosts):
        command = ssh.steward_argv(host, wishes.ssh or ssh.DEFAULT, python, terms.host_timeout)
        lines += [
            f"host {host.name}",
            f"  is reached by: {shlex.join(command)}",
            f"  working directory: {host.workdir or terms.workdir}",
        ]
        here = terms.listen_on or host.address or f"<the address of {host.name}>"
        for seat in terms.seats:
            if seat.host == number:
                given = terms.worker_environment(seat, address, port, here)
                lines += [
                    f"  {seat.name}: {shlex.join([host.python or python, *terms.argv])}",
                    *(f"    {name}={value}" for name, value in given.items()),
                    *(f"    {name}=…" for name in terms.environment),
                ]
    return "\n".join(lines)
