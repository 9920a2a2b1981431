"""Hosts in namespaces, and a real Slurm on them, for `make clusters`. Some of it needs packages."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import PATIENCE, ROOT, Host, await_that


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """``node1``, ``node2`` and ``login`` at 10.0.0.1, 10.0.0.2 and 10.0.0.3."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    table = tmp_path_factory.mktemp("hosts") / "hosts"
    names = ["node1", "node2", "login"]
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}
    lines = [f"{address} {name}" for name, address in addresses.items()]
    table.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    spaces = [f"places-{os.getpid()}-{name}" for name in (*names, "switch")]
    made = []
    try:
        for space in spaces:
            subprocess.run(["ip", "netns", "add", space], check=True)
            made.append(space)
            subprocess.run(["ip", "-n", space, "link", "set", "lo", "up"], check=True)
        switch = spaces[-1]
        for command in ("link add bridge type bridge", "link set bridge up"):
            subprocess.run(["ip", "-n", switch, *command.split()], check=True)
        for name, space in zip(names, spaces, strict=False):
            for command in (
                f"link add eth0 netns {space} type veth peer name {name} netns {switch}",
                f"-n {space} address add {addresses[name]}/24 dev eth0",
                f"-n {space} link set eth0 up",
                f"-n {switch} link set {name} master bridge up",
            ):
                subprocess.run(["ip", *command.split()], check=True)
        yield [Host(name, addresses[name], space, table) for name, space in zip(names, spaces, strict=False)]
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "delete", space], check=False)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user on these hosts: the commands of this virtual environment, and a home."""
    home = tmp_path / "home"
    home.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    python = shlex.quote(sys.executable)
    commands = {"torchrun": f"{python} -m torch.distributed.run", "backhaul": f"{python} -m backhaul"}
    # Both MPIs install both names; the pages mean these. Hydra looks for its helpers beside itself.
    for name, program in {"mpirun": "mpirun.openmpi", "mpiexec": "mpiexec.hydra"}.items():
        found = shutil.which(program)
        if found is not None:
            commands[name] = found
    for name, command in commands.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    return {
        "PATH": f"{programs}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        # Allow root, and more processes than processors.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


CONFIGURATION = """
ClusterName=places
SlurmctldHost=login(10.0.0.3)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={here}/munge/socket
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool-%n
SlurmctldPidFile={here}/slurmctld.pid
SlurmdPidFile={here}/slurmd-%n.pid
SlurmctldLogFile={here}/slurmctld.log
SlurmdLogFile={here}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
NodeName=node1 NodeAddr=10.0.0.1 CPUs=2 State=UNKNOWN
NodeName=node2 NodeAddr=10.0.0.2 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="session")
def slurm(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Slurm with two nodes, and a controller on ``login``; the path of its configuration."""
    missing = [name for name in ("munged", "slurmctld", "slurmd", "srun", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    here = tmp_path_factory.mktemp("slurm")
    munge = here / "munge"
    munge.mkdir(mode=0o700)
    (here / "state").mkdir()
    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o400)
    configuration = here / "slurm.conf"
    configuration.write_text(CONFIGURATION.format(here=here))
    env = {**os.environ, "SLURM_CONF": str(configuration)}
    paths = " ".join(f"--{name}-file={munge}/{name}" for name in ("key", "pid", "seed", "log"))
    started = []
    try:
        nodes, (login,) = hosts[:2], hosts[2:]
        with (here / "munged.out").open("wb") as file:
            # Forced, because the directories above it belong to pytest.
            argv = ["munged", "--foreground", "--force", *paths.split(), f"--socket={munge}/socket"]
            started.append(subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file))
        await_that(lambda: (munge / "socket").exists(), here, started)
        started.append(login.start("slurmctld -D", here, env, here / "slurmctld.out"))
        for node in nodes:
            started.append(node.start(f"slurmd -D -N {node.name}", here, env, here / f"{node.name}.out"))

        def both_are_idle() -> bool:
            output = here / "sinfo"
            output.write_bytes(b"")
            login.start("sinfo --noheader --format '%T %D'", here, env, output).wait(PATIENCE)
            return "idle 2" in output.read_text()

        await_that(both_are_idle, here, started)
        yield str(configuration)
    finally:
        for process in reversed(started):
            process.kill()
            process.wait()
