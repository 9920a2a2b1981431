"""`backhaul doctor`, on good and bad files, sockets and limits, all real."""

from __future__ import annotations

import datetime
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from backhaul import rpc
from backhaul.__main__ import main
from backhaul.errors import MisuseError, OptionError
from mint import DAY, Mint

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
LAUNCHERS = ("BACKHAUL_", "SLURM", "OMPI", "PMI", "PET_", "VC_", "JOB")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No launcher's variables, and a place for temporary directories: nothing may be left in it."""
    for name in [*VARIABLES, *(name for name in os.environ if name.startswith(LAUNCHERS))]:
        monkeypatch.delenv(name, raising=False)
    place = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []


class Findings(NamedTuple):
    code: int
    text: str

    @property
    def wrong(self) -> list[str]:
        """The faults, one text each."""
        lines = self.text.partition("\nwrong\n")[2].splitlines()
        return [line.strip().partition(". ")[2] for line in lines]

    def fact(self, section: str, label: str) -> str:
        part = self.text.partition(f"\n{section}\n")[2].partition("\n\n")[0]
        (line,) = (line for line in part.splitlines() if line.startswith(f"  {label} "))
        return line[2 + len(label) :].strip()


Doctor = Callable[..., Findings]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    def run(*argv: object) -> Findings:
        code = main(["doctor", *map(str, argv)])
        return Findings(code, capsys.readouterr().out)

    return run


@pytest.fixture
def key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    capsys.readouterr()
    return path


