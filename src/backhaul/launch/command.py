"""``backhaul run -n 3 script.py [args…]``"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import BinaryIO

from backhaul.errors import OptionError
from backhaul.launch.guardian import Guardian
from backhaul.launch.job import Outcome, run_job
from backhaul.launch.prefix import PrefixedOutput, Write, wants_colour
from backhaul.launch.session import Session
from backhaul.launch.supervisor import Command, Process, Supervisor
from backhaul.news import promise, tell
from backhaul.options import HOST_VARIABLE, LOG_LEVEL_VARIABLE, LOG_LEVELS, METRICS_PORT_VARIABLE, RpcOptions
from backhaul.security.keys import KEY_FILE_VARIABLE


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        usage="backhaul run [-h] [-n N] [-m] [--names A,B,…] [--key-file FILE] [--host HOST] "
        "[--metrics-port P] [--max-restarts N] [--log-level LEVEL] [--dropin] [--no-color] SCRIPT [ARGS …]",
        help="start a script in several worker processes on this machine",
        description="Start SCRIPT in N worker processes. Each finds its rank and the group in its environment, "
        "so that backhaul.rpc.init_rpc() needs no arguments. The first worker that fails, and is not restarted, "
        "stops the others, and its exit code is the launcher's.",
    )
    parser.add_argument("-n", "--nproc", type=int, default=1, metavar="N", help="number of workers (default: 1)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("--names", metavar="A,B,…", help="names of the workers (default: worker0,worker1,…)")
    parser.add_argument("--key-file", metavar="FILE", help="the cluster's key, as `backhaul keygen` makes it")
    parser.add_argument("--host", metavar="HOST", help="what workers listen on for other hosts (default: loopback)")
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
        help="start workers that fail again, N times altogether; they take their places in the group (default: 0)",
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, metavar="LEVEL", help=f"log: {', '.join(LOG_LEVELS)}")
    parser.add_argument("--dropin", action="store_true", help="with Backhaul behind torch.distributed.rpc")
    parser.add_argument("--no-color", "--no-colour", action="store_true", help="plain prefixes")
    parser.add_argument("script", metavar="SCRIPT", help="what to run, followed by its own arguments")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help=argparse.SUPPRESS)
    parser.set_defaults(handle=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command line; returns the exit code."""
    parser: argparse.ArgumentParser = options.parser
    if options.nproc < 1:
        parser.error(f"-n must be at least 1, not {options.nproc}")
    if options.max_restarts < 0:
        parser.error(f"--max-restarts must be at least 0, not {options.max_restarts}")
    names = _names(parser, options.names, options.nproc)
    given = _given(parser, options)
    if not options.module and not os.path.exists(options.script):
        parser.error(f"no such script: {options.script}")
    target = ["-m", options.script] if options.module else [options.script]
    dropin = ["-m", "backhaul.dropin"] if options.dropin else []
    argv = [sys.executable, "-u", *dropin, *target, *options.args]

    with Session() as session:
        commands = []
        for rank, name in enumerate(names):
            env = {**os.environ, **session.environment(rank, options.nproc), **given}
            if options.names:
                env["BACKHAUL_NAME"] = name
            commands.append(Command(name, argv, env))
        try:
            outcome = _run(session, commands, options.max_restarts, colour=not options.no_color)
        except BrokenPipeError:
            # Whoever read our output has gone (`| head`); end as SIGPIPE would have us end.
            # Python would still try to flush what is buffered.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
    _report(outcome, len(names))
    return outcome.code


def _run(session: Session, commands: list[Command], restarts: int, colour: bool) -> Outcome:
    output = PrefixedOutput(
        _writer(sys.stdout.buffer),
        _writer(sys.stderr.buffer),
        colour and wants_colour(sys.stdout),
        colour and wants_colour(sys.stderr),
    )
    promise(session.directory)
    left = restarts

    def on_end(process: Process, again: bool) -> None:
        nonlocal left
        tell(session.directory, process.pid, process.ending, replaced=again)
        if again:
            left -= 1
            print(
                f"backhaul: {process.name} {process.ending}; it is restarted, and {left} restarts are left",
                file=sys.stderr,
                flush=True,
            )

    guardian = Guardian(session.directory)
    try:
        with Supervisor(output, guardian) as supervisor:
            return run_job(supervisor, commands, restarts=restarts, on_end=on_end)
    finally:
        guardian.close()


def _writer(stream: BinaryIO) -> Write:
    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return write


def _names(parser: argparse.ArgumentParser, given: str | None, count: int) -> list[str]:
    if given is None:
        return [f"worker{rank}" for rank in range(count)]
    names = given.split(",")
    if len(names) != count or len(set(names)) != count or not all(names):
        parser.error(f"--names needs {count} different names, separated by commas; got {given!r}")
    return names


def _given(parser: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, str]:
    """What the command line says about keys, hosts and watching, as the workers' environment. Checked here, once."""
    given = {}
    try:
        if options.key_file is not None:
            given[KEY_FILE_VARIABLE] = RpcOptions(key_file=options.key_file).key_file or ""
        if options.host is not None:
            given[HOST_VARIABLE] = RpcOptions(host=options.host).host or ""
        if options.metrics_port is not None:
            RpcOptions(metrics_port=options.metrics_port)
            RpcOptions(metrics_port=options.metrics_port + options.nproc - 1)
            given[METRICS_PORT_VARIABLE] = str(options.metrics_port)
    except OptionError as error:
        parser.error(str(error))
    if options.log_level is not None:
        given[LOG_LEVEL_VARIABLE] = options.log_level
    return given


def _report(outcome: Outcome, count: int) -> None:
    if outcome.failed is not None:
        others = "; the other workers were stopped" if count > 1 else ""
        print(f"backhaul: {outcome.failed.name} {outcome.failed.ending}{others}", file=sys.stderr)
    elif outcome.signum is not None:
        print(f"backhaul: stopped by {signal.Signals(outcome.signum).name}", file=sys.stderr)
