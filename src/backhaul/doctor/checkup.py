"""The order of the examinations."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from typing import Any

from backhaul.doctor import credentials, environment, machine, places, trial
from backhaul.doctor.report import Report
from backhaul.environments import table as environments
from backhaul.errors import OptionError
from backhaul.options import RpcOptions
from backhaul.security.tls import TLS

_OPTIONS = ("trust", "transport", "host", "port", "init_method", "key_file")


def run(options: argparse.Namespace) -> int:
    """Run the command line; returns the exit code."""
    tls = (options.tls_ca, options.tls_cert, options.tls_key)
    if any(tls) and not all(tls):
        options.parser.error("--tls-ca, --tls-cert and --tls-key must be given together: give all three")
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
    said = environments.read()
    environment.examine(report, said)
    options, refused = _take(report, given, tls)
    found = credentials.examine(report, options, tls, bad_key="key_file" in refused)
    site = None if "host" in refused else places.listening(report, options, found.kind)
    sound = not report.wrong
    places.meeting(report, options, site, said)
    machine.processors(report, options)
    machine.memory(report, options)
    if sound:
        # The name that init_rpc would choose; without one, a name that the certificate is for.
        trial.run(report, options, name or said.name.value or min(found.names, default="worker0"))
    else:
        report.section("tried")
        report.fact("nothing", "skipped: see the faults below")
    report.conclude()


def _take(report: Report, given: dict[str, Any], tls: tuple[str, str, str] | None) -> tuple[RpcOptions, set[str]]:
    """The options with all valid values, and the names of the invalid ones."""
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


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
