"""``backhaul run -n 3 script.py [args…]``, and over several hosts with ``--hosts a:2,b:2``"""

from __future__ import annotations

import argparse
import fnmatch
import os
import select
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from backhaul.errors import OptionError
from backhaul.launch.console import Console
from backhaul.launch.guardian import Guardian
from backhaul.launch.job import Outcome, run_job
from backhaul.launch.session import NAME_VARIABLE, SECRET_VARIABLE, Session
from backhaul.launch.supervisor import Command, Process
from backhaul.news import promise, tell
from backhaul.options import HOST_VARIABLE, LOG_LEVEL_VARIABLE, LOG_LEVELS, METRICS_PORT_VARIABLE, RpcOptions
from backhaul.security.keys import KEY_FILE_VARIABLE

HOST_TIMEOUT = 30.0
CONNECT_TIMEOUT = 60.0
_SHORTEST_HOST_TIMEOUT = 1.0
_ONLY_WITH_HOSTS = ("ssh", "python", "workdir", "master_addr", "master_port", "host_timeout", "connect_timeout")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser], version: str) -> None:
    """Add ``backhaul run``. ``version`` is this package's version, which all hosts must have."""
    parser = commands.add_parser(
        "run",
        usage="backhaul run [-h] [-n N | --hosts A:N,B:N,… | --hostfile FILE] [-m] [OPTIONS] SCRIPT [ARGS …]",
        help="start a script in several worker processes, on this machine or over ssh on several hosts",
        description="Start SCRIPT in N worker processes. Each finds its rank and the group in its environment, "
        "so that backhaul.rpc.init_rpc() needs no arguments. The first worker that fails, and is not restarted, "
        "stops the others, and its exit code becomes the launcher's.",
        epilog="Everything after SCRIPT is passed to it as arguments.",
    )
    parser.add_argument("-n", "--nproc", type=int, metavar="N", help="number of workers on this machine (default: 1)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("--names", metavar="A,B,…", help="names of the workers (default: worker0,worker1,…)")
    parser.add_argument("--key-file", metavar="FILE", help="the cluster's key, as `backhaul keygen` makes it")
    parser.add_argument(
        "--host",
        metavar="HOST",
        help="address to listen on for other hosts (default: loopback; with --hosts: the address of the host)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable for the workers; without VALUE, the launcher's value; NAME may be a pattern such as NCCL_*",
    )
    parser.add_argument(
        "--metrics-port",
        type=int,
        metavar="P",
        help="serve metrics for Prometheus on loopback: worker0 on port P, worker1 on P+1, …; 0 means any ports",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart workers that fail, N times in total; a restarted worker rejoins the group (default: 0)",
    )
    parser.add_argument(
        "--rejoin",
        action="store_true",
        help="continue when a worker is lost for good, and accept a lost host again when it is back",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and start nothing")
    parser.add_argument("--log-level", choices=LOG_LEVELS, metavar="LEVEL", help=f"log level: {', '.join(LOG_LEVELS)}")
    parser.add_argument("--dropin", action="store_true", help="put Backhaul in place of torch.distributed.rpc")
    parser.add_argument("--no-color", "--no-colour", action="store_true", help="plain prefixes")
    _add_hosts(parser.add_argument_group("several hosts, over ssh"))
    parser.add_argument("script", metavar="SCRIPT", help="the script to run, followed by its arguments")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(handle=run, parser=parser, package_version=version)


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hosts",
        metavar="A:N,B:N,…",
        help="the hosts, as ssh names them, with the number of workers on each; the first host has rank 0",
    )
    group.add_argument(
        "--hostfile",
        metavar="FILE",
        help="the same as a file: lines such as `b slots=2`; also address=, python=, workdir=",
    )
    group.add_argument("--ssh", metavar="COMMAND", help="the ssh command, as in 'ssh -p 2222 -i key' (default: ssh)")
    group.add_argument("--python", metavar="PATH", help="Python on the hosts (default: the path of the launcher's)")
    group.add_argument("--workdir", metavar="DIR", help="working directory on the hosts (default: the launcher's)")
    group.add_argument(
        "--master-addr",
        metavar="ADDR",
        help="the address of the first host, where the group meets (default: the address that ssh reached)",
    )
    group.add_argument("--master-port", type=int, metavar="PORT", help="the port there (default: any free port)")
    group.add_argument(
        "--host-timeout",
        type=float,
        metavar="S",
        help=f"seconds without an answer after which a host is lost and its workers end (default: {HOST_TIMEOUT:g})",
    )
    group.add_argument(
        "--connect-timeout",
        type=float,
        metavar="S",
        help=f"seconds within which hosts must answer at the start (default: {CONNECT_TIMEOUT:g})",
    )


def run(options: argparse.Namespace) -> int:
    """Run the command line; returns the exit code."""
    parser: argparse.ArgumentParser = options.parser
    if options.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, not {options.max_restarts}")
    target = ["-m", options.script] if options.module else [options.script]
    dropin = ["-m", "backhaul.dropin"] if options.dropin else []
    argv = ["-u", *dropin, *target, *options.args]
    over_hosts = options.hosts is not None or options.hostfile is not None
    _check_together(parser, options, over_hosts)
    try:
        outcome = _run_over_hosts(parser, options, argv) if over_hosts else _run_here(parser, options, argv)
    except OptionError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): exit as SIGPIPE would make us exit.
        # Without the redirection Python would still try to flush its buffer.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    if outcome.report and not (outcome.unread and _is_full(sys.stderr)):
        print(f"backhaul: {outcome.report}", file=sys.stderr)
    return outcome.code


