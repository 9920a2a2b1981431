"""`backhaul.cluster` on real processes.

The workers import this file, so its functions are callable there. Tests about ``__main__`` run a
script of their own.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import backhaul
from backhaul import rpc
from backhaul.errors import MisuseError, NotInitializedError, OptionError, RpcTimeoutError, WorkerLostError
from backhaul.worker import current_or_none
from processes import PATIENCE, assert_gone

SLOW = 60.0  # for a process that imports torch on a busy machine


def who() -> str:
    return rpc.get_worker_info().name


def ask(to: str) -> list[str]:
    return [who(), rpc.rpc_sync(to, who)]


def say(text: str) -> None:
    print(text)
    print(text.upper(), file=sys.stderr)


def sleep_forever() -> None:
    threading.Event().wait()


def runtime_directory() -> str:
    return os.environ["BACKHAUL_RUNTIME_DIR"]


def start_a_cluster() -> None:
    backhaul.cluster(1)


def test_a_cluster_from_start_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    with backhaul.cluster(
        2, names=["left", "right"], env={"SPICE": "salt"}, options=rpc.RpcOptions(rpc_timeout=30)
    ) as workers:
        left, right = workers
        assert len(workers) == 2
        assert [worker.name for worker in workers] == ["left", "right"]
        assert [worker.info.id for worker in workers] == [1, 2]
        assert left.rpc_sync(os.getpid) == left.pid != right.pid
        assert right.rpc_async(torch.add, args=(torch.ones(2), 1)).wait().tolist() == [2.0, 2.0]
        assert rpc.rpc_sync("right", os.getenv, args=("SPICE",)) == "salt"
        assert rpc.get_worker_info() == rpc.WorkerInfo(0, "driver")
        assert left.rpc_sync(ask, args=("right",)) == ["left", "right"]
        assert left.rpc_sync(ask, args=("driver",)) == ["left", "driver"]
        left.rpc_sync(say, args=("hello",))
        directory = left.rpc_sync(runtime_directory)
        assert "BACKHAUL_RUNTIME_DIR" not in os.environ
        with pytest.raises(MisuseError, match="already worker 'driver'"):
            backhaul.cluster(1)
        with pytest.raises(MisuseError, match="cannot start a cluster of its own"):
            left.rpc_sync(start_a_cluster)
        assert left.alive
        pids = [worker.pid for worker in workers]
    assert_gone(pids)
    assert not os.path.exists(directory)
    assert not left.alive
    assert "exited with code 0" in repr(workers)
    assert current_or_none() is None
    with pytest.raises(NotInitializedError):
        left.rpc_sync(who)
    workers.close()
    shown = capsys.readouterr()
    assert shown.out == "[left] hello\n"
    assert shown.err == "[left] HELLO\n"


def test_an_exception_leaves_at_once_and_unchanged() -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught, backhaul.cluster(2, output=False) as workers:  # noqa: PT012
        pids = [worker.pid for worker in workers]
        workers[0].rpc_async(sleep_forever)
        started = time.monotonic()
        raise error
    assert caught.value is error
    assert time.monotonic() - started < 4
    assert_gone(pids)
    assert current_or_none() is None


def test_a_worker_that_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    with backhaul.cluster(2, output=False) as workers:
        future = workers[0].rpc_async(sleep_forever)
        os.kill(workers[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="worker1"):
            future.wait()
        assert workers[1].rpc_sync(who) == "worker2"
    assert "was killed by SIGKILL" in repr(workers[0])
    assert ("backhaul.launch.members", logging.WARNING, "worker 'worker1' was killed by SIGKILL (signal 9)") in (
        caplog.record_tuples
    )


def test_shutdown_in_the_block_ends_the_workers_too() -> None:
    with backhaul.cluster(1, output=False) as workers:
        rpc.shutdown()
    assert_gone([workers[0].pid])


def test_a_worker_that_dies_while_it_joins() -> None:
    start = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"(?s)exited with code 1 .*no/such/directory") as caught:
        backhaul.cluster(2, env={"BACKHAUL_RUNTIME_DIR": "/no/such/directory"}, output=False)
    assert caught.value.worker in ("worker1", "worker2")
    assert time.monotonic() - start < 45, "it was waited for as if it could still come"
    assert current_or_none() is None


def test_misuse() -> None:
    with pytest.raises(OptionError, match="at least 1; got 0"):
        backhaul.cluster(0)
    with pytest.raises(OptionError, match=r"cluster\(2\) needs 2 names"):
        backhaul.cluster(2, names=["a"])
    with pytest.raises(OptionError, match="differ from each other and from 'driver'"):
        backhaul.cluster(2, names=["a", "driver"])
    with pytest.raises(OptionError, match="env: 'THREADS': 1 must be a variable and its value, both strings"):
        backhaul.cluster(1, env={"THREADS": 1})  # type: ignore[dict-item]
    with pytest.raises(OptionError, match="leave out the option init_method"):
        backhaul.cluster(1, options=rpc.RpcOptions(init_method="file:///tmp/x"))
    with pytest.raises(OptionError, match="for parties that each start their own"):
        backhaul.cluster(1, options=rpc.RpcOptions(trust="federation"))


Script = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """Starts a driver script; its standard error is part of its output."""
    started: list[subprocess.Popen[str]] = []

    def start(
        source: str, *args: str, python: tuple[str, ...] = ("script.py",), stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(dedent(source))
        popen = subprocess.Popen(
            [sys.executable, *python, *args],
            cwd=tmp_path,
            env={**os.environ, "IPYTHONDIR": str(tmp_path)},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(popen)
        return popen

    yield start
    for popen in started:
        popen.kill()
        popen.communicate()


def output(popen: subprocess.Popen[str], code: int = 0) -> list[str]:
    shown, _ = popen.communicate(timeout=SLOW)
    assert popen.returncode == code, shown
    return shown.splitlines()


def test_a_guarded_script_and_the_death_of_its_driver(script: Script) -> None:
    popen = script(
        """
        import sys, threading
        from dataclasses import dataclass

        import backhaul
        from backhaul import rpc

        @dataclass
        class Point:
            x: int

        class Refused(Exception):
            pass

        def double(point):
            return Point(2 * point.x)

        def via(to, point):
            return rpc.rpc_sync(to, double, args=(point,))

        def refuse():
            raise Refused(sys.argv[1])

        if __name__ == "__main__":
            with backhaul.cluster(2) as workers:
                def late(point):
                    return double(point).x + 1

                print(workers[0].rpc_sync(double, args=(Point(4),)))
                print(workers[0].rpc_sync(via, args=("worker2", Point(5))))
                print(workers[1].rpc_sync(late, args=(Point(6),)))
                try:
                    workers[1].rpc_sync(refuse)
                except Refused as error:
                    print("refused", error)
                print(*[worker.pid for worker in workers], flush=True)
                threading.Event().wait()
        """,
        "argument",
    )
    assert popen.stdout is not None
    lines = [popen.stdout.readline().rstrip() for _ in range(5)]
    assert lines[:4] == ["Point(x=8)", "Point(x=10)", "13", "refused argument"], popen.stdout.read()
    pids = [int(pid) for pid in lines[4].split()]
    directory = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"BACKHAUL_RUNTIME_DIR=")[1].split(b"\0")[0]
    popen.kill()
    assert_gone(pids)
    deadline = time.monotonic() + PATIENCE
    while os.path.exists(directory) and time.monotonic() < deadline:
        os.sched_yield()
    assert not os.path.exists(directory)


UNGUARDED = """
    import sys
    import backhaul

    def triple(x):
        return 3 * x

    print("above", __name__)
    with backhaul.cluster(1, output=False) as workers:
        def plus_one(x):
            return triple(x) + 1

        print(workers[0].rpc_sync(triple, args=(5,)), workers[0].rpc_sync(plus_one, args=(5,)))
    print("below", sys.argv[1:])
    """


def test_an_unguarded_script(script: Script) -> None:
    assert output(script(UNGUARDED, "a", "b")) == ["above __main__", "15 16", "below ['a', 'b']"]


def test_a_script_run_as_a_module(script: Script) -> None:
    assert output(script(UNGUARDED, python=("-m", "script"))) == ["above __main__", "15 16", "below []"]


def test_a_program_on_the_command_line(script: Script) -> None:
    lines = output(script("", python=("-c", dedent(UNGUARDED))))
    assert lines == ["above __main__", "15 16", "below []"]


def test_workers_that_do_not_start(script: Script) -> None:
    popen = script(
        """
        import os, signal, sys
        if __name__ == "__mp_main__":
            match os.environ["MOOD"], os.environ["RANK"]:
                case "bad", "2":
                    print("no, thanks", file=sys.stderr)
                    sys.exit(3)
                case "idle", "1":
                    signal.pause()
        import glob, tempfile
        import backhaul
        from backhaul import rpc

        def try_to(mood, timeout):
            try:
                backhaul.cluster(2, env={"MOOD": mood}, timeout=timeout, output=False)
            except Exception as error:
                print(type(error).__name__, *str(error).splitlines(), getattr(error, "worker", ""), sep="|")
            children = open(f"/proc/self/task/{os.getpid()}/children").read()
            print("left behind:", children, *glob.glob(tempfile.gettempdir() + "/backhaul-*"))

        if __name__ == "__main__":
            tempfile.tempdir = tempfile.mkdtemp()
            try_to("bad", 60)
            try_to("idle", 0.5)
            with backhaul.cluster(2, env={"MOOD": "good"}) as workers:
                print(workers[1].rpc_sync(abs, args=(-1,)))
            os.rmdir(tempfile.tempdir)
        """
    )
    assert output(popen) == [
        "WorkerLostError|worker 'worker2' exited with code 3 while the cluster was starting. "
        "Its last output:|no, thanks|worker2",
        "left behind: ",
        "RpcTimeoutError|worker 'worker1' did not start in time; if it is only slow, give cluster() a longer timeout|",
        "left behind: ",
        "1",
    ]
    assert issubclass(RpcTimeoutError, TimeoutError)


def test_a_notebook(script: Script) -> None:
    """IPython runs the cells. The cluster is closed when the interpreter ends."""
    pytest.importorskip("IPython")
    popen = script(
        """
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()

        def cell(source):
            shell.run_cell(source).raise_error()

        cell("import backhaul, torch\\nfrom backhaul import rpc\\nworkers = backhaul.cluster(2)")
        cell("print(*[worker.pid for worker in workers])")
        cell("SCALE = 10\\ndef scaled(x):\\n    return SCALE * x")
        cell("print(workers[0].rpc_sync(scaled, args=(torch.tensor(2),)))")
        cell("SCALE = 100")
        cell("print(rpc.rpc_sync('worker1', scaled, args=(3,)))")
        cell("def scaled(x):\\n    return -SCALE * x")
        cell("def via(to, x):\\n    return rpc.rpc_sync(to, scaled, args=(x,))")
        cell("print(workers[0].rpc_async(via, args=('worker2', 4)).wait())")
        cell("class Net(torch.nn.Module):\\n    def forward(self, x): return x + SCALE")
        cell("def make(): return Net()")
        cell("print(workers[1].rpc_sync(make)(1))")
        cell("def fail():\\n    raise KeyError('in the notebook')")
        cell("try:\\n    workers[1].rpc_sync(fail)\\nexcept KeyError as error:\\n    cause = str(error.__cause__)")
        cell("print('    raise KeyError' in cause)")
        cell("import operator\\nclass Late:\\n    size = 7")
        cell("print(workers[1].rpc_sync(getattr, args=(Late, 'size')))")
        cell("print(workers[1].rpc_sync(type, args=(Late(),)).__name__)")
        """
    )
    lines = output(popen)
    assert lines[1:8] == ["tensor(20)", "300", "-400", "101", "True", "7", "Late"], lines
    assert_gone([int(pid) for pid in lines[0].split()])


def test_a_plain_interpreter(script: Script) -> None:
    """The interpreter keeps no source before Python 3.13, nor here, where the input is not a terminal."""
    popen = script("", python=("-i", "-q"), stdin=subprocess.PIPE)
    typed = """
        import backhaul
        workers = backhaul.cluster(1)

        def helper(x): return x + 1

        def f(x, y=2): return helper(x) * y

        print("result", workers[0].rpc_sync(f, args=(3,)))
        class Plain: pass

        def g(): return Plain()

        try: workers[0].rpc_sync(g)
        except TypeError as error: print("error", error)

        """
    shown, _ = popen.communicate(dedent(typed), timeout=SLOW)
    assert "result 8" in shown, shown
    assert "error the workers do not have 'Plain' of __main__" in shown, shown
