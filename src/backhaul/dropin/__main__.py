"""``python -m backhaul.dropin script.py …`` or ``-m module …``: run a script with Backhaul behind torch's names.

Importing this module also installs. Fork servers rely on that: they can import modules, but not call functions.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from types import ModuleType

from backhaul.dropin.installing import install
from backhaul.launch.main_module import MainModule, code_for


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m backhaul.dropin",
        usage="python -m backhaul.dropin [-h] [-m] SCRIPT [ARGS …]",
        description="Run SCRIPT with Backhaul behind torch.distributed.rpc and its relatives.",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the script to run, followed by its arguments")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.module:
        target = MainModule(name=_runnable(parser, options.script))
    elif os.path.isfile(options.script):
        target = MainModule(path=os.path.abspath(options.script))
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(options.script))
    else:
        parser.error(f"no such script: {options.script}")
    install()

    # Stays installed, not only while the script runs: its definitions are looked up here until the process ends.
    module = sys.modules["__main__"] = ModuleType("__main__")
    code = code_for(target, module)
    sys.argv = [str(module.__file__) if options.module else options.script, *options.args]
    exec(code, module.__dict__)


def _runnable(parser: argparse.ArgumentParser, name: str) -> str:
    """The module that ``python -m name`` runs."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    if spec is None:
        parser.error(f"no module named {name}")
    return name if spec.submodule_search_locations is None else _runnable(parser, f"{name}.__main__")


if __name__ == "__main__":
    main()
else:
    install()
