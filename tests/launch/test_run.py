"""`backhaul run`, on real processes. The scripts do not import torch: they start in milliseconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from launching import Launch, pids

from backhaul.launch.guardian import Register
from processes import PATIENCE, assert_gone

RunScript = Callable[..., Launch]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunScript]:
    launches: list[Launch] = []

    def start(source: str, *args: str, n: int = 2, options: tuple[str, ...] = (), **kwargs: object) -> Launch:
        (tmp_path / "script.py").write_text(dedent(source))
        launch = Launch("-n", str(n), *options, "script.py", *args, cwd=tmp_path, **kwargs)  # type: ignore[arg-type]
        launches.append(launch)
        return launch

    yield start
    for launch in launches:
        launch.popen.kill()
        launch.popen.communicate()


def test_output_and_success(run: RunScript) -> None:
    source = """
        import os, sys
        print("hello from", os.environ["RANK"], sys.argv[1:])
        print("trouble", file=sys.stderr)
        sys.stdout.write("the end")
        """
    code, out, err = run(source, "a", "-n", "9", "--", "b", n=3).finish()
    assert code == 0
    assert sorted(out.splitlines()) == sorted(
        line
        for rank in range(3)
        for line in (
            f"[worker{rank}] hello from {rank} ['a', '-n', '9', '--', 'b']",
            f"[worker{rank}] the end",
        )
    )
    assert sorted(err.splitlines()) == [f"[worker{rank}] trouble" for rank in range(3)]


def test_environment_as_torchrun_sets_it(run: RunScript) -> None:
    source = """
        import os, stat
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
        print(*(os.environ[name] for name in names), os.environ.get("BACKHAUL_NAME"))
        directory = os.environ["BACKHAUL_RUNTIME_DIR"]
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        assert os.environ["BACKHAUL_INIT_METHOD"] == f"file://{directory}/store"
        assert len(bytes.fromhex(os.environ["BACKHAUL_SECRET"])) == 32
        assert 0 < int(os.environ["MASTER_PORT"]) < 65536
        print(os.environ["MASTER_PORT"], os.environ["BACKHAUL_SECRET"], directory)
        """
    code, out, err = run(source).finish()
    assert code == 0, err
    lines = sorted(line.split("] ")[1] for line in out.splitlines())
    shared = {line for line in lines if "/backhaul-" in line}
    assert len(shared) == 1
    assert not os.path.exists(shared.pop().split()[-1])
    assert [line for line in lines if "/backhaul-" not in line] == [
        "0 2 0 2 127.0.0.1 None",
        "1 2 1 2 127.0.0.1 None",
    ]


def test_names(run: RunScript) -> None:
    launch = run("import os; print(os.environ['BACKHAUL_NAME'])", options=("--names", "ps,trainer"))
    assert sorted(launch.finish()[1].splitlines()) == ["[ps] ps", "[trainer] trainer"]


def test_module(run: RunScript, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tool.py").write_text("import sys; print(__name__, __spec__.name, sys.argv[1:])")
    launch = Launch("-m", "package.tool", "-m", "x", cwd=tmp_path)
    assert launch.finish()[:2] == (0, "[worker0] __main__ package.tool ['-m', 'x']\n")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["-n", "0", "x.py"], "-n must be at least 1, not 0"),
        (["-n", "two", "x.py"], "invalid int value: 'two'"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["-n", "2", "--names", "a", "."], "--names needs 2 different names"),
        (["-n", "2", "--names", "a,a", "."], "--names needs 2 different names"),
        ([], "the following arguments are required: SCRIPT"),
    ],
)
def test_misuse(options: list[str], complaint: str, tmp_path: Path) -> None:
    code, out, err = Launch(*options, cwd=tmp_path).finish()
    assert (code, out) == (2, "")
    assert complaint in err
    assert "Traceback" not in err


def test_the_first_failure_stops_the_rest(run: RunScript) -> None:
    source = """
        import os, signal, sys
        if os.environ["RANK"] == "1":
            sys.exit(7)
        signal.pause()  # ends by our SIGTERM, which must not become the exit code
        """
    code, _, err = run(source, n=3).finish()
    assert code == 7
    assert err == "backhaul: worker1 exited with code 7; the other workers were stopped\n"


def test_death_by_signal(run: RunScript) -> None:
    source = """
        import os, signal
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()
        """
    code, _, err = run(source).finish()
    assert code == 128 + signal.SIGSEGV
    assert "worker0 was killed by SIGSEGV (signal 11)" in err


def test_a_worker_that_ends_well_leaves_the_others_alone(run: RunScript, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    source = """
        import os
        if os.environ["RANK"] == "0":
            open("gate").read()  # until the test opens and closes it
            print("done")
        """
    launch = run(source)
    (tmp_path / "gate").write_text("")
    assert launch.finish()[:2] == (0, "[worker0] done\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_passed_on_once(run: RunScript, signum: int) -> None:
    source = """
        import os, signal, sys
        def leave(signum, frame):
            print("got", signum, flush=True)
            sys.exit(5)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, leave)
        print(os.getpid())
        signal.pause()
        """
    launch = run(source)
    workers = pids(launch.lines(2))
    launch.popen.send_signal(signum)
    code, out, err = launch.finish()
    assert code == 128 + signum
    assert sorted(out.splitlines()) == [f"[worker0] got {int(signum)}", f"[worker1] got {int(signum)}"]
    assert err == f"backhaul: stopped by {signal.Signals(signum).name}\n"
    assert_gone(workers)


NOTED = """
    import os, signal, subprocess, sys
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda signum, frame: print("got", signum, child.poll(), flush=True))
    print(os.getpid(), flush=True)
    while True:
        signal.pause()
    """


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_for_the_program_stops_no_worker(run: RunScript, signum: int) -> None:
    """The worker itself gets it. Its children, which may not handle it, do not."""
    launch = run(NOTED)
    launch.lines(2)
    for _ in range(2):
        launch.popen.send_signal(signum)
        assert launch.lines(2) == [f"[worker{rank}] got {int(signum)} None\n" for rank in (0, 1)]
    launch.popen.send_signal(signal.SIGTERM)
    assert launch.finish()[::2] == (143, "backhaul: stopped by SIGTERM\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_a_signal_that_is_ignored_from_the_start_stays_ignored(run: RunScript, signum: int, tmp_path: Path) -> None:
    """As in the background of a shell, and under nohup."""
    os.mkfifo(tmp_path / "gate")
    source = """
        import signal
        signals = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
        print([int(each) for each in signals if signal.getsignal(each) is signal.SIG_IGN])
        open("gate").read()
        print("done")
        """
    launch = run(source, n=1, preexec_fn=lambda: signal.signal(signum, signal.SIG_IGN))
    assert launch.line() == f"[worker0] [{int(signum)}]\n"
    launch.popen.send_signal(signum)
    (tmp_path / "gate").write_text("")
    assert launch.finish() == (0, "[worker0] done\n", "")


def test_with_rejoin_a_failure_leaves_the_others_alone(run: RunScript, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    source = """
        import os, sys
        if os.environ["RANK"] == "1":
            print("fails")
            sys.exit(3)
        open("gate").read()
        print("done")
        """
    launch = run(source, options=("--rejoin",))
    assert launch.line() == "[worker1] fails\n"
    assert launch.complaint() == "backhaul: worker1 exited with code 3; the other workers go on\n"
    (tmp_path / "gate").write_text("")
    assert launch.finish() == (3, "[worker0] done\n", "backhaul: worker1 exited with code 3\n")


STUBBORN = """
    import os, signal
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, frame: print("no", flush=True))
    print(os.getpid())
    while True:
        signal.pause()
    """


def test_a_second_interrupt_kills_at_once(run: RunScript) -> None:
    launch = run(STUBBORN)
    workers = pids(launch.lines(2))
    launch.popen.send_signal(signal.SIGINT)
    assert launch.lines(2) == ["[worker0] no\n", "[worker1] no\n"]
    started = time.monotonic()
    launch.popen.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 130
    assert time.monotonic() - started < 4
    assert_gone(workers)


@pytest.mark.parametrize(("of_worker", "signum", "code"), [(True, signal.SIGKILL, 137), (False, signal.SIGTERM, 143)])
def test_a_stubborn_worker_is_killed_after_the_grace_time(
    run: RunScript, of_worker: bool, signum: int, code: int
) -> None:
    """After the failure of another worker, and after a signal to the launcher."""
    launch = run(STUBBORN)
    workers = pids(launch.lines(2))
    os.kill(workers[1] if of_worker else launch.popen.pid, signum)
    started = time.monotonic()
    assert launch.finish()[0] == code
    assert 4 < time.monotonic() - started < 12
    assert_gone(workers)


FAMILY = """
    import os, signal, subprocess, sys
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; print(flush=True); signal.pause()"],
        stdout=subprocess.PIPE)
    child.stdout.readline()
    print(os.getpid(), child.pid)
    if sys.argv[1:]:
        os._exit(int(sys.argv[1]))
    signal.pause()
    """


def test_a_killed_launcher_leaves_no_process_behind(run: RunScript) -> None:
    launch = run(FAMILY, n=3)
    family = pids(launch.lines(3))
    assert len(family) == 6
    directory = Path(f"/proc/{family[0]}/environ").read_bytes().split(b"BACKHAUL_RUNTIME_DIR=")[1].split(b"\0")[0]
    assert os.path.exists(directory)
    guardian = [pid for pid in children(launch.popen.pid) if pid not in family]
    assert len(guardian) == 1
    launch.popen.kill()
    assert_gone([*family, *guardian])
    assert not os.path.exists(directory)


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == parent:
            found.append(int(entry.parent.name))
    return found


@pytest.mark.parametrize("code", ["0", "3"])
def test_children_of_workers_end_with_them(run: RunScript, code: str) -> None:
    launch = run(FAMILY, code, n=1)
    family = pids(launch.lines(1))
    assert launch.finish()[0] == int(code)
    assert_gone(family)


def test_an_interrupt_reaches_children_of_workers(run: RunScript) -> None:
    launch = run(FAMILY, n=2)
    family = pids(launch.lines(2))
    launch.popen.send_signal(signal.SIGINT)
    assert launch.finish()[0] == 130
    assert_gone(family)


def test_an_escaped_child_with_open_output_does_not_delay_the_launcher(run: RunScript) -> None:
    source = """
        import os, subprocess, sys
        child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True)
        print(child.pid)
        """
    launch = run(source, n=1)
    (escaped,) = pids(launch.lines(1))
    try:
        started = time.monotonic()
        assert launch.finish()[0] == 0
        assert time.monotonic() - started < 5
    finally:
        os.kill(escaped, signal.SIGKILL)


def test_large_and_undecodable_output(run: RunScript) -> None:
    source = """
        import os
        block = (b"\\xff\\xfe" * 500 + b"\\n") * 1000
        for _ in range(4):
            os.write(1, block)
            os.write(2, block)
        """
    launch = run(source)
    code, out, err = launch.finish()
    assert code == 0
    expected = {f"[worker{rank}] " + "\udcff\udcfe" * 500 for rank in (0, 1)}
    for text in (out, err):
        lines = text.split("\n")
        assert len(lines) == 8001
        assert set(lines) == {*expected, ""}


def test_a_reader_that_goes_away_ends_the_job(run: RunScript) -> None:
    source = """
        import os
        print(os.getpid(), flush=True)
        while True:
            print("x" * 1000)
        """
    launch = run(source)
    worker = pids([launch.line()])
    assert launch.popen.stdout is not None
    launch.popen.stdout.close()
    assert launch.popen.wait(PATIENCE) == 141
    assert launch.popen.stderr is not None
    assert "Traceback" not in launch.popen.stderr.read()
    assert_gone(worker)


@pytest.mark.parametrize("merged", [False, True])
def test_a_signal_ends_a_launch_whose_output_is_not_read(run: RunScript, tmp_path: Path, merged: bool) -> None:
    """As after Ctrl-S in a terminal, or in a pager. ``merged``: standard error goes the same way."""
    os.mkfifo(tmp_path / "gate")
    source = """
        import os, signal
        def leave(signum, frame):
            os.write(1, 2000 * line)  # more than fits anywhere
            os._exit(5)
        line = 1023 * b"x" + b"\\n"
        signal.signal(signal.SIGTERM, leave)
        print(os.getpid())
        os.write(1, 500 * line)  # more than fits into the launcher's standard output
        open("gate", "w").close()
        while True:
            signal.pause()
        """
    launch = run(source, n=1, merged=merged)
    worker = pids([launch.line()])
    (tmp_path / "gate").read_text()
    launch.stop_unread(worker)
    assert launch.popen.stderr is None or launch.popen.stderr.read() == "backhaul: stopped by SIGTERM\n"


def test_colours_only_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('hi')")
    ours, theirs = os.openpty()
    argv = [sys.executable, "-m", "backhaul", "run", "script.py"]
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | {"TERM": "xterm"}

    def shown(*options: str, **more: str) -> bytes:
        subprocess.run(
            [*argv[:-1], *options, argv[-1]], cwd=tmp_path, env=env | more, stdout=theirs, check=True, timeout=PATIENCE
        )
        return os.read(ours, 4096).replace(b"\r\n", b"\n")

    try:
        assert shown() == b"\x1b[36m[worker0] \x1b[0mhi\n"
        assert shown("--no-color") == b"[worker0] hi\n"
        assert shown(NO_COLOR="1") == b"[worker0] hi\n"
    finally:
        os.close(ours)
        os.close(theirs)


def test_version_and_help_do_not_import_torch() -> None:
    source = (
        "import sys, backhaul, backhaul.__main__\n"
        "try: backhaul.__main__.main(['--version'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'msgspec' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("backhaul 0.")


def test_the_register_of_a_guardian_adds_and_removes_groups() -> None:
    register = Register()
    for chunk in (b"+1", b"2\n+7\n-1", b"2\n-99\n"):
        register.feed(chunk)
    assert register.groups == {7}