def _check_together(parser: argparse.ArgumentParser, options: argparse.Namespace, over_hosts: bool) -> None:
    if options.hosts is not None and options.hostfile is not None:
        parser.error("give --hosts or --hostfile, not both")
    if over_hosts and options.nproc is not None:
        parser.error("with --hosts, give the number of workers after each host instead of -n: --hosts a:2,b:2")
    if not over_hosts:
        for name in _ONLY_WITH_HOSTS:
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} is for workers on other hosts: name them with --hosts")


def _run_over_hosts(parser: argparse.ArgumentParser, options: argparse.Namespace, argv: list[str]) -> Outcome:
    # Imported here: msgspec takes time to import, and neither `backhaul --version` nor a local launch needs it.
    from backhaul.launch import over_hosts

    host_timeout = HOST_TIMEOUT if options.host_timeout is None else options.host_timeout
    connect_timeout = CONNECT_TIMEOUT if options.connect_timeout is None else options.connect_timeout
    port = 0 if options.master_port is None else options.master_port
    if not host_timeout >= _SHORTEST_HOST_TIMEOUT:
        parser.error(f"--host-timeout must be at least {_SHORTEST_HOST_TIMEOUT:g} second, not {host_timeout:g}")
    if not connect_timeout > 0:
        parser.error(f"--connect-timeout must be more than 0 seconds, not {connect_timeout:g}")
    if not 0 <= port < 1 << 16:
        parser.error(f"--master-port must be a port, 1 to 65535, or 0 for any, not {port}")
    if options.ssh is not None and not _words(options.ssh):
        parser.error(f"--ssh {options.ssh!r} is not a command, as in --ssh 'ssh -p 2222 -i key'")
    wishes = over_hosts.Wishes(
        version=options.package_version,
        script=options.script,
        module=options.module,
        argv=argv,
        hosts=options.hosts,
        hostfile=options.hostfile,
        ssh=options.ssh,
        python=options.python,
        workdir=options.workdir,
        key_file=options.key_file,
        listen_on=options.host,
        master_addr=options.master_addr,
        master_port=port,
        restarts=options.max_restarts,
        rejoin=options.rejoin,
        host_timeout=host_timeout,
        connect_timeout=connect_timeout,
    )
    hosts = over_hosts.hosts_of(wishes)
    count = sum(host.slots for host in hosts)
    names = _names(parser, options.names, count)
    environment = {**passed_on(options.env, os.environ), **_watching(options, count)}
    terms = over_hosts.terms_of(wishes, hosts, names, environment, named=bool(options.names))
    if options.dry_run:
        print(over_hosts.describe(wishes, terms))
        return Outcome(0)
    return over_hosts.run(wishes, terms, colour=not options.no_color)