def listening() -> tuple[socket.socket, int]:
    """A socket that listens, and its port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock, sock.getsockname()[1]


# Nothing is wrong.


def test_nothing_is_wrong_without_any_options(doctor: Doctor, environment: Path) -> None:
    found = doctor()

    assert (found.code, found.wrong) == (0, [])
    assert found.text.endswith("\nnothing is wrong\n")
    assert found.fact("authentication", "unix sockets") == (
        f"only processes of user {os.geteuid()}, as the kernel tells (SO_PEERCRED)"
    )
    assert found.fact("authentication", "TCP").startswith("not offered: there is neither a key")
    assert found.fact("listening", "unix sockets") == f"a new directory of mode 0700 in {environment}, for each worker"
    assert found.fact("meeting", "init method").startswith("not known")
    assert found.fact("tried", "unix sockets").endswith("and a tensor arrived")
    assert found.fact("tried", "shared memory") == "a sealed memfd was made, passed and mapped"


def test_with_a_key(doctor: Doctor, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor("--key-file", key, "--host", "127.0.0.1")

    assert (found.code, found.wrong) == (0, [])
    assert found.fact("authentication", "TCP") == (
        f"TLS 1.3, both sides with certificates from {key}, mode 0600 (the option key_file)"
    )
    assert found.fact("listening", "TCP") == "127.0.0.1, any free port: this machine only"
    assert found.fact("listening", "announces") == "127.0.0.1: the option host says '127.0.0.1'"
    assert found.fact("tried", "TCP").endswith("and a tensor arrived")

    copy = tmp_path / "copy.key"
    copy.touch(0o600)
    copy.write_text(key.read_text())
    monkeypatch.setenv("BACKHAUL_KEY_FILE", str(copy))
    again = doctor()
    assert again.fact("authentication", "cluster") == found.fact("authentication", "cluster")
    assert "mode 0600 (BACKHAUL_KEY_FILE)" in again.fact("authentication", "TCP")
    copy.write_text("ab" * 32)
    assert doctor().fact("authentication", "cluster") != found.fact("authentication", "cluster")


def test_the_key_is_never_shown(doctor: Doctor, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = key.read_text().strip()
    monkeypatch.setenv("BACKHAUL_SECRET", secret)
    for argv in ([], ["--json"], ["--key-file", key], ["--key-file", key, "--json"]):
        found = doctor(*argv)
        assert found.code == 0
        assert not any(secret[start : start + 8] in found.text for start in range(len(secret) - 7))
    assert "the secret in BACKHAUL_SECRET" in doctor().fact("authentication", "TCP")


def test_with_certificates(doctor: Doctor, tmp_path: Path) -> None:
    mint = Mint(tmp_path)
    cert, private = mint.issue("bank", dns=["bank", "bank.example"], life=3 * DAY)
    found = doctor("--tls-ca", mint.ca, "--tls-cert", cert, "--tls-key", private, "--trust", "federation")

    assert (found.code, found.wrong) == (0, [])
    assert found.fact("authentication", "trust").startswith("federation: ")
    assert found.fact("authentication", "names") == "bank, bank.example"
    assert found.fact("authentication", "issuer") == "CN=example CA"
    assert found.fact("authentication", "validity").endswith(" UTC: valid")
    assert found.fact("listening", "unix sockets") == "none: all goes over TCP"
    assert found.fact("tried", "TCP").endswith("and a tensor arrived")
    assert "the certificate expires at" in found.text


def test_ipv6(doctor: Doctor, key: Path) -> None:
    found = doctor("--key-file", key, "--host", "::1")
    assert (found.code, found.wrong) == (0, [])
    assert found.fact("tried", "TCP").startswith("::1, port ")


def test_json_output_is_complete(doctor: Doctor, key: Path) -> None:
    found = doctor("--key-file", key, "--json")
    data = json.loads(found.text)

    assert found.code == 0
    assert data["wrong"] == []
    assert data["authentication"]["TCP"]["key_file"] == str(key)
    assert len(data["authentication"]["cluster"]["fingerprint"]) == 16
    assert data["listening"]["announces"]["address"] == "127.0.0.1"
    assert data["processors"]["usable"]["usable"] == sorted(os.sched_getaffinity(0))
    assert data["versions"]["torch"]["version"]
    assert data["tried"]["TCP"]["ok"] is True

    key.chmod(0o640)
    found = doctor("--key-file", key, "--json")
    assert found.code == 1
    assert f"`chmod 600 {key}`" in json.loads(found.text)["wrong"][0]


def test_one_processor(doctor: Doctor) -> None:
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        found = doctor()
    finally:
        os.sched_setaffinity(0, mine)
    assert found.code == 0
    assert found.fact("processors", "busy polling") == "off: with one processor the peer could not run at the same time"


# Keys.


def test_a_key_that_others_can_read(doctor: Doctor, key: Path) -> None:
    key.chmod(0o644)
    found = doctor("--key-file", key, "--host", "0.0.0.0")
    assert found.code == 1
    (wrong,) = found.wrong  # and not also that there is no key, which follows from it
    assert f"`chmod 600 {key}`" in wrong
    assert found.fact("tried", "nothing") == "skipped: see the faults below"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("ab" * 16, "contains 16 bytes, and a key has at least 32"),
        ("not a key", "does not contain a key in hexadecimal"),
    ],
)
def test_an_invalid_key_is_reported(
    doctor: Doctor, key: Path, monkeypatch: pytest.MonkeyPatch, content: str, text: str
) -> None:
    key.write_text(content)
    monkeypatch.setenv("BACKHAUL_KEY_FILE", str(key))
    found = doctor()
    assert found.code == 1
    (wrong,) = found.wrong
    assert text in wrong
    assert "backhaul keygen" in wrong
    assert found.fact("authentication", "TCP") == "not possible: the key is unusable"


def test_an_invalid_secret_is_reported(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_SECRET", "abcd")
    found = doctor()
    assert found.code == 1
    assert "BACKHAUL_SECRET must hold at least 32 bytes" in found.wrong[0]


def test_no_key_file(doctor: Doctor, tmp_path: Path) -> None:
    found = doctor("--key-file", tmp_path / "none.key")
    assert found.code == 1
    assert f"there is no key file {tmp_path / 'none.key'}" in found.wrong[0]


def test_a_key_from_the_future(doctor: Doctor, key: Path) -> None:
    os.utime(key, (time.time(), time.time() + 3600))
    found = doctor("--key-file", key)
    assert found.code == 1
    assert "the clock of this host is slow" in found.wrong[0]
    os.utime(key, (time.time(), time.time() + 60))
    assert doctor("--key-file", key).code == 0


# Certificates.

HOUR = datetime.timedelta(hours=1)


def given(ca: object, cert: object, private: object) -> list[object]:
    return ["--tls-ca", ca, "--tls-cert", cert, "--tls-key", private]


@pytest.mark.parametrize(
    ("how", "text", "state"),
    [
        ({"life": -HOUR}, "it has expired", "expired"),
        ({"life": 2 * DAY, "since": DAY}, "it is not valid yet; check the clocks", "not valid yet"),
    ],
    ids=["expired", "not yet"],
)
def test_the_validity_of_a_certificate(doctor: Doctor, tmp_path: Path, how: Any, text: str, state: str) -> None:
    mint = Mint(tmp_path)
    found = doctor(*given(mint.ca, *mint.issue("bank", **how)))
    assert found.code == 1
    (wrong,) = found.wrong
    assert text in wrong
    assert found.fact("authentication", "names") == "bank"
    assert found.fact("authentication", "validity").endswith(f"UTC: {state}")


def test_certificates_that_do_not_belong_together(doctor: Doctor, tmp_path: Path) -> None:
    mint, other = Mint(tmp_path), Mint(tmp_path, "another CA")
    bank, bank_key = mint.issue("bank")
    _, shop_key = mint.issue("shop")
    for argv, text in (
        (given(mint.ca, bank, shop_key), "does not belong to the certificate"),
        (given(other.ca, bank, bank_key), "is not the CA that issued it"),
        (given(mint.ca, tmp_path / "none.crt", bank_key), "there is no certificate"),
        (given(bank_key, bank, bank_key), "contains no certificates in PEM"),
    ):
        found = doctor(*argv)
        assert found.code == 1
        (wrong,) = found.wrong
        assert text in wrong
        assert found.fact("tried", "nothing") == "skipped: see the faults below"


def test_a_private_key_that_others_can_read(doctor: Doctor, tmp_path: Path) -> None:
    mint = Mint(tmp_path)
    cert, private = mint.issue("bank")
    os.chmod(private, 0o644)
    found = doctor(*given(mint.ca, cert, private))
    assert found.code == 1
    assert f"`chmod 600 {private}`" in found.wrong[0]


def test_a_certificate_for_another_worker(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mint = Mint(tmp_path)
    certificates = given(mint.ca, *mint.issue("bank"))
    found = doctor(*certificates, "--name", "shop")
    assert found.code == 1
    assert "this worker is 'shop', and its certificate" in found.wrong[0]
    monkeypatch.setenv("BACKHAUL_NAME", "worker0")
    assert "this worker is 'worker0'" in doctor(*certificates).wrong[0]
    assert doctor(*certificates, "--name", "bank").code == 0


def test_half_of_the_certificates(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        doctor("--tls-ca", "ca.pem")
    assert end.value.code == 2
    assert "must be given together" in capsys.readouterr().err


def test_a_federation_without_certificates(doctor: Doctor, key: Path) -> None:
    found = doctor("--key-file", key, "--trust", "federation")
    assert found.code == 1
    assert "needs a certificate for each peer" in found.wrong[0]


# Places.


def test_beyond_loopback_without_a_key(doctor: Doctor, key: Path) -> None:
    everywhere = ["--host", "0.0.0.0", "--init-method", "tcp://127.0.0.1:29500"]
    found = doctor(*everywhere)
    assert found.code == 1
    (wrong,) = found.wrong
    assert "needs a key or certificates" in wrong
    assert "backhaul keygen cluster.key" in wrong

    found = doctor(*everywhere, "--key-file", key)
    assert (found.code, found.wrong) == (0, [])
    assert found.fact("listening", "TCP") == "0.0.0.0, any free port: other machines can connect"
    assert found.fact("listening", "announces").endswith("this one is on the way to the store at 127.0.0.1")
    assert "the group meets at 127.0.0.1, which only this machine can reach" in found.text


def test_a_host_of_another_machine(doctor: Doctor, key: Path) -> None:
    found = doctor("--key-file", key, "--host", "192.0.2.77")
    assert found.code == 1
    assert "cannot listen on 192.0.2.77" in found.wrong[0]


def test_an_invalid_host_name_is_reported(doctor: Doctor, key: Path) -> None:
    found = doctor("--key-file", key, "--host", "no..such..host")
    assert found.code == 1
    assert "is not a name or address of this machine" in found.wrong[0]


def test_a_port_that_is_taken(doctor: Doctor, key: Path) -> None:
    sock, port = listening()
    with sock:
        found = doctor("--key-file", key, "--port", port)
    assert found.code == 1
    assert f"cannot listen on 127.0.0.1, port {port}" in found.wrong[0]
    assert doctor("--key-file", key, "--port", port).code == 0
    assert "must be a port below 65536" in doctor("--port", 70000).wrong[0]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a name short enough for a socket in it."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: path.mkdir(0o755), "must belong to this user and be closed to others"),
        (lambda path: path.touch(0o600), "cannot listen: [Errno 20] Not a directory"),
        (lambda path: None, "is unusable: No such file or directory"),
    ],
    ids=["open to others", "a file", "missing"],
)
def test_an_unusable_directory_for_sockets_is_reported(
    doctor: Doctor, short_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], text: str
) -> None:
    place = short_path / "run"
    make(place)
    monkeypatch.setenv("BACKHAUL_RUNTIME_DIR", str(place))
    found = doctor()
    assert found.code == 1
    (wrong,) = found.wrong
    assert text in wrong


def test_a_directory_for_sockets(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKHAUL_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    found = doctor()
    assert found.code == 0
    assert found.fact("listening", "unix sockets") == f"{tmp_path}, mode 0700 (BACKHAUL_RUNTIME_DIR)"
    assert list(tmp_path.iterdir()) == []


def test_where_the_group_meets(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sock, port = listening()
    with sock:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert doctor().fact("meeting", "init method") == f"tcp://127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT)"
        monkeypatch.setenv("RANK", "0")
        assert f"port {port} of 127.0.0.1 is taken" in doctor().wrong[0]
    assert doctor().code == 0
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.77")
    assert "192.0.2.77 is not an address of this machine: start rank 0 there" in doctor().wrong[0]
    monkeypatch.setenv("BACKHAUL_INIT_METHOD", f"file://{tmp_path}/none/store")
    assert "must be a file in an existing directory" in doctor().wrong[0]
    monkeypatch.setenv("BACKHAUL_INIT_METHOD", f"file://{tmp_path}/store")
    assert doctor().code == 0
    assert "must be like tcp://" in doctor("--init-method", "tcp://nowhere").wrong[0]


# Limits.


@pytest.fixture
def limit() -> Iterator[Callable[[int, int], None]]:
    """Sets a limit of this process for the duration of the test."""
    before: dict[int, tuple[int, int]] = {}

    def set_limit(which: int, soft: int) -> None:
        before[which] = resource.getrlimit(which)
        resource.setrlimit(which, (soft, before[which][1]))

    yield set_limit
    for which, values in before.items():
        resource.setrlimit(which, values)


def test_few_descriptors(doctor: Doctor, limit: Callable[[int, int], None]) -> None:
    limit(resource.RLIMIT_NOFILE, 200)
    found = doctor()
    assert found.code == 1
    assert "this process may have 200 descriptors open" in found.wrong[0]
    assert "`ulimit -n 4096`" in found.wrong[0]


def test_no_shared_memory(doctor: Doctor, limit: Callable[[int, int], None]) -> None:
    limit(resource.RLIMIT_FSIZE, 1 << 20)
    found = doctor()
    assert found.code == 1
    assert "shared memory is not available here" in found.wrong[0]
    assert "`ulimit -f unlimited` lifts it" in found.text


def test_torch_comes_last(tmp_path: Path) -> None:
    """The rest is reported before, without waiting for torch, whatever is wrong with torch."""
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: wrong ELF class')")
    done = subprocess.run(
        [sys.executable, "-m", "backhaul", "doctor"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (1, "")
    found = Findings(done.returncode, done.stdout)
    assert found.wrong == ["torch cannot be imported: OSError: libtorch.so: wrong ELF class. Install it again"]
    assert found.fact("memory", "descriptors")


# The place in the group.


def test_the_table_of_the_place(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "node1",
        "RANK": "1",
    }
    for variable, text in said.items():
        monkeypatch.setenv(variable, text)
    found = doctor()

    assert (found.code, found.wrong) == (0, [])
    assert found.fact("place", "started by") == "the environment, inside of Slurm"
    assert found.fact("place", "rank") == "1  (RANK, over SLURM_PROCID=1)"
    assert found.fact("place", "world size") == "4  (SLURM_STEP_NUM_TASKS)"
    assert found.fact("place", "address") == "127.0.0.1  (one node in SLURM_STEP_NODELIST)"
    assert found.fact("place", "restarts") == "-"
    assert found.fact("meeting", "init method").startswith("tcp://127.0.0.1:15007 (one node in SLURM_STEP_NODELIST and")


def test_a_contradiction_is_wrong(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, text in {
        "RANK": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "2",
        "SLURM_STEP_NUM_NODES": "2",
    }.items():
        monkeypatch.setenv(variable, text)
    found = doctor()

    assert found.code == 1
    assert found.fact("place", "rank") == "not clear: see below"
    assert "RANK=1 (the environment) and SLURM_PROCID=2 (Slurm) give this worker different ranks" in found.wrong[0]
    assert "the workers are on 2 nodes (SLURM_STEP_NUM_NODES), but the environment names no key" in found.text
    data = json.loads(doctor("--json").text)
    assert data["place"]["rank"]["over"] == ["SLURM_PROCID=2"]


STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "localhost,node2",
}
HYDRA = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
TRAINER = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "nothing says where the group of this process meets"),
        (HYDRA, "PMI_RANK names no job that a port could follow from: start it with `mpiexec -genv MASTER_PORT 29500`"),
        ({**HYDRA, "MPI_LOCALNRANKS": "1"}, "PMI_SIZE=2 and MPI_LOCALNRANKS=1: the workers are on several machines"),
        ({"VC_TASK_INDEX": "1", "VC_A_HOSTS": "a", "VC_B_HOSTS": "b"}, "VC_TASK_INDEX=1 is an index within a task"),
        (TRAINER, "needs a rank, and Kubeflow Trainer gives this process none"),
        (STEP, "rank 0 hosts the store at localhost (first of SLURM_STEP_NODELIST), but on this machine that"),
        (
            {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            "rank 5 (RANK) is not in 0..1, the ranks of a group of 2 workers (WORLD_SIZE)",
        ),
    ],
)
def test_an_environment_in_which_init_rpc_fails_is_wrong(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], wrong: str
) -> None:
    for variable, text in said.items():
        monkeypatch.setenv(variable, text)
    with pytest.raises((OptionError, MisuseError)):
        rpc.init_rpc()
    found = doctor()
    assert found.code == 1
    assert [text for text in found.wrong if wrong in text], found.wrong


def test_the_program_may_say_where_the_group_meets(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable, text in {**HYDRA, "MPI_LOCALNRANKS": "1"}.items():
        monkeypatch.setenv(variable, text)
    found = doctor("--init-method", f"file://{tmp_path}/store")
    assert (found.code, found.wrong) == (0, [])


def test_a_batch_script_is_no_worker(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script may run the doctor for its machine, so the doctor only adds a note."""
    for variable, text in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}.items():
        monkeypatch.setenv(variable, text)
    found = doctor()
    assert (found.code, found.wrong) == (0, [])
    assert "this is the batch script of job 7 of Slurm, and not one of its tasks" in found.text
