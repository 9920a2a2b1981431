"""``backhaul doctor [--key-file FILE] [--host HOST] …``"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from typing import Any

from backhaul.doctor import credentials, machine, places, trial
from backhaul.doctor.report import Report
from backhaul.errors import OptionError
from backhaul.options import RpcOptions
from backhaul.security.tls import TLS

_OPTIONS = ("trust", "transport", "host", "port", "init_method", "key_file")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what a worker on this machine would do, and what is wrong",
        description="Say what a worker with these options and this environment would listen on, how it would tell its "
        "peers from strangers, and which address it would announce; try it; and list what is wrong, each with what to "
        "do. The exit code is 0 if nothing is. Sends nothing to other machines but an attempt to connect to the store.",
    )
    parser.add_argument("--key-file", metavar="FILE", help="the cluster's key, as `backhaul keygen` makes it")
    parser.add_argument("--host", metavar="HOST", help="what to listen on for other hosts (default: loopback)")
    parser.add_argument("--port", type=int, metavar="PORT", help="the port to listen on (default: any that is free)")
    for what, text in (("ca", "who may issue certificates"), ("cert", "this worker's"), ("key", "its private key")):
        parser.add_argument(f"--tls-{what}", metavar="FILE", help=f"certificates of your own, PEM: {text}")
    parser.add_argument("--trust", choices=("cluster", "federation"), help="what peers may do (default: cluster)")
    parser.add_argument("--transport", choices=("auto", "unix", "tcp"), help="how to reach them (default: auto)")
    parser.add_argument("--init-method", metavar="URL", help="where the group meets (default: env://)")
    parser.add_argument("--name", metavar="NAME", help="the worker's name (default: as init_rpc would choose it)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(handle=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command line; returns the exit code."""
    tls = (options.tls_ca, options.tls_cert, options.tls_key)
    if any(tls) and not all(tls):
        options.parser.error("--tls-ca, --tls-cert and --tls-key belong together: give all three")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    report = Report((lambda text: None) if options.json else _say, width)
    given = {name: value for name in _OPTIONS if (value := getattr(options, name)) is not None}
    _examine(report, given, tls if all(tls) else None, options.name)
    if options.json:
        _say(json.dumps(report.data(), indent=1))
    return 1 if report.wrong else 0


def _examine(report: Report, given: dict[str, Any], tls: tuple[str, str, str] | None, name: str | None) -> None:
    version = machine.own_version()
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    report.title(f"backhaul {version} on {platform.node()} ({system}), as user {os.geteuid()}")
    machine.versions(report)
    report.fact("backhaul", version, version=version)
    machine.clock(report)
    options, refused = _take(report, given, tls)
    found = credentials.examine(report, options, tls, bad_key="key_file" in refused)
    site = None if "host" in refused else places.listening(report, options, found.kind)
    sound = not report.wrong
    places.meeting(report, options, site)
    machine.processors(report, options)
    machine.memory(report, options)
    if sound:
        trial.run(report, options, name or _name(found.names))
    else:
        report.section("tried")
        report.fact("nothing", "first see below")
    report.conclude()


def _take(report: Report, given: dict[str, Any], tls: tuple[str, str, str] | None) -> tuple[RpcOptions, set[str]]:
    """The options as far as they are good, and the names of those that are not."""
    options = RpcOptions()
    refused = set()
    for name, value in given.items():
        try:
            setattr(options, name, value)
        except OptionError as error:
            report.fault(str(error))
            refused.add(name)
    if tls is not None:
        try:
            options.tls = TLS(*tls)
        except OptionError as error:
            report.fault(str(error))
            refused.add("tls")
    return options, refused


def _name(certified: frozenset[str]) -> str:
    """As init_rpc would choose it; if nobody says, one that the certificate is for."""
    rank = os.environ.get("RANK")
    chosen = os.environ.get("BACKHAUL_NAME") or (f"worker{rank}" if rank else None)
    return chosen or min(certified, default="worker0")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
