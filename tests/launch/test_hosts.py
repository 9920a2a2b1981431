"""`backhaul run --hosts`, the pure parts: hosts and seats, the protocol, leases, the command of ssh."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Launch

from backhaul.errors import OptionError, ProtocolError
from backhaul.launch import protocol
from backhaul.launch.command import add_parser, passed_on
from backhaul.launch.lease import Grants, Lease, clock
from backhaul.launch.placement import Host, parse_hostfile, parse_hosts, seats
from backhaul.launch.ssh import BOOT, explain, first_line, steward_argv

# Hosts and seats.


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", [Host("a", 1)]),
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        (" me@a:2 , b ", [Host("me@a", 2), Host("b", 1)]),
        ("10.0.0.1:4,10.0.0.2", [Host("10.0.0.1", 4), Host("10.0.0.2", 1)]),
        ("[fe80::1]:2,me@[::2]", [Host("fe80::1", 2), Host("me@::2", 1)]),
    ],
)
def test_hosts(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no host; write them as --hosts a:2,b:2"),
        ("a,,b", "'' names no host"),
        ("a:", "the number of workers on a host must be 1 to 4096, not ''"),
        ("a:0", "must be 1 to 4096, not '0'"),
        ("a:two", "must be 1 to 4096, not 'two'"),
        ("a:-1", "not '-1'"),
        (":2", "':2' names no host"),
        ("me@:2", "names no host"),
        ("a b:2", "names no host"),
        ("-oProxyCommand=x", "names no host"),
        ("fe80::1", "put an IPv6 address into brackets, as in [fe80::1]:2; got 'fe80::1'"),
        ("a:1,b,a:2", "host 'a' is named twice; name it once with all its workers, as in a:2"),
    ],
)
def test_hosts_that_are_wrong(text: str, complaint: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_hosts(text)
    assert complaint in str(error.value)


def test_a_hostfile() -> None:
    text = """
        # the first has rank 0
        a:2
        me@b slots=3 address=10.0.0.2   # its fast network
        c python=/opt/py/bin/python workdir="/data/my work" ssh='ssh -p 2222'
        """
    assert parse_hostfile(text, "hosts") == [
        Host("a", 2),
        Host("me@b", 3, address="10.0.0.2"),
        Host("c", 1, python="/opt/py/bin/python", workdir="/data/my work", ssh="ssh -p 2222"),
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "my-hosts names no hosts"),
        ("a\n\nb slots=x", "line 3 of my-hosts: the number of workers on a host must be 1 to 4096, not 'x'"),
        ("a color=red", "line 1 of my-hosts: 'color=red' is not one of slots=…, address=…, python=…, workdir=…, ssh=…"),
        ("a 2", "line 1 of my-hosts: '2' is not one of"),
        ("a python=", "'python=' is not one of"),
        ("a slots=1 slots=2", "line 1 of my-hosts: slots= is given twice"),
        ("a workdir='x", "line 1 of my-hosts: No closing quotation"),
        ("a\na", "my-hosts: host 'a' is named twice"),
    ],
)
def test_a_hostfile_that_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_hostfile(text, "my-hosts")
    assert complaint in str(error.value)


def test_ranks_follow_the_order_of_the_hosts() -> None:
    hosts = [Host("a", 2), Host("b", 1), Host("c", 2)]
    found = seats(hosts, ["v", "w", "x", "y", "z"])
    assert [(seat.rank, seat.name, seat.host, seat.local_rank, seat.local_world_size) for seat in found] == [
        (0, "v", 0, 0, 2),
        (1, "w", 0, 1, 2),
        (2, "x", 1, 0, 1),
        (3, "y", 2, 0, 2),
        (4, "z", 2, 1, 2),
    ]
    assert found[3].environment(5, 3) == {
        "RANK": "3",
        "WORLD_SIZE": "5",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "3",
    }


def test_the_name_of_a_host() -> None:
    assert Host("me@a").name == "a"
    assert not Host("me@localhost").is_local  # another user, over ssh
    assert Host("localhost").is_local


# Leases.


def test_a_lease_is_renewed_from_the_time_of_its_question() -> None:
    lease = Lease(6.0, now=100.0)
    assert lease.ask(100.0) == 1
    assert lease.ask(100.5) is None
    assert lease.next_question == 101.0
    assert lease.ask(101.0) == 2
    lease.granted(1)  # however late the answer comes
    assert lease.ends == 106.0
    lease.granted(2)
    assert lease.ends == 107.0
    lease.granted(1)  # a repeated answer, or one without a question
    lease.granted(77)
    assert lease.ends == 107.0
    assert not lease.is_over(106.9)
    assert lease.is_over(107.0)


def test_the_clock_of_leases_runs_forward() -> None:
    assert 0.0 < clock() <= clock()


def test_a_lease_remembers_only_questions_without_an_answer() -> None:
    lease = Lease(6.0, now=0.0)
    for second in range(100):
        number = lease.ask(float(second))
        assert number is not None
        lease.granted(number)
    assert len(lease._asked) <= 1
    assert lease.ends == 105.0


def test_a_host_that_answers_again_is_reported_again_when_it_falls_silent() -> None:
    grants = Grants(6.0, now=0.0)
    grants.warned = True
    grants.answered(5.0)
    assert not grants.warned


def test_the_steward_s_lease_ends_before_the_launcher_counts_it_as_over() -> None:
    """The network may delay questions and answers as it likes."""
    lease, grants = Lease(6.0, now=99.0), Grants(6.0, now=99.5)
    question = lease.ask(100.0)
    assert question == 1
    grants.answered(103.0)  # the question took three seconds
    lease.granted(question)  # and the answer any time
    assert lease.ends <= grants.over_at - 2.0
    assert grants.silence(105.0) == 2.0
    assert grants.doubtful_at == 106.0
    grants.warned = True
    grants.answered(104.0)
    assert not grants.warned


# The protocol.

MESSAGES: list[protocol.Message] = [
    protocol.Hello(1, "0.9", "10.0.0.1"),
    protocol.Ready(),
    protocol.Refused("no"),
    protocol.Listening(4711),
    protocol.Reached("10.0.0.2", ""),
    protocol.Started(3, 1234, "boot/ns/1234/99"),
    protocol.Output(3, 1, b"\x00\xff\n"),
    protocol.Ended(3, -9, "was killed"),
    protocol.Over(3),
    protocol.Ask(7),
]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_arrive_however_they_are_cut(size: int) -> None:
    reader = protocol.StewardReader()
    data = b"Welcome to b\r\n" + protocol.MARK + b"".join(map(protocol.frame, MESSAGES))
    found = [message for at in range(0, len(data), size) for message in reader.feed(data[at : at + size])]
    assert found == MESSAGES
    assert reader.noise == b"Welcome to b\r\n"
    assert reader.greeted


def test_every_message_to_a_steward_is_encoded_and_decoded() -> None:
    messages: list[protocol.Message] = [
        protocol.Setup("b", {"A": "1"}, "/work", None, 30.0),
        protocol.Listen("10.0.0.1", 0),
        protocol.Reach("10.0.0.1", 4711, 5.0),
        protocol.Start(0, "worker0", ["-u", "x.py"], {"RANK": "0"}),
        protocol.Stop(15, 5.0),
        protocol.Signal(10),
        protocol.Grant(7),
        protocol.Credit(100),
        protocol.News("boot/ns/1/2", "exited with code 3", True),
    ]
    assert protocol.Reader(protocol.ToSteward).feed(b"".join(map(protocol.frame, messages))) == messages


def test_bytes_that_are_not_a_message_are_refused() -> None:
    for wrong in (b"\x00\x00\x00\x01\xc1", protocol.frame(protocol.Ask(1)), b"\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            protocol.Reader(protocol.ToSteward).feed(wrong)


# The command of ssh.


def test_the_command_line_has_nothing_but_where_python_is() -> None:
    argv = steward_argv(Host("me@b"), "ssh -p 2222 -i key -o ServerAliveInterval=60", "/opt/py 3/python", 30.0)
    assert argv[:6] == ["ssh", "-p", "2222", "-i", "key", "-o"]
    options = [argv[at + 1] for at, word in enumerate(argv) if word == "-o"]
    assert options.index("ServerAliveInterval=60") < options.index("ServerAliveInterval=10")  # ssh takes the first one
    assert "BatchMode=yes" in options
    assert argv[-2] == "me@b"
    assert shlex.split(argv[-1]) == ["exec", "/opt/py 3/python", "-u", "-c", BOOT]
    assert not set(BOOT) & set("'$`\\!\n")


def test_another_program_than_openssh_gets_no_options() -> None:
    assert steward_argv(Host("b"), "tsh ssh", "python", 30.0)[:3] == ["tsh", "ssh", "b"]
    assert steward_argv(Host("b", ssh="/usr/bin/ssh -v", python="py"), "tsh ssh", "x", 3.0)[:3] == [
        "/usr/bin/ssh",
        "-v",
        "-T",
    ]
    assert steward_argv(Host("localhost"), "ssh", "python", 30.0) == ["python", "-u", "-c", BOOT]


def test_the_first_line_says_where_to_look_for_backhaul() -> None:
    assert json.loads(first_line({"PYTHONPATH": "/a::/b"})) == {"path": ["/a", "/b"]}
    assert json.loads(first_line({"OTHER": "x"})) == {"path": []}


def test_a_remote_python_without_its_first_line_ends() -> None:
    done = subprocess.run([sys.executable, "-c", BOOT], stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (1, b"", b"")


@pytest.mark.parametrize(
    ("code", "said", "sentence"),
    [
        (255, "Host key verification failed.", "its key is unknown here or has changed"),
        (255, "root@b: Permission denied (publickey).", "it accepts none of your keys"),
        (255, "ssh: Could not resolve hostname b: Name or service not known", "its name is not known here"),
        (255, "ssh: connect to host b port 22: Connection refused", "no ssh server listens there"),
        (255, "ssh: connect to host b port 22: Connection timed out", "it does not answer"),
        (255, "something else", "ssh failed"),
        (127, "sh: 1: exec: /x/python: not found", "it has no Python at /x/python: give the path of"),
        (126, "", "it has no Python at /x/python"),
        (1, "ModuleNotFoundError: No module named 'backhaul'", "its Python /x/python has no Backhaul"),
        (3, "", "the command exited with code 3 before it wrote anything"),
    ],
)
def test_failures_are_explained(code: int, said: str, sentence: str) -> None:
    text = explain(Host("me@b"), "ssh", "/x/python", code, said, "Welcome")
    assert text.startswith(f"host b: {sentence}")
    assert said in text
    assert "Welcome" in text


# The command line.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hosts", "a:2", "-n", "2", "x.py"], "instead of -n: --hosts a:2,b:2"),
        (["--hosts", "a", "--hostfile", "f", "x.py"], "give --hosts or --hostfile, not both"),
        (["--hostfile", "nowhere", "x.py"], "cannot read the hostfile nowhere: No such file or directory"),
        (["--hosts", "a:x", "x.py"], "the number of workers on a host must be 1 to 4096, not 'x'"),
        (["--ssh", "ssh -v", "x.py"], "--ssh is for workers on other hosts: name them with --hosts"),
        (["--master-port", "1", "x.py"], "--master-port is for workers on other hosts"),
        (["--hosts", "a", "--master-port", "70000", "x.py"], "--master-port must be a port, 1 to 65535"),
        (["--hosts", "a", "--host-timeout", "0.5", "x.py"], "--host-timeout must be at least 1 second, not 0.5"),
        (["--hosts", "a", "--connect-timeout", "nan", "x.py"], "--connect-timeout must be more than 0 seconds"),
        (["--hosts", "a", "--ssh", "'", "x.py"], "is not a command"),
        (["--hosts", "a:2", "--names", "x", "x.py"], "--names needs 2 different names"),
        (["--hosts", "a", "--env", "NO_SUCH_VARIABLE", "x.py"], "--env NO_SUCH_VARIABLE: the launcher has no such var"),
        (["--hosts", "a", "--key-file", "nowhere", "x.py"], "there is no key file nowhere"),
    ],
)
def test_command_lines_that_are_wrong(
    options: list[str],
    complaint: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), "0.9")
    given = parser.parse_args(["run", *options])
    with pytest.raises(SystemExit) as ended:
        given.handle(given)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_variables_that_are_passed_on() -> None:
    environ = {"NCCL_DEBUG": "INFO", "NCCL_IB": "1", "HOME": "/me"}
    assert passed_on(["NCCL_*", "X=1=2", "HOME="], environ) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_IB": "1",
        "X": "1=2",
        "HOME": "",
    }
    with pytest.raises(OptionError, match="give a value with --env ME=…"):
        passed_on(["ME"], environ)


def test_a_dry_run_prints_what_would_be_started_and_no_secret(tmp_path: Path) -> None:
    options = ["--hosts", "a:1,me@b:1", "--env", "TOKEN=xyzzy", "--master-port", "4711", "--dry-run", "--workdir", "/w"]
    code, out, err = Launch(*options, "train.py", "--lr", "0 1", cwd=tmp_path).finish()
    assert (code, err) == (0, "")
    lines = [line.strip() for line in out.splitlines()]
    assert [line for line in lines if line.startswith("host ")] == ["host a", "host b"]
    assert lines.count("working directory: /w") == 2
    assert f"worker1: {sys.executable} -u train.py --lr '0 1'" in lines
    for each in ("RANK=1", "LOCAL_RANK=0", "GROUP_RANK=1", "MASTER_ADDR=<the address of a>", "MASTER_PORT=4711"):
        assert each in lines
    assert {"TOKEN=…", "BACKHAUL_SECRET=…"} <= set(lines)
    assert "xyzzy" not in out


def test_a_dry_run_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    code, out, err = Launch("-n", "2", "--dry-run", "--env", "TOKEN=xyzzy", "x.py", cwd=tmp_path).finish()
    assert (code, err) == (0, "")
    assert f"worker1: {sys.executable} -u x.py" in out.splitlines()
    assert "  BACKHAUL_SECRET=…" in out
    assert "xyzzy" not in out
