"""The commands of docs/clusters*.md, run as written. The first line of a block says how:

- ``sh``               on the host ``login``
- ``sh hosts``         on ``node1`` and ``node2`` at the same time
- ``sh needs=program`` if that program is installed
- ``sh ssh``           it starts workers on ``node1`` and ``node2`` through ssh
- ``bash file=x``      not run: the content of a file that a later block uses
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
from machines import PATIENCE, ROOT, Host, await_that

_BLOCK = re.compile(r"^```(sh|bash)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    kind: str
    text: str


def blocks(page: str) -> list[Block]:
    found = [Block(kind.strip(), text) for _, kind, text in _BLOCK.findall((ROOT / "docs" / page).read_text())]
    assert found
    return found


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """The user's working directory, with the program."""
    folder = tmp_path / "desk"
    folder.mkdir()
    shutil.copy(ROOT / "deploy" / "train.py", folder / "train.py")
    return folder


def run(where: list[Host], text: str, desk: Path, environment: dict[str, str]) -> str:
    """The block's output, on all hosts together."""
    (desk / "block.sh").write_text(text)
    outputs = [desk.parent / f"{host.name}.out" for host in where]
    processes = []
    try:
        for host, output in zip(where, outputs, strict=True):
            output.write_bytes(b"")
            processes.append(host.start("bash -e block.sh", desk, environment, output))
        codes = [process.wait(PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = "".join(output.read_text() for output in outputs)
    assert codes == [0] * len(where), f"{text}\n{said}"
    return said


def check_training(said: str) -> int:
    """How many workers took part; all of them are done."""
    found = re.search(r"(\d+) workers, loss \d+\.\d+ -> \d+\.\d+", said)
    assert found is not None, said
    for rank in range(int(found[1])):
        assert f"worker{rank} is done" in said
    return int(found[1])


CLUSTERS = blocks("clusters.md")
TRAINING = [number for number, block in enumerate(CLUSTERS) if "train.py" in block.text]


def require(block: Block, environment: dict[str, str]) -> None:
    """Skip the test if a program that the block needs is not installed."""
    for program in re.findall(r"needs=(\S+)", block.kind):
        if shutil.which(program, path=environment["PATH"].split(":")[0]) is None:
            pytest.skip(f"there is no {program}: apt-get install openmpi-bin mpich")


@pytest.mark.parametrize("number", TRAINING, ids=lambda number: " ".join(CLUSTERS[number].text.split()[:2]))
def test_clusters(number: int, hosts: list[Host], desk: Path, environment: dict[str, str]) -> None:
    block = CLUSTERS[number]
    require(block, environment)
    for earlier in CLUSTERS[:number]:
        if "train.py" not in earlier.text:  # the key
            run(hosts[2:], earlier.text, desk, environment)
    on_both = "hosts" in block.kind.split()
    over_ssh = "ssh" in block.kind.split()
    with sshd(hosts[:2], desk.parent / "ssh", environment) if over_ssh else nullcontext():
        said = run(hosts[:2] if on_both else hosts[2:], block.text, desk, environment)
    assert check_training(said) == (4 if on_both or over_ssh else 3)


@contextmanager
def sshd(hosts: list[Host], directory: Path, environment: dict[str, str]) -> Iterator[None]:
    """A real sshd on each of these hosts, and an ``ssh`` that knows their keys and has one that they accept."""
    program = shutil.which("sshd")
    if program is None:
        pytest.skip("there is no sshd: apt-get install openssh-server")
    directory.mkdir()
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    subprocess.run([*keygen, directory / "id"], check=True)
    # What a login on a host has: the programs and settings of these tests.
    login = " ".join(f"{name}={value}" for name, value in environment.items() if name != "HOME")
    running = []
    try:
        for host in hosts:
            key = directory / host.name
            subprocess.run([*keygen, key], check=True)
            with (directory / "known_hosts").open("a") as file:
                file.write(f"{host.name} {key.with_suffix('.pub').read_text()}")
            (directory / f"{host.name}.conf").write_text(
                f"HostKey {key}\nAuthorizedKeysFile {directory}/id.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
                f"PermitRootLogin yes\nSetEnv {login}\n"
                # The files with which this machine's shell begins may change the path.
                f"""ForceCommand export PATH='{environment["PATH"]}'; eval "$SSH_ORIGINAL_COMMAND"\n"""
            )
            # Its own /run, since sshd needs a directory there that Debian makes when the service starts.
            command = f"mount -t tmpfs none /run && mkdir -m 755 /run/sshd && {program} -D -e -f {key}.conf"
            log = directory / f"{host.name}.log"
            running.append(host.start(command, directory, environment, log))
            await_that(lambda log=log: "Server listening" in log.read_text(), directory, running)
        options = {"UserKnownHostsFile": directory / "known_hosts", "GlobalKnownHostsFile": "/dev/null"}
        options |= {"IdentityFile": directory / "id", "IdentitiesOnly": "yes", "User": "root"}
        (directory / "config").write_text("".join(f"{name} {value}\n" for name, value in options.items()))
        path = Path(environment["PATH"].split(":")[0]) / "ssh"
        path.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {directory}/config "$@"\n')
        path.chmod(0o755)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


SLURM = blocks("clusters-slurm.md")
SHOWN = (ROOT / "docs" / "clusters-slurm.md").read_text()


def write_or_run(block: Block, hosts: list[Host], desk: Path, environment: dict[str, str]) -> str:
    """Write the file that a block shows, or run its commands on ``login``; returns their output."""
    option, _, name = block.kind.partition("=")
    if option == "file":
        (desk / name).write_text(block.text)
        return ""
    return run(hosts[2:], block.text, desk, environment)


def test_slurm(slurm: str, hosts: list[Host], desk: Path, environment: dict[str, str]) -> None:
    environment = {**environment, "SLURM_CONF": slurm}
    trained = 0
    for block in SLURM:
        if "needs=" in block.kind:
            continue  # the next test
        said = write_or_run(block, hosts, desk, environment)
        if "sbatch" in block.text and said:
            assert check_training(said) == 4
            trained += 1
        elif "doctor" in block.text:
            text = SHOWN.partition("    1: place\n")[2].partition("\n\n")[0]
            for line in text.splitlines():
                assert line.strip() in said
    assert trained == 2


def test_mpirun_in_a_slurm_job(slurm: str, hosts: list[Host], desk: Path, environment: dict[str, str]) -> None:
    environment = {**environment, "SLURM_CONF": slurm}
    for block in SLURM:
        require(block, environment)
        if "keygen" in block.text or "mpi.sbatch" in block.kind + block.text:
            said = write_or_run(block, hosts, desk, environment)
    assert check_training(said) == 4


TAKEN = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=out
python -c 'if True:
    import os, signal, socket
    server = socket.create_server(("node1", 15000 + int(os.environ["SLURM_JOB_ID"])))
    open("listens", "w")
    signal.pause()' &
until [ -e listens ]; do sleep 0.1; done
srun --kill-on-bad-exit=1 python train.py
kill %1
"""
TASKS = "srun --nodes=2 --ntasks=2 --kill-on-bad-exit=1"
KEY = "export BACKHAUL_KEY_FILE=~/cluster.key; backhaul keygen ~/cluster.key"
NODE1 = r"printf '127.0.0.1 localhost\n127.0.1.1 node1\n10.0.0.2 node2\n' > own"

# What makes each row of the page's table "When it does not work", in its order.
TROUBLES = {
    "batch script": "sbatch --wait --output=out --wrap 'python train.py' || true; cat out",
    "RANK": "srun --nodes=2 --ntasks=3 --kill-on-bad-exit=1 bash -c "
    "'if [ $SLURM_PROCID = 2 ]; then export RANK=1; fi; python train.py' || true",
    "own hosts": f"{NODE1}; {TASKS} unshare --mount sh -c 'mount --bind own /etc/hosts && python train.py' || true",
    "task 0 elsewhere": r"printf 'node2\nnode1\n' > tasks; SLURM_HOSTFILE=tasks srun -m arbitrary --ntasks=2 "
    "--kill-on-bad-exit=1 python train.py || true",
    "port": "sbatch --wait taken.sbatch || true; cat out",
    "no key, no host": f"{TASKS} python train.py || true",
    "no key": f"BACKHAUL_HOST=0.0.0.0 {TASKS} python train.py || true",
    "no host": f"{KEY}; {TASKS} python train.py || true",
}


def troubles() -> list[str]:
    table = SHOWN.partition("## When it does not work")[2].partition("|---|---|\n")[2].partition("\n\n")[0]
    return [re.findall(r"^\| `([^`]+)` \|", row)[0] for row in table.splitlines()]


@pytest.mark.parametrize(("trouble", "shown"), [*zip(TROUBLES, troubles(), strict=True)], ids=TROUBLES)
def test_trouble_on_slurm(
    trouble: str, shown: str, slurm: str, hosts: list[Host], desk: Path, environment: dict[str, str]
) -> None:
    (desk / "taken.sbatch").write_text(TAKEN)
    said = run(hosts[2:], TROUBLES[trouble], desk, {**environment, "SLURM_CONF": slurm})
    # The numbers of jobs and ports are others here.
    parts = re.sub(r"(?<=job )7|\b\d{5}\b", "…", shown).split("…")
    assert re.search(".*".join(map(re.escape, parts)), said), said


SHIM = """#!/bin/sh
echo "{name} $*" >> {log}
case "{name} $*" in
"kubectl create secret"*) exec {program} "$@" --dry-run=client -o yaml ;;
"kubectl apply -f"*) test -f "$3" ;;
"docker build -f"*) test -f "$3" ;;
esac
"""


def test_kubernetes(hosts: list[Host], tmp_path: Path, environment: dict[str, str]) -> None:
    """The commands are only checked, because there is no cluster here. `test_manifests` runs the manifests."""
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "deploy").symlink_to(ROOT / "deploy")
    log = tmp_path / "log"
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("there is no kubectl: apt-get install kubernetes-client")
    for name in ("kubectl", "docker"):
        path = Path(environment["PATH"].split(":")[0]) / name
        path.write_text(SHIM.format(name=name, log=log, program=program))
        path.chmod(0o755)
    said = "".join(run(hosts[2:], block.text, desk, environment) for block in blocks("clusters-kubernetes.md"))
    assert "cluster.key: " in said  # in the Secret
    assert "name: backhaul-key" in said
    commands = log.read_text().splitlines()
    assert [command.split()[1] for command in commands] == ["build", "push", "create", "apply", "apply", "wait", "logs"]
    page = (ROOT / "docs" / "clusters-kubernetes.md").read_text()
    for path in (ROOT / "deploy" / "kubernetes").glob("*.yaml"):
        assert f"(../deploy/kubernetes/{path.name})" in page
