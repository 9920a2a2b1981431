"""``backhaul keygen cluster.key``"""

from __future__ import annotations

import argparse
import sys

from backhaul.errors import OptionError
from backhaul.security.keys import KEY_FILE_VARIABLE, make_key_file


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "keygen",
        help="make the key of a cluster",
        description="Write a new key to FILE, which only its owner can read. Workers that have a copy of "
        "the key trust each other, and nobody else. An existing file is not overwritten.",
    )
    parser.add_argument("file", metavar="FILE", help="the file to write, e.g. cluster.key")
    parser.set_defaults(handle=keygen)


def keygen(options: argparse.Namespace) -> int:
    """Run the command line; returns the exit code."""
    try:
        make_key_file(options.file)
    except OptionError as error:
        print(f"backhaul keygen: {error}", file=sys.stderr)
        return 1
    print(
        f"wrote a new key to {options.file}. Copy it to every host over a private channel. Start workers "
        f"with `backhaul run --key-file {options.file}`, with {KEY_FILE_VARIABLE}, or with RpcOptions(key_file=...)."
    )
    return 0
