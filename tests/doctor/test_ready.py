"""`backhaul doctor --ready`: what a probe reports about workers that are up, starting, stopped and killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from backhaul.__main__ import main
from backhaul.doctor import ready
from backhaul.testing import InProcessCluster
from processes import assert_gone


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A separate place for temporary directories, so that other workers of this machine are not found."""
    monkeypatch.delenv("BACKHAUL_RUNTIME_DIR", raising=False)
    place = tmp_path_factory.mktemp("t")
    monkeypatch.setattr("tempfile.tempdir", str(place))
    monkeypatch.setattr(ready, "_ROOTS", (str(place),))
    return place


def look(capsys: pytest.CaptureFixture[str], wanted: int = 1, name: str | None = None) -> tuple[int, str]:
    code = ready.run(wanted, name)
    return code, capsys.readouterr().out


def test_serving_workers_are_ready(capsys: pytest.CaptureFixture[str]) -> None:
    with InProcessCluster(2, sockets=True):
        assert look(capsys, 2) == (0, "ready: worker0, worker1\n")
        assert look(capsys, 1, "worker1") == (0, "ready: worker0, worker1\n")
        assert look(capsys, 1, "other") == (1, "not ready: worker0, worker1; worker 'other' is not among them\n")
        assert look(capsys, 3) == (1, "not ready: worker0, worker1; 3 expected\n")
    nobody = f"not ready: none; no worker of user {os.geteuid()} with a unix socket is up here\n"
    assert look(capsys) == (1, nobody)


def test_a_worker_that_listens_but_does_not_greet_is_not_ready(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a worker that still waits for its group, or is stopped."""
    monkeypatch.setattr(ready, "PATIENCE", 0.1)
    directory = here / "backhaul-x"
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as news:
        sock.bind(str(directory / "12-ab"))
        sock.listen()
        news.bind(str(directory / "news-12-ab"))
        code, text = look(capsys)
    assert code == 1
    assert "12-ab" in text
    assert "news" not in text
    # A socket on which nothing listens does not count.
    assert look(capsys)[1].startswith("not ready: none; no worker of user")


def test_a_worker_whose_queue_is_full_has_time_to_answer(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may be starting, or serve many newcomers. A connection to it fails at once, instead of waiting."""
    monkeypatch.setattr(ready, "PATIENCE", 0.1)
    directory = here / "backhaul-x"
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as other:
        sock.bind(str(directory / "12-ab"))
        sock.listen(0)
        other.connect(str(directory / "12-ab"))
        code, text = look(capsys)
    assert code == 1
    assert "12-ab does not answer: the worker waits for its group, hangs, or is very busy" in text


@pytest.mark.parametrize("wanted", ["0", "-1"])
def test_a_probe_that_no_machine_would_fail(capsys: pytest.CaptureFixture[str], wanted: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--ready", "--workers", wanted])
    assert end.value.code == 2
    assert f"--workers {wanted} must be at least 1" in capsys.readouterr().err


def test_a_worker_that_leaves_during_the_probe_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers of `backhaul run` have one directory. A link to nothing is listed, and gone when it is looked at."""
    directory = here / "backhaul-x"
    directory.mkdir(mode=0o700)
    monkeypatch.setenv("BACKHAUL_RUNTIME_DIR", str(directory))
    (directory / "12-ab").symlink_to(directory / "gone")
    with InProcessCluster(2, sockets=True):
        assert look(capsys, 2) == (0, "ready: worker0, worker1\n")


def test_a_socket_with_another_protocol_is_not_ready(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    directory = here / "backhaul-x"
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(directory / "12-ab"))
        sock.listen()

        def answer() -> None:
            there, _ = sock.accept()
            with there:
                there.sendall(b"220 mail" + bytes(100))

        thread = threading.Thread(target=answer)
        thread.start()
        code, text = look(capsys)
        thread.join()
    assert code == 1
    assert "the listener there is not a Backhaul worker" in text


WORKER = """
import backhaul.rpc as rpc, sys
rpc.init_rpc("lonely", rank=0, world_size=1, rpc_backend_options=rpc.RpcOptions(init_method="file://" + sys.argv[1]))
print("up", flush=True)
sys.stdin.read()
"""


def test_the_command_and_a_worker_that_is_stopped_and_killed(here: Path) -> None:
    env = {**os.environ, "TMPDIR": str(here)}
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(here / "store")], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def probe() -> tuple[int, str]:
        argv = [sys.executable, "-m", "backhaul", "doctor", "--ready", "--name", "lonely"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout

    with worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"up\n"
            assert any(probe()[0] == 0 for _ in range(5))  # on a busy machine, an answer may take too long
            worker.send_signal(signal.SIGSTOP)
            code, text = probe()
            assert code == 1
            assert "worker 'lonely' is not among them" in text
        finally:
            worker.kill()
    assert_gone([worker.pid])
    assert probe()[0] == 1


def test_a_probe_does_not_import_torch() -> None:
    """A probe runs every few seconds; torch alone takes seconds of a processor."""
    code = "import sys, backhaul.doctor.ready; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
