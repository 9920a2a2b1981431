"""`backhaul run --hosts` over a real sshd on separate hosts (see `ssh_hosts`); `make hosts` runs it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from launching import Launch, pids
from ssh_hosts import Network, command_line, needed, processes_in

from processes import assert_gone

pytestmark = [*needed, pytest.mark.slow]

LONG = 60.0  # a launch over ssh on a busy machine
LEASE = 4.0
PAUSE = "import os, signal; print(os.getpid()); signal.pause()"

RunScript = Callable[..., Launch]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    network = Network(tmp_path_factory.mktemp("hosts"))
    yield network
    network.close()


@pytest.fixture
def run(network: Network, tmp_path: Path) -> Iterator[RunScript]:
    """Starts a script on the hosts. At the end nothing is left on any host, whatever the test did."""
    launches: list[Launch] = []

    def start(source: str, *options: str, args: tuple[str, ...] = (), **more: object) -> Launch:
        (tmp_path / "script.py").write_text(dedent(source))
        launch = network.launch(*options, "script.py", *args, cwd=tmp_path, **more)  # type: ignore[arg-type]
        launches.append(launch)
        return launch

    yield start
    network.plug_in()
    for launch in launches:
        launch.popen.kill()
        launch.popen.communicate()
    network.assert_empty()


def test_ranks_environment_and_output(run: RunScript) -> None:
    source = """
        import os, socket, sys
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"]
        print(*(os.environ[name] for name in names), socket.gethostname(), sys.argv[1:])
        print(os.environ["MASTER_ADDR"], os.environ["BACKHAUL_HOST"], os.environ["FLAVOUR"], os.environ.get("COLOUR"))
        assert os.environ["BACKHAUL_INIT_METHOD"] == f"tcp://10.79.0.1:{os.environ['MASTER_PORT']}"
        print("trouble", file=sys.stderr)
        sys.stdout.write("the end")
        """
    launch = run(source, "--env", "FLAVOUR=salt", args=("x", "--hosts"), env={"COLOUR": "red"})
    code, out, err = launch.finish(LONG)
    assert code == 0, err
    lines = []
    for rank, (local, host, name) in enumerate([(0, 0, "a"), (1, 0, "a"), (0, 1, "b"), (1, 1, "b")]):
        lines += [
            f"[worker{rank}] {rank} 4 {local} 2 {host} 2 {name} ['x', '--hosts']",
            f"[worker{rank}] 10.79.0.1 10.79.0.{host + 1} salt None",
            f"[worker{rank}] the end",
        ]
    assert sorted(out.splitlines()) == sorted(lines)
    assert sorted(err.splitlines()) == [f"[worker{rank}] trouble" for rank in range(4)]


def test_the_key_is_on_no_command_line_in_no_environment_of_ssh_and_in_no_file(
    run: RunScript, network: Network
) -> None:
    launch = run("import os, signal; print(os.environ['BACKHAUL_SECRET'], flush=True); signal.pause()")
    (secret,) = {line.split("] ")[1].strip().encode() for line in launch.lines(4)}
    assert len(bytes.fromhex(secret.decode())) == 32
    workers = {pid for host in network.hosts.values() for pid in host.find("script.py")}
    assert len(workers) == 4
    others = {pid for host in network.hosts.values() for pid in host.processes()} - workers
    others |= set(processes_in(network.namespace))
    assert len([pid for pid in others if command_line(pid).startswith("ssh -F")]) == 2
    for pid in workers | others:
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
    for pid in others:
        assert secret not in Path(f"/proc/{pid}/environ").read_bytes()
    files = [path for host in network.hosts.values() for path in host.temporary.rglob("*") if path.is_file()]
    assert files  # a lock, and the file that promises news
    assert all(secret not in path.read_bytes() for path in files)
    launch.popen.send_signal(signal.SIGTERM)
    assert launch.finish(LONG)[0] == 143


def test_a_hostfile_users_names_and_a_module(network: Network, tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("import os; print(os.environ['BACKHAUL_NAME'], os.environ['MASTER_ADDR'])")
    (tmp_path / "hosts").write_text(f"root@b slots=1 address=10.79.0.2 workdir={tmp_path}\na\n")
    options = ["--hostfile", "hosts", *network.options, "--workdir", "/nowhere"]
    launch = Launch(*options, "--names", "ps,trainer", "-m", "tool", cwd=tmp_path, before=network.before)
    code, _, err = launch.finish(LONG)
    assert code == 255
    assert "host a: it has no directory /nowhere" in err  # b has its own directory
    options = [*options[:-1], str(tmp_path), "--names", "ps,trainer", "-m"]
    code, out, err = Launch(*options, "tool", cwd=tmp_path, before=network.before).finish(LONG)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[ps] ps 10.79.0.2", "[trainer] trainer 10.79.0.2"]
    network.assert_empty()


def test_this_machine_and_another_one(run: RunScript) -> None:
    source = "import os; print(os.environ['MASTER_ADDR'], os.environ['BACKHAUL_HOST'])"
    code, out, err = run(source, hosts="localhost:1,b:1").finish(LONG)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["[worker0] 10.79.0.254 10.79.0.254", "[worker1] 10.79.0.254 10.79.0.2"]


RPC = """
    import os, sys
    import torch
    import torch.distributed as dist
    import backhaul.autograd as dist_autograd
    from backhaul import rpc

    rpc.init_rpc()
    name, rank = rpc.get_worker_info().name, rpc.get_worker_info().id
    dist.init_process_group("gloo")  # at the same address and port
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    if rank == 0:
        x = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as context:
            y = x
            for to in ("worker1", "worker2"):
                y = rpc.rpc_sync(to, torch.mul, (y, 3.0))
            dist_autograd.backward(context, [y.sum()])
            print(dist_autograd.get_gradients(context)[x].tolist(), total.item())
    dist.barrier()
    rpc.shutdown()
    dist.destroy_process_group()
    """


def test_gradients_over_hosts_beside_torch_distributed(run: RunScript) -> None:
    code, out, err = run(RPC, "--env", "GLOO_SOCKET_IFNAME=cable", hosts="a:2,b:1").finish(LONG)
    assert code == 0, err
    assert out == "[worker0] [9.0, 9.0, 9.0] 3.0\n"


IPV6 = """
    import os
    import torch
    import backhaul.autograd as dist_autograd
    from backhaul import rpc

    rpc.init_rpc()
    if rpc.get_worker_info().id == 0:
        x = torch.ones(3, requires_grad=True)
        with dist_autograd.context() as context:
            y = rpc.rpc_sync("worker1", torch.mul, (x, 3.0))
            dist_autograd.backward(context, [y.sum()])
            print(dist_autograd.get_gradients(context)[x].tolist(), rpc.debug_info()["peers"][0]["path"])
    rpc.shutdown()
    print(os.environ["MASTER_ADDR"], os.environ["BACKHAUL_HOST"])
    """


def test_gradients_over_ipv6(run: RunScript) -> None:
    code, out, err = run(IPV6, hosts="[fd79::1]:1,[fd79::2]:1").finish(LONG)
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "[worker0] [3.0, 3.0, 3.0] tls",
        "[worker0] fd79::1 fd79::1",
        "[worker1] fd79::1 fd79::2",
    ]


# How it ends.


def test_a_failure_on_one_host_stops_the_others(run: RunScript) -> None:
    source = """
        import os, signal, sys
        if os.environ["RANK"] == "3":
            sys.exit(7)
        signal.pause()
        """
    code, _, err = run(source).finish(LONG)
    assert code == 7
    assert err == "backhaul: worker3 exited with code 7 on host b; the other workers were stopped\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_is_passed_on_once(run: RunScript, signum: int) -> None:
    source = """
        import signal, sys
        def leave(signum, frame):
            print("got", signum, flush=True)
            sys.exit(5)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(signum, leave)
        print("ready")
        signal.pause()
        """
    launch = run(source)
    assert len(launch.lines(4)) == 4
    launch.popen.send_signal(signum)
    code, out, err = launch.finish(LONG)
    assert code == 128 + signum
    assert sorted(out.splitlines()) == [f"[worker{rank}] got {int(signum)}" for rank in range(4)]
    assert err == f"backhaul: stopped by {signal.Signals(signum).name}\n"


def test_a_signal_for_the_program_stops_no_worker(run: RunScript) -> None:
    source = """
        import signal
        signal.signal(signal.SIGUSR1, lambda signum, frame: print("got", signum, flush=True))
        print("ready", flush=True)
        while True:
            signal.pause()
        """
    launch = run(source)
    launch.lines(4)
    for _ in range(2):
        launch.popen.send_signal(signal.SIGUSR1)
        assert launch.lines(4) == [f"[worker{rank}] got {int(signal.SIGUSR1)}\n" for rank in range(4)]
    launch.popen.send_signal(signal.SIGTERM)
    assert launch.finish(LONG)[::2] == (143, "backhaul: stopped by SIGTERM\n")


def test_a_second_interrupt_kills_at_once(run: RunScript) -> None:
    source = """
        import os, signal
        signal.signal(signal.SIGINT, lambda signum, frame: print("no", flush=True))
        print(os.getpid())
        while True:
            signal.pause()
        """
    launch = run(source, hosts="a:1,b:1")
    workers = pids(launch.lines(2))
    launch.popen.send_signal(signal.SIGINT)
    assert launch.lines(2) == ["[worker0] no\n", "[worker1] no\n"]
    launch.popen.send_signal(signal.SIGINT)
    assert launch.finish(LONG)[0] == 130
    assert_gone(workers)


def test_ctrl_z_does_not_suspend_the_launcher(run: RunScript) -> None:
    launch = run(PAUSE, hosts="a:1")
    assert launch.line()
    launch.popen.send_signal(signal.SIGTSTP)
    assert launch.complaint().startswith("backhaul: the launcher ignores Ctrl-Z")
    launch.popen.send_signal(signal.SIGTERM)
    assert launch.finish(LONG)[0] == 143


FAMILY = """
    import os, signal, subprocess, sys
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    print(os.getpid(), child.pid)
    signal.pause()
    """


def test_a_killed_launcher_leaves_no_process_behind_on_any_host(run: RunScript, network: Network) -> None:
    launch = run(FAMILY)
    family = pids(launch.lines(4))
    assert len(family) == 8
    launch.popen.kill()
    assert_gone(family)
    network.assert_empty()


@pytest.mark.parametrize("what", ["session", "steward", "worker"])
def test_a_kill_on_one_host_ends_all(run: RunScript, network: Network, what: str) -> None:
    launch = run(FAMILY)
    lines = launch.lines(4)
    family = pids(lines)
    b = network.hosts["b"]
    if what == "session":
        for pid in b.sessions():
            os.kill(pid, signal.SIGKILL)
    else:
        os.kill(b.steward() if what == "steward" else pids(lines)[4], signal.SIGKILL)
    code, _, err = launch.finish(LONG)
    assert_gone(family)
    if what == "worker":
        assert code == 137
        assert "worker2 was killed by SIGKILL (signal 9) on host b; the other workers were stopped" in err
    else:
        assert code == 255
        assert "the connection with host b has ended" in err
        assert "the other workers were stopped" in err


def test_a_steward_that_is_stopped_does_not_keep_its_workers(run: RunScript, network: Network) -> None:
    launch = run(FAMILY, "--host-timeout", str(LEASE))
    family = pids(launch.lines(4))
    steward = network.hosts["b"].steward()
    os.kill(steward, signal.SIGSTOP)
    try:
        code, _, err = launch.finish(LONG)
        assert code == 255
        assert "host b has not answered for" in err
        assert_gone(family)  # its guardian killed them
    finally:
        os.kill(steward, signal.SIGCONT)


# Hosts that vanish.


def test_a_host_that_vanishes_ends_all_on_both_sides(run: RunScript, network: Network) -> None:
    launch = run(FAMILY, "--host-timeout", str(LEASE))
    family = pids(launch.lines(4))
    network.pull("b")
    started = time.monotonic()
    code, _, err = launch.finish(LONG)
    assert code == 255
    assert "host b has not answered for" in err
    assert "it counts as lost after 4 s (--host-timeout)" in err
    assert time.monotonic() - started < LEASE + 20
    assert_gone(family)  # while the cable is out
    network.assert_empty("a")


def test_a_launcher_that_vanishes_ends_all(run: RunScript, network: Network) -> None:
    launch = run(FAMILY, "--host-timeout", str(LEASE))
    family = pids(launch.lines(4))
    network.pull("a", "b")
    os.kill(launch.popen.pid, signal.SIGKILL)
    assert_gone(family)


def test_a_short_interruption_of_the_network_harms_no_worker(run: RunScript, network: Network, tmp_path: Path) -> None:
    source = """
        import os, time
        print("ready", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.05)
        print("done")
        """
    launch = run(source, "--host-timeout", "12")
    launch.lines(4)
    network.pull("b")
    assert "host b has not answered for 6 s" in launch.complaint()
    network.plug_in()
    assert launch.complaint() == "backhaul: host b answers again\n"
    (tmp_path / "go").touch()
    code, out, err = launch.finish(LONG)
    assert code == 0, err
    assert sorted(out.splitlines()) == [f"[worker{rank}] done" for rank in range(4)]


# Restarts.


def test_a_worker_is_restarted_under_its_name_on_its_host(run: RunScript, tmp_path: Path) -> None:
    source = """
        import os, signal, socket
        times = os.environ.get("BACKHAUL_RESTARTS", "0")
        print(os.environ["RANK"], socket.gethostname(), times, flush=True)
        if os.environ["RANK"] == "2" and times != "2":
            os.kill(os.getpid(), signal.SIGKILL)
        """
    code, out, err = run(source, "--max-restarts", "2").finish(LONG)
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[worker0] 0 a 0",
        "[worker1] 1 a 0",
        "[worker2] 2 b 0",
        "[worker2] 2 b 1",
        "[worker2] 2 b 2",
        "[worker3] 3 b 0",
    ]
    assert err.count("worker2 was killed by SIGKILL (signal 9) on host b; it is restarted, and") == 2


GROUP = """
    import os, time
    import torch
    from backhaul import rpc

    rpc.init_rpc(rpc_backend_options=rpc.RpcOptions(unresponsive_after=60))
    me, again = os.environ["RANK"], os.environ.get("BACKHAUL_RESTARTS")
    watcher = os.environ.get("WATCHER", "0")
    other = "worker1" if watcher == "0" else "worker0"

    def wait_for(*words):
        while True:
            try:
                print("value", rpc.rpc_sync(other, os.getenv, ("BACKHAUL_RESTARTS", "none")), flush=True)
                if "again" in words:
                    return
            except rpc.WorkerLostError as error:
                if not isinstance(error, rpc.WorkerSuspectedError) and "lost" in words:
                    return error
            time.sleep(0.1)

    if me == watcher:
        kept = rpc.remote(other, torch.ones, args=(2,))
        kept.to_here()
        print("pid", rpc.rpc_sync(other, os.getpid), flush=True)
        print("lost:", wait_for("lost"), flush=True)
        if os.environ.get("REJOIN"):
            wait_for("again")
            print("again", flush=True)
    rpc.shutdown()
    """


def lines_until(launch: Launch, sign: str) -> str:
    while True:
        line = launch.line()
        assert line, launch.finish(LONG)
        if sign in line:
            return line


def test_the_cause_of_a_death_reaches_the_workers_of_other_hosts(run: RunScript) -> None:
    launch = run(GROUP, "--rejoin", hosts="a:1,b:1")
    os.kill(int(lines_until(launch, "pid").split()[-1]), signal.SIGKILL)
    line = lines_until(launch, "lost:")
    assert "worker 'worker1' is lost: it was killed by SIGKILL (signal 9) on host b" in line
    code, _, err = launch.finish(LONG)
    assert code == 137, err
    assert "worker1 was killed by SIGKILL (signal 9) on host b; the other workers go on" in err


@pytest.mark.parametrize(("host", "lost", "watcher"), [("b", "worker1", 0), ("a", "worker0", 1)])
def test_a_host_that_vanished_is_taken_in_again(
    run: RunScript, network: Network, host: str, lost: str, watcher: int
) -> None:
    """On host a is the store, in which a worker that comes back looks for the group."""
    options = ["--rejoin", "--max-restarts", "1", "--host-timeout", str(LEASE), "--env", "REJOIN=1"]
    launch = run(GROUP, *options, "--env", f"WATCHER={watcher}", hosts="a:1,b:1")
    worker = int(lines_until(launch, "pid").split()[-1])
    network.pull(host)
    line = lines_until(launch, "lost:")
    assert f"worker {lost!r} is lost: it was lost with host {host}, which has not answered for" in line
    assert_gone([worker])
    network.plug_in()
    lines_until(launch, "again")
    code, _, err = launch.finish(LONG)
    assert code == 0, err
    assert f"host {host} is back" in err


# Unusable hosts: the error names the host, ssh asks no questions, nothing hangs.


def refused(launch: Launch) -> str:
    code, out, err = launch.finish(LONG)
    assert code == 255, err
    assert out == ""
    assert "Traceback" not in err
    return err


def test_wrong_hosts_are_named_together(run: RunScript, network: Network) -> None:
    with (network.directory / "ssh_config").open("a") as file:
        file.write("Host closed\n  HostName 10.79.0.254\nHost nowhere\n  HostName 10.79.0.99\n  ConnectTimeout 2\n")
    err = refused(run(PAUSE, hosts="a:1,closed:1,no-such-name:1,nowhere:1"))
    assert "host closed: no ssh server listens there" in err
    assert "host no-such-name: its name is not known here" in err
    assert "host nowhere:" in err
    assert "host a:" not in err


def test_a_host_key_that_is_not_known(run: RunScript, network: Network) -> None:
    err = refused(run(PAUSE, "--ssh", f"{network.ssh} -o UserKnownHostsFile=/dev/null", hosts="a:1"))
    assert "host a: its key is unknown here or has changed, and ssh may not ask" in err
    assert "Host key verification failed" in err


def test_a_host_that_accepts_no_key(run: RunScript, network: Network) -> None:
    err = refused(run(PAUSE, "--ssh", f"{network.ssh} -o PubkeyAuthentication=no", hosts="b:1"))
    assert "host b: it accepts none of your keys, and ssh may not ask for a password" in err


def test_no_python_no_backhaul_no_directory_no_script(run: RunScript, tmp_path: Path) -> None:
    assert "host a: it has no Python at /no/python: give the path of the host's Python with --python" in refused(
        run(PAUSE, "--python", "/no/python", hosts="a:1")
    )
    assert "has no Backhaul: install this version there" in refused(
        run(PAUSE, "--python", "/usr/bin/python3", "--env", "PYTHONPATH=/nowhere", hosts="a:1")
    )
    assert "host b: it has no directory /no/directory, in which the launcher runs: make it" in refused(
        run(PAUSE, "--workdir", "/no/directory", hosts="b:1")
    )
    (tmp_path / "elsewhere").mkdir()
    assert f"host b: it has no script {tmp_path}/elsewhere/script.py: copy it there" in refused(
        run(PAUSE, "--workdir", str(tmp_path / "elsewhere"), hosts="b:1")
    )


def test_an_address_that_the_others_cannot_reach(run: RunScript) -> None:
    err = refused(run(PAUSE, "--master-addr", "127.0.0.1", hosts="a:1,b:1"))
    assert "host b cannot reach 127.0.0.1 port" in err
    assert "Name the address of a that the others reach with --master-addr" in err
    err = refused(run(PAUSE, "--master-addr", "10.79.0.2", hosts="a:1,b:1"))
    assert "host a cannot listen on 10.79.0.2 port 0" in err
    err = refused(run(PAUSE, "--master-port", "2222", hosts="a:1,b:1"))
    assert "host a cannot listen on 10.79.0.1 port 2222, where the group would meet: Address already in use" in err


# Output.


def test_large_and_undecodable_output(run: RunScript) -> None:
    source = """
        import os
        block = (b"\\xff\\xfe" * 500 + b"\\n") * 500
        for _ in range(8):
            os.write(1, block)
            os.write(2, block)
        """
    code, out, err = run(source, hosts="a:1,b:1").finish(LONG)
    assert code == 0
    expected = {f"[worker{rank}] " + "\udcff\udcfe" * 500 for rank in (0, 1)}
    for text in (out, err):
        lines = text.split("\n")
        assert len(lines) == 8001
        assert set(lines) == {*expected, ""}


def test_a_reader_that_stops_reading_kills_no_worker(run: RunScript) -> None:
    """As after Ctrl-S in a terminal. The workers block in print; the launcher still answers their hosts."""
    source = """
        import sys
        for number in range(2000):
            print(number, "x" * 1000)
        """
    launch = run(source, "--host-timeout", "2", hosts="a:1,b:1")
    assert launch.line()
    time.sleep(8)  # nobody reads for four leases
    assert launch.popen.poll() is None
    assert launch.popen.stdout is not None
    assert len(launch.popen.stdout.readlines()) == 3999
    code, _, err = launch.finish(LONG)
    assert (code, err) == (0, "")


def test_a_reader_that_goes_away_ends_the_job(run: RunScript) -> None:
    source = """
        while True:
            print("x" * 1000)
        """
    launch = run(source, hosts="a:1,b:1")
    assert launch.line()
    assert launch.popen.stdout is not None
    launch.popen.stdout.close()
    assert launch.popen.wait(LONG) == 141
    assert launch.popen.stderr is not None
    assert "Traceback" not in launch.popen.stderr.read()
