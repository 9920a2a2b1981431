"""`backhaul run --hosts localhost:N`: the steward on real pipes, without ssh. The scripts do not import torch."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from launching import Launch, pids

import backhaul
from backhaul.launch import protocol, ssh
from backhaul.launch.feed import Feed
from backhaul.launch.guardian import Guardian, Register
from processes import PATIENCE, assert_gone

RunScript = Callable[..., Launch]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunScript]:
    launches: list[Launch] = []

    def start(source: str, *options: str, **more: object) -> Launch:
        (tmp_path / "script.py").write_text(dedent(source))
        launch = Launch("--hosts", "localhost:2", *options, "script.py", cwd=tmp_path, **more)  # type: ignore[arg-type]
        launches.append(launch)
        return launch

    yield start
    for launch in launches:
        launch.popen.kill()
        launch.popen.communicate()


def test_output_environment_and_success(run: RunScript) -> None:
    source = """
        import os, sys
        print(*(os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "BACKHAUL_HOST")))
        print("trouble", file=sys.stderr)
        """
    code, out, err = run(source).finish()
    assert code == 0
    assert sorted(out.splitlines()) == ["[worker0] 0 0 0 127.0.0.1 127.0.0.1", "[worker1] 1 1 0 127.0.0.1 127.0.0.1"]
    assert sorted(err.splitlines()) == ["[worker0] trouble", "[worker1] trouble"]


def test_a_failure_and_a_restart(run: RunScript) -> None:
    source = """
        import os, signal
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
        """
    code, _, err = run(source, "--max-restarts", "1").finish()
    assert code == 137
    how = "worker1 was killed by SIGKILL (signal 9) on host localhost"
    assert err.splitlines() == [
        f"backhaul: {how}; it is restarted, and 0 restarts are left",
        f"backhaul: {how}; the other workers were stopped",
    ]


def test_with_rejoin_the_others_go_on(run: RunScript) -> None:
    source = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            sys.exit(3)
        time.sleep(0.5)  # it would be stopped
        print("done")
        """
    code, out, err = run(source, "--rejoin").finish()
    assert (code, out) == (3, "[worker0] done\n")
    assert err.splitlines() == [
        "backhaul: worker1 exited with code 3 on host localhost; the other workers go on",
        "backhaul: worker1 exited with code 3 on host localhost",
    ]


def test_a_killed_launcher_leaves_no_process_behind(run: RunScript) -> None:
    launch = run("import os, signal; print(os.getpid(), os.getppid()); signal.pause()")
    family = pids(launch.lines(2))
    directory = Path(f"/proc/{family[0]}/environ").read_bytes().split(b"BACKHAUL_RUNTIME_DIR=")[1].split(b"\0")[0]
    assert os.path.exists(directory)
    launch.popen.kill()
    assert_gone(family)
    eventually(lambda: not os.path.exists(directory))


def test_a_killed_steward_ends_all(run: RunScript) -> None:
    launch = run("import os, signal; print(os.getpid(), os.getppid()); signal.pause()")
    family = pids(launch.lines(2))
    os.kill(family[1], signal.SIGKILL)
    code, _, err = launch.finish()
    assert code == 255
    assert err == "backhaul: the connection with host localhost has ended: it was killed by SIGKILL (signal 9)\n"
    assert_gone(family)


def test_a_signal_is_passed_on(run: RunScript) -> None:
    source = """
        import signal, sys
        signal.signal(signal.SIGINT, lambda *_: (print("got it", flush=True), sys.exit(5)))
        print("ready")
        signal.pause()
        """
    launch = run(source)
    launch.lines(2)
    launch.popen.send_signal(signal.SIGINT)
    code, out, err = launch.finish()
    assert (code, err) == (130, "backhaul: stopped by SIGINT\n")
    assert sorted(out.splitlines()) == ["[worker0] got it", "[worker1] got it"]


def test_a_signal_ends_a_launch_whose_output_is_not_read(run: RunScript, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    source = """
        import os, signal
        if os.environ["RANK"] == "0":
            print(os.getpid())
            os.write(1, 200 * (1023 * b"x" + b"\\n"))  # more than fits into the launcher's standard output
            open("gate", "w").close()
        signal.pause()
        """
    launch = run(source, merged=True)
    worker = pids([launch.line()])
    (tmp_path / "gate").read_text()
    launch.stop_unread(worker)


# Parts on their own.


def test_a_steward_ends_its_workers_when_it_is_not_answered(tmp_path: Path) -> None:
    """A launcher that lives and says nothing: it may be stopped, or the network is gone."""
    (tmp_path / "script.py").write_text("import signal; signal.pause()")
    steward = subprocess.Popen(
        [sys.executable, "-c", ssh.BOOT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert steward.stdin is not None
    assert steward.stdout is not None
    source = str(Path(backhaul.__file__).parent.parent)
    setup = protocol.Setup("here", {}, str(tmp_path), "script.py", 1.0)
    start = protocol.Start(0, "worker0", ["script.py"], {})
    steward.stdin.write(ssh.first_line({"PYTHONPATH": source}) + protocol.frame(setup) + protocol.frame(start))
    steward.stdin.flush()
    assert steward.stderr is not None
    out = steward.stdout.read()
    err = steward.stderr.read()
    assert steward.wait(PATIENCE) == 0
    assert b"the launcher has not answered; the workers of this host are killed" in err
    messages = protocol.StewardReader().feed(out)
    assert isinstance(messages[0], protocol.Hello)
    (started,) = [message for message in messages if isinstance(message, protocol.Started)]
    assert_gone([started.pid])
    assert any(isinstance(message, protocol.Ask) for message in messages)
    for pipe in (steward.stdin, steward.stdout, steward.stderr):
        pipe.close()


def test_a_guardian_that_gets_no_message_kills_its_workers() -> None:
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True
    ) as child:
        guardian = Guardian()
        guardian.watch(child.pid)
        guardian.expect(0.2)
        assert child.wait(PATIENCE) == -signal.SIGKILL
        guardian.close()


def test_the_register_of_a_guardian_keeps_the_time_until_the_next_message() -> None:
    register = Register()
    assert not register.feed(b"+7\n")
    assert register.feed(b"=2.5\n+8\n")
    assert register.patience == 2.5
    assert register.groups == {7, 8}


def test_a_feed_keeps_what_does_not_fit_and_notices_a_reader_that_has_gone() -> None:
    with selectors.DefaultSelector() as selector:
        reader, writer = os.pipe()
        feed = Feed(writer, selector)
        data = os.urandom(1 << 20)
        feed.send(data[: 1 << 19])
        feed.send(data[1 << 19 :])
        feed.close()  # once everything is written
        received = b""
        while selector.get_map():
            received += os.read(reader, 1 << 16)
            for key, _ in selector.select(0):
                key.data()
        while chunk := os.read(reader, 1 << 16):
            received += chunk
        assert received == data
        os.close(reader)

        reader, writer = os.pipe()
        feed = Feed(writer, selector)
        os.close(reader)
        feed.send(b"x")
        assert feed.broken
        feed.abandon()
