"""Two nodes that are separate hosts: network, host name and processes. TLS between them, unix sockets within each.

The nodes of `cluster_utils.Cluster` share one machine, on which Backhaul uses unix sockets. So here each node
starts in its own namespaces, connected by a pair of virtual Ethernet devices.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Names of this run: one that was killed leaves its namespaces behind, and another may be going on.
FIRST, SECOND = f"ray-{os.getpid()}-first", f"ray-{os.getpid()}-second"
ADDRESSES = {FIRST: "10.91.7.1", SECOND: "10.91.7.2"}
PORT = 6399
HERE = Path(__file__).parent
QUICK = {  # how soon a node that does not answer counts as dead; by default half a minute
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
}
START = 120.0
# Ray's own connections require this token, as they do by default in clusters of one machine.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
AGAIN = 'for attempt in 1 2 3 4; do "$@"; done'
"""The second node may be up before the first one; and Ray gives a node only half a minute to start."""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None,
    reason="network namespaces need root, ip and unshare",
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def network() -> Iterator[None]:
    made = []
    try:
        for host in (FIRST, SECOND):
            ip("netns", "add", host)
            made.append(host)
        ip("link", "add", "ray-a", "netns", FIRST, "type", "veth", "peer", "name", "ray-b", "netns", SECOND)
        for host, device in ((FIRST, "ray-a"), (SECOND, "ray-b")):
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "address", "add", f"{ADDRESSES[host]}/24", "dev", device)
            ip("-n", host, "link", "set", device, "up")
        yield
    finally:
        for host in made:
            ip("netns", "delete", host)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Where Ray has its files: a directory of its own on each host. The path is short, because sockets are there."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield directory
    directory.rmdir()


def on(host: str, command: list[str], directory: Path, shared: Path) -> list[str]:
    """A command on a host: with its own network, name, processes, and ``directory`` in the place of ``shared``."""
    shell = f'hostname {host} && mount --bind "{directory}" "{shared}" && exec "$@"'
    own = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["ip", "netns", "exec", host, *own, "sh", "-c", shell, "sh", *command]


def started(host: str, directory: Path, shared: Path, *arguments: str) -> subprocess.Popen[Any]:
    """Ray's processes on a host, which end with the returned one."""
    ray = Path(sys.executable).with_name("ray")
    options = ["--node-ip-address", ADDRESSES[host], "--object-store-memory", str(80 << 20), "--disable-usage-stats"]
    with (directory / "start.log").open("wb") as log:
        return subprocess.Popen(
            on(host, ["sh", "-c", AGAIN, "sh", str(ray), "start", "--block", *options, *arguments], directory, shared),
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **QUICK, **TOKEN, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}


@pytest.mark.timeout(600)
def test_tls_between_hosts(network: None, shared: Path, tmp_path: Path) -> None:
    """The program also has a death of a process that only Ray sees, and a host that is cut off."""
    directories = {host: tmp_path / host for host in (FIRST, SECOND)}
    for directory in directories.values():
        directory.mkdir()
    head = ["--head", "--port", str(PORT), "--num-cpus", "1", "--include-dashboard", "false", "--temp-dir", str(shared)]
    running: list[subprocess.Popen[Any]] = [started(FIRST, directories[FIRST], shared, *head)]
    try:
        address = f"{ADDRESSES[FIRST]}:{PORT}"
        running.append(started(SECOND, directories[SECOND], shared, "--num-cpus", "2", "--address", address))
        inside = ["nsenter", "--target", str(child_of(running[0].pid)), "--all"]
        target = str(child_of(running[1].pid))
        with (tmp_path / "driver.log").open("w") as log:
            driver = subprocess.Popen(
                [*inside, sys.executable, HERE / "two_hosts.py", address],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        running.append(driver)
        said = []
        assert driver.stdout is not None
        with driver.stdout as lines:
            for line in lines:
                if not line.startswith("> "):  # Ray's own output
                    continue
                word, *rest = line[2:].split()
                said.append(word)
                if word == "kill":  # by the process id on its host
                    subprocess.run(["nsenter", "--target", target, "--all", "kill", "-9", *rest], check=True)
                elif word == "cut":
                    ip("-n", SECOND, "link", "set", "ray-b", "down")
        logs = [tmp_path / "driver.log", *(directory / "start.log" for directory in directories.values())]
        assert driver.wait(30) == 0, "\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in logs)
        assert said == ["ways", "kill", "lost", "restarted", "cut", "far:", "farther:", "done"]
    finally:
        for process in running:
            process.kill()  # with everything in its namespaces
        for process in running:
            process.wait(30)


def child_of(parent: int) -> int:
    """The process that `unshare --fork` started in the new namespaces: the first one there."""
    deadline = time.monotonic() + START
    while True:
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if children:
            return int(children[0])
        assert time.monotonic() < deadline
        time.sleep(0.02)