def _run_here(parser: argparse.ArgumentParser, options: argparse.Namespace, argv: list[str]) -> Outcome:
    count = 1 if options.nproc is None else options.nproc
    if count < 1:
        parser.error(f"-n must be at least 1, not {count}")
    names = _names(parser, options.names, count)
    given = {**passed_on(options.env, os.environ), **_watching(options, count)}
    if options.key_file is not None:
        given[KEY_FILE_VARIABLE] = RpcOptions(key_file=options.key_file).key_file or ""
    if options.host is not None:
        given[HOST_VARIABLE] = RpcOptions(host=options.host).host or ""
    if not options.module and not os.path.exists(options.script):
        parser.error(f"no such script: {options.script}")
    with Session() as session:
        commands = []
        for rank, name in enumerate(names):
            own = session.environment(rank, count)
            if options.names:
                own[NAME_VARIABLE] = name
            env = {**os.environ, **own, **given}
            if options.dry_run:
                shown = {**own, SECRET_VARIABLE: "…", **dict.fromkeys(given, "…")}
                print(f"{name}: {shlex.join([sys.executable, *argv])}")
                print("\n".join(f"  {variable}={value}" for variable, value in shown.items()))
            commands.append(Command(name, [sys.executable, *argv], env))
        if options.dry_run:
            return Outcome(0)
        return _run(session, commands, options.max_restarts, options.rejoin, colour=not options.no_color)


def _run(session: Session, commands: list[Command], restarts: int, rejoin: bool, colour: bool) -> Outcome:
    promise(session.directory)
    left = restarts

    def on_end(process: Process, again: bool) -> None:
        nonlocal left
        tell(session.directory, process.identity, process.ending, replaced=again)
        if again:
            left -= 1
            console.say(f"{process.name} {process.ending}; it is restarted, and {left} restarts are left")

    def on_missing(process: Process) -> None:
        console.say(f"{process.name} {process.ending}; the other workers go on")

    guardian = Guardian(session.directory)
    try:
        console = Console(guardian, colour=colour)
        with console.supervisor:
            return run_job(console, commands, restarts=restarts, on_end=on_end, rejoin=rejoin, on_missing=on_missing)
    finally:
        guardian.close()


def _is_full(stream: TextIO) -> bool:
    """Whether a write to this stream would wait for its reader."""
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    return not poll.poll(0)


def _names(parser: argparse.ArgumentParser, given: str | None, count: int) -> list[str]:
    if given is None:
        return [f"worker{rank}" for rank in range(count)]
    names = given.split(",")
    if len(names) != count or len(set(names)) != count or not all(names):
        parser.error(f"--names needs {count} different names, separated by commas; got {given!r}")
    return names


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return []


def passed_on(wanted: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that ``--env`` names. Raises `OptionError`."""
    found: dict[str, str] = {}
    for each in wanted:
        name, equals, value = each.partition("=")
        if equals and name:
            found[name] = value
            continue
        matching = {variable: environ[variable] for variable in environ if fnmatch.fnmatchcase(variable, each)}
        if not matching:
            raise OptionError(f"--env {each}: the launcher has no such variable; give a value with --env {each}=…")
        found |= matching
    return found


def _watching(options: argparse.Namespace, count: int) -> dict[str, str]:
    """The command line's options for watching the workers, as variables of their environment. Raises `OptionError`."""
    given = {}
    if options.metrics_port is not None:
        RpcOptions(metrics_port=options.metrics_port)
        RpcOptions(metrics_port=options.metrics_port + count - 1)
        given[METRICS_PORT_VARIABLE] = str(options.metrics_port)
    if options.log_level is not None:
        given[LOG_LEVEL_VARIABLE] = options.log_level
    return given
