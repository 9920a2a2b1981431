"""Hosts with a real sshd: network namespaces, each with its own name, on a bridge with the launcher's machine.

``a`` is 10.79.0.1 and fd79::1, ``b`` is 10.79.0.2 and fd79::2, the launcher's machine is 10.79.0.254 and fd79::fe. The
shell of ``b`` prints something before each command, as a careless ``.bashrc`` does. A host vanishes when its cable is
pulled: no packet announces that.
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import Launch

import backhaul

PORT = 2222
LAUNCHER_ADDRESS = "10.79.0.254"
GONE_WITHIN = 20.0
_SSHD = "/usr/sbin/sshd"

needed = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make network namespaces"),
    pytest.mark.skipif(not os.path.exists(_SSHD), reason="needs sshd: apt-get install openssh-server"),
    pytest.mark.skipif(not shutil.which("ip"), reason="needs ip: apt-get install iproute2"),
]


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=30).stdout


def processes_in(namespace: str) -> list[int]:
    """The processes of a network namespace, which is named by the text of its link in /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "ns" / "net") == namespace and (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _ipv6_of(address: str) -> str:
    """The other address of the same machine."""
    return f"fd79::{int(address.rpartition('.')[2]):x}"


class SshHost:
    """A network namespace with an sshd."""

    def __init__(self, name: str, address: str, directory: Path, environment: dict[str, str]) -> None:
        self._environment = environment
        self.name, self.address, self.address6 = name, address, _ipv6_of(address)
        self.directory = directory / f"host-{name}"
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir(parents=True)
        self._environment["TMPDIR"] = str(self.temporary)
        self._make_config(directory)
        # The namespace has its own /run, since sshd needs a directory there that Debian makes when the service starts.
        script = (
            f"hostname {name} && ip link set lo up && mount -t tmpfs none /run && mkdir -m 755 /run/sshd && "
            f"exec {_SSHD} -D -e -f {self.directory}/sshd_config"
        )
        self.sshd = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", script], stderr=subprocess.PIPE, text=True
        )
        self._await_listening()
        self.namespace = os.readlink(f"/proc/{self.sshd.pid}/ns/net")

    def _make_config(self, directory: Path) -> None:
        key = self.directory / "host_key"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        lines = [
            f"Port {PORT}",
            f"HostKey {key}",
            f"AuthorizedKeysFile {directory}/id.pub",
            "StrictModes no",
            "UsePAM no",
            "PidFile none",
            "PermitRootLogin yes",
            "LogLevel INFO",
            "SetEnv " + " ".join(f"{name}={value}" for name, value in self._environment.items()),
        ]
        if self.name == "b":
            lines.append("""ForceCommand echo "Welcome to b"; eval "$SSH_ORIGINAL_COMMAND" """)
        (self.directory / "sshd_config").write_text("\n".join(lines) + "\n")
        with (directory / "known_hosts").open("a") as file:
            file.write(f"[{self.address}]:{PORT},[{self.address6}]:{PORT} {key.with_suffix('.pub').read_text()}")

    def _await_listening(self) -> None:
        assert self.sshd.stderr is not None
        said = ""
        while "Server listening" not in said:
            ready, _, _ = select.select([self.sshd.stderr], [], [], 30)
            line = self.sshd.stderr.readline() if ready else ""
            assert line, f"sshd did not start: {said}"
            said += line
        # Later output does not matter, and must not fill the pipe.
        self._log = subprocess.Popen(["cat"], stdin=self.sshd.stderr, stdout=subprocess.DEVNULL)

    def processes(self) -> list[int]:
        """All processes on this host, except its sshd."""
        return [pid for pid in processes_in(self.namespace) if pid != self.sshd.pid]

    def find(self, *words: str) -> list[int]:
        """The processes here whose command lines contain all these words."""
        found = []
        for pid in self.processes():
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if all(word in line for word in words):
                found.append(pid)
        return found

    def steward(self) -> int:
        (pid,) = self.find("python", "launch.steward")
        return pid

    def sessions(self) -> list[int]:
        """The processes of sshd that hold connections."""
        return self.find("sshd:")

    def close(self) -> None:
        for pid in self.processes():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.sshd.kill()
        self.sshd.wait()
        self._log.wait()
        if self.sshd.stderr is not None:
            self.sshd.stderr.close()


