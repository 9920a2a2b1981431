"""The command that starts a steward on a host over ssh, and explanations of its failures. Pure.

The command line says only where Python is. Everything else goes over standard input, because other users can read the
command lines and environments of processes.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping

from backhaul.launch.placement import Host

DEFAULT = "ssh"
CONNECT_SECONDS = 15
_QUOTED = 6  # lines of output quoted in an error
_NOT_FOUND, _NOT_EXECUTABLE, _SSH_FAILED = 127, 126, 255

# One line without single quotes, so that every shell accepts it. Python's -c puts the current directory, here the home
# directory of the user, first on the path, where a json.py would be imported. So the script deletes that entry.
BOOT = (
    "import sys;sys.path[:1]=[];import json;"
    'given=json.loads(open(0,"rb",0,closefd=False).readline() or "null") or sys.exit(1);'
    'sys.path[:0]=given["path"];'
    "import backhaul;from backhaul.launch.steward import main;main(backhaul.__version__)"
)

_ADVICE = (
    (
        "Host key verification failed",
        "its key is unknown here or has changed, and ssh may not ask: connect once by hand with `{ssh} {target}`, "
        "or put its key into known_hosts",
    ),
    (
        "Permission denied",
        "it accepts none of your keys, and ssh may not ask for a password: make sure that "
        "`{ssh} -o BatchMode=yes {target} true` works (ssh-copy-id, ssh-add)",
    ),
    ("Could not resolve hostname", "its name is not known here: correct it, or give its address"),
    ("Connection refused", "no ssh server listens there; if it has another port, give --ssh 'ssh -p PORT'"),
    ("timed out", "it does not answer: is it up, and does a firewall let ssh through?"),
    ("No route to host", "there is no route to it from here: is it up?"),
    (
        "No module named 'backhaul'",
        "its Python {python} has no Backhaul: install this version there, choose another Python with --python, or, "
        "if PYTHONPATH leads to Backhaul, give --env PYTHONPATH",
    ),
    ("No module named 'msgspec'", "its Python {python} lacks what Backhaul needs: install Backhaul there with pip"),
)


def steward_argv(host: Host, ssh: str, python: str, lease: float) -> list[str]:
    """The command that the launcher runs to start a steward on a host."""
    python = host.python or python
    if host.is_local and host.ssh is None:
        return [python, "-u", "-c", BOOT]
    words = shlex.split(host.ssh or ssh)
    return [*words, *_options(words, lease), host.target, f"exec {shlex.quote(python)} -u -c '{BOOT}'"]


def _options(words: list[str], lease: float) -> list[str]:
    """Options of OpenSSH. OpenSSH takes the first value of an option, so the user's come first and win."""
    if os.path.basename(words[0]) != "ssh":
        return []
    options = {
        "BatchMode": "yes",  # fail instead of asking a question that nobody sees
        "ConnectTimeout": str(CONNECT_SECONDS),
        "ServerAliveInterval": str(max(1, round(lease / 3))),
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",  # use an existing shared connection, but do not stay behind as its master
    }
    return ["-T", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]


def first_line(environment: Mapping[str, str]) -> bytes:
    """The line that `BOOT` reads: where else to look for Backhaul."""
    path = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    return json.dumps({"path": path}).encode() + b"\n"


def _is_traceback(line: str) -> bool:
    return line.startswith("Traceback (most recent call last)")


def explain(host: Host, ssh: str, python: str, returncode: int, said: str, noise: str) -> str:
    """Why there is no steward on a host: one sentence, and the quoted output."""
    python = host.python or python
    said = "\n".join(part for part in (noise.strip(), said.strip()) if part)
    for sign, advice in _ADVICE:
        if sign in said:
            why = advice.format(ssh=host.ssh or ssh, target=host.target, python=python)
            break
    else:
        if returncode in (_NOT_FOUND, _NOT_EXECUTABLE):
            why = f"it has no Python at {python}: give the path of the host's Python with --python"
        elif returncode == _SSH_FAILED and not (host.is_local and host.ssh is None):
            why = "ssh failed"
        else:
            why = f"the command exited with code {returncode} before it wrote anything"
    lines = said.splitlines()
    quoted = "".join(f"\n    {line}" for line in lines[-1 if any(map(_is_traceback, lines)) else -_QUOTED :])
    return f"host {host.name}: {why}{quoted}"
