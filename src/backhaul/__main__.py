"""The ``backhaul`` command; ``python -m backhaul`` is the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import backhaul
from backhaul.bench import command as bench_command
from backhaul.doctor import command as doctor_command
from backhaul.launch import command as run_command
from backhaul.launch import keygen as keygen_command
from backhaul.seeing import command as seeing_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code."""
    parser = argparse.ArgumentParser(prog="backhaul", description="Differentiable RPC for PyTorch.")
    parser.add_argument("--version", action="version", version=f"backhaul {backhaul.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    run_command.add_parser(commands, backhaul.__version__)
    keygen_command.add_parser(commands)
    doctor_command.add_parser(commands)
    bench_command.add_parser(commands)
    seeing_command.add_parsers(commands)
    options = parser.parse_args(argv)
    code: int = options.handle(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