class Network:
    """Hosts ``a`` and ``b``, and the launcher's machine between them."""

    def __init__(self, directory: Path, **environment: str) -> None:
        """``environment``: variables of a login on a host."""
        self.directory = directory
        self._environment = environment
        self.hosts: dict[str, SshHost] = {}
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "id"))
        script = (
            "ip link set lo up && ip link add bridge type bridge && ip link set bridge up && "
            f"ip address add {LAUNCHER_ADDRESS}/24 dev bridge && "
            f"ip address add {_ipv6_of(LAUNCHER_ADDRESS)}/64 dev bridge nodad && echo ready && exec cat"
        )
        self._machine = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._machine.stdout is not None
        try:
            assert self._machine.stdout.readline() == "ready\n"
            self.namespace = os.readlink(f"/proc/{self._machine.pid}/ns/net")
            for number, name in enumerate("ab", 1):
                self._plug(name, f"10.79.0.{number}")
            self._write_config()
        except BaseException:
            self.close()
            raise

    def _plug(self, name: str, address: str) -> None:
        host = self.hosts[name] = SshHost(name, address, self.directory, dict(self._environment))
        self.here(
            "ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "cable", "netns", str(host.sshd.pid)
        )
        self.here("ip", "link", "set", f"to-{name}", "master", "bridge", "up")
        there = ("nsenter", "--target", str(host.sshd.pid), "--net", "ip")
        run(*there, "address", "add", f"{address}/24", "dev", "cable")
        run(*there, "address", "add", f"{host.address6}/64", "dev", "cable", "nodad")
        run(*there, "link", "set", "cable", "up")

    def _write_config(self) -> None:
        lines = [
            "Host *",
            "  User root",
            f"  Port {PORT}",
            f"  IdentityFile {self.directory}/id",
            "  IdentitiesOnly yes",
            f"  UserKnownHostsFile {self.directory}/known_hosts",
            "  GlobalKnownHostsFile /dev/null",
        ]
        for host in self.hosts.values():
            lines += [f"Host {host.name}", f"  HostName {host.address}"]
        (self.directory / "ssh_config").write_text("\n".join(lines) + "\n")

    @property
    def ssh(self) -> str:
        return f"ssh -F {self.directory}/ssh_config"

    @property
    def before(self) -> list[str]:
        """The beginning of a command line on the launcher's machine."""
        return ["nsenter", "--target", str(self._machine.pid), "--net", "--"]

    def here(self, *words: str) -> str:
        """Run a command on the launcher's machine."""
        return run(*self.before, *words)

    def pull(self, *names: str) -> None:
        """Pull the cables of hosts."""
        for name in names:
            self.here("ip", "link", "set", f"to-{name}", "down")

    def plug_in(self) -> None:
        """Plug all cables in."""
        for name in self.hosts:
            self.here("ip", "link", "set", f"to-{name}", "up")

    @property
    def options(self) -> list[str]:
        """Options that say how to reach the hosts, and where they find the tested package."""
        return ["--ssh", self.ssh, "--env", f"PYTHONPATH={Path(backhaul.__file__).parent.parent}"]

    def launch(self, *argv: str, cwd: Path, hosts: str = "a:2,b:2", **more: object) -> Launch:
        """Start ``backhaul run`` on the launcher's machine."""
        given = ["--hosts", hosts, *self.options]
        return Launch(*given, *argv, cwd=cwd, before=self.before, **more)  # type: ignore[arg-type]

    def assert_empty(self, *names: str) -> None:
        """Wait until nothing of a launch is left on the launcher's machine and on these hosts; by default on all."""
        deadline = time.monotonic() + GONE_WITHIN
        left = self.left(names)
        while left and time.monotonic() < deadline:
            time.sleep(0.05)  # not our children: there is no event to wait for
            left = self.left(names)
        assert not left, "left behind:\n" + "\n".join(left)

    def left(self, names: Sequence[str] = ()) -> list[str]:
        found = []
        for host in self.hosts.values():
            if not names or host.name in names:
                found += [f"{host.name}: {pid}: {command_line(pid)}" for pid in host.processes()]
                found += [f"{host.name}: {path}" for path in host.temporary.glob("backhaul-*")]
        if not names:
            here = processes_in(self.namespace)
            found += [f"launcher: {pid}: {command_line(pid)}" for pid in here if pid != self._machine.pid]
        return found

    def close(self) -> None:
        for host in self.hosts.values():
            host.close()
        assert self._machine.stdin is not None
        self._machine.stdin.close()
        self._machine.kill()
        self._machine.wait()
        assert self._machine.stdout is not None
        self._machine.stdout.close()


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
    except OSError:
        return "(gone)"
