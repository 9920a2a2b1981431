"""Where a worker would listen, which address it would announce, and where its group meets."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import tempfile
from urllib.parse import urlsplit

from backhaul.doctor.report import Report
from backhaul.environments.reach import unreachable
from backhaul.environments.table import Table
from backhaul.errors import OptionError
from backhaul.options import RpcOptions
from backhaul.transport.hosts import Site, choose_site

# Repeated here, because the modules that define them import torch.
RUNTIME_DIR_VARIABLE = "BACKHAUL_RUNTIME_DIR"
INIT_METHOD_VARIABLE = "BACKHAUL_INIT_METHOD"

_PATIENCE = 1.0  # seconds for the host of the store to answer


def listening(report: Report, options: RpcOptions, credentials: str) -> Site | None:
    """Where TCP would listen, or None. ``credentials`` is the kind of credentials."""
    report.section("listening")
    if options.transport == "tcp" or not options.policy.is_one_user:
        report.fact("unix sockets", "none: all goes over TCP", directory=None)
    else:
        _unix(report)
    if options.transport == "unix":
        report.fact("TCP", "none: transport 'unix'", address=None)
        return None
    try:
        site = choose_site(options)
    except OptionError as error:
        report.fault(str(error))
        report.fact("TCP", "not possible: see below", address=None)
        return None
    host, port = str(site.address[0]), options.port
    reach = "this machine only" if site.is_loopback else "other machines can connect"
    if credentials in ("none", "bad"):
        why = "no credentials to tell peers from strangers" if credentials == "none" else "see below"
        report.fact("TCP", f"nothing: {why}", address=None)
    else:
        report.fact("TCP", f"{host}, {f'port {port}' if port else 'any free port'}: {reach}", address=host, port=port)
        report.fact("announces", f"{site.announced}: {site.why}", address=site.announced, why=site.why)
    return site


def _unix(report: Report) -> None:
    directory = os.environ.get(RUNTIME_DIR_VARIABLE)
    if directory is None:
        text = f"a new directory of mode 0700 in {tempfile.gettempdir()}, for each worker"
        report.fact("unix sockets", text, directory=tempfile.gettempdir())
        return
    try:
        mode = stat.S_IMODE(os.stat(directory).st_mode)
    except OSError as error:
        report.fact("unix sockets", f"{directory}: {error.strerror}", directory=directory)
        report.fault(
            f"the directory {directory} for sockets ({RUNTIME_DIR_VARIABLE}) is unusable: {error.strerror}. Unset "
            f"the variable, or `mkdir -m 700 {directory}`"
        )
        return
    text = f"{directory}, mode {mode:04o} ({RUNTIME_DIR_VARIABLE})"
    report.fact("unix sockets", text, directory=directory, mode=f"{mode:04o}")


def meeting(report: Report, options: RpcOptions, site: Site | None, said: Table) -> None:
    """Where the group meets, and whether that place exists."""
    report.section("meeting")
    method, source = options.init_method, "the option init_method"
    if method.startswith("env://"):
        inherited = os.environ.get(INIT_METHOD_VARIABLE)
        address, port = said.address.value, said.port.value
        if inherited:
            method, source = inherited, INIT_METHOD_VARIABLE
        elif address and port is not None:
            bracketed = f"[{address}]" if ":" in address else address
            method, source = f"tcp://{bracketed}:{port}", f"{said.address.source} and {said.port.source}"
            if said.rank.value == 0 and not said.agent_store and (objection := unreachable(said)):
                report.fault(objection)
        else:
            text = "not known: start the worker with `backhaul run` or torchrun, or give init_method"
            report.fact("init method", text, method=None)
            if said.launchers and not (said.address.problem or said.port.problem):
                report.fault(
                    "nothing says where the group of this process meets: set MASTER_ADDR and MASTER_PORT, or give "
                    f"init_method if the program does{_hinted(said)}"
                )
            return
    report.fact("init method", f"{method} ({source})", method=method)
    url = urlsplit(method)
    if url.scheme == "file":
        _file(report, url.path)
        return
    if said.launchers and said.rank.value is None and not said.rank.problem and not said.agent_store:
        report.fault(
            f"a worker of a group that meets over TCP needs a rank, and {said.launchers[0]} gives this process none: "
            f"set RANK{_hinted(said)}"
        )
    for each in url.netloc.split(","):
        address = urlsplit(f"{url.scheme}://{each}")
        try:
            store_port = address.port
        except ValueError:
            store_port = None
        if url.scheme != "tcp" or not address.hostname or store_port is None:
            report.fault(
                f"init method {method!r} ({source}) must be like tcp://10.0.0.1:29500 or file:///tmp/meeting-point"
            )
            return
        _store(report, address.hostname, store_port, site, said)


def _hinted(said: Table) -> str:
    return "".join(f". {hint}" for hint in said.hints)


def _file(report: Report, path: str) -> None:
    directory = os.path.dirname(path)
    if not path or not os.path.isdir(directory) or os.path.isdir(path):
        report.fault(f"the group is to meet in {path!r}, which must be a file in an existing directory")
    elif not os.access(path if os.path.exists(path) else directory, os.W_OK):
        report.fault(
            f"the group is to meet in {path!r}, which this user cannot write: grant write access, or choose another "
            "file"
        )
    else:
        report.fact("store", f"the file {path}, for hosts that share it", path=path)


def _store(report: Report, host: str, port: int, site: Site | None, said: Table) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        report.fault(f"the group is to meet at {host}, which has no known address: {error}. Give an address instead")
        return
    where = ipaddress.ip_address(str(address[0]).partition("%")[0])
    reach = (
        "of this machine only"
        if where.is_loopback
        else "on all interfaces"
        if where.is_unspecified
        else "beyond loopback"
    )
    rank = said.rank.value
    mine = _can_bind(family, (address[0], 0, *address[2:]))
    data = {"host": host, "port": port, "here": mine, "loopback": where.is_loopback}
    hosts = rank == 0 and not said.agent_store
    if not mine and hosts:
        report.fact("store", f"on another machine, {host}, port {port}", **data)
        report.fault(
            f"this is rank 0, which hosts the store, but {host} is not an address of this machine: start rank 0 there, "
            "or give an address of this one"
        )
        return
    if not mine:
        answer = _answers(family, address)
        report.fact("store", f"on another machine, {host}, port {port}: {answer or 'it answers'}", **data)
        if answer is not None:
            report.note(
                f"nobody answers at {host}, port {port} ({answer}): if rank 0 runs there, check whether a "
                "firewall blocks this port"
            )
        return
    report.fact("store", f"on this machine, {host}, port {port}, {reach}; rank 0 hosts it", **data)
    if not where.is_loopback:
        report.note(
            f"the store at {host}:{port} authenticates nobody: anyone who reaches it can keep workers from finding "
            "each other, and no more"
        )
    elif site is not None and not site.is_loopback:
        report.note(
            f"the group meets at {host}, which only this machine can reach: for workers on other machines, give an "
            "address that they can reach"
        )
    if hosts and not _can_bind(family, address):
        report.fault(f"this is rank 0, which hosts the store, and port {port} of {host} is taken: choose another port")


def _can_bind(family: int, address: object) -> bool:
    """Whether the address belongs to this machine and its port is free."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)  # type: ignore[arg-type]
        except OSError:
            return False
    return True


def _answers(family: int, address: object) -> str | None:
    """Why nothing answers at the address; None if something does."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(_PATIENCE)
        try:
            sock.connect(address)  # type: ignore[arg-type]
        except TimeoutError:
            return "no answer"
        except OSError as error:
            with contextlib.suppress(KeyError):
                return errno.errorcode[error.errno or 0] + f", {error.strerror}"
            return str(error)
    return None
