"""Logs: every frame of a link at both ends, under the same name; and `backhaul run --log-level`."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.agent import logs
from backhaul.agent.logs import LoggedChannel, link_logger, set_up_logging
from backhaul.errors import OptionError
from backhaul.options import LOG_LEVEL_VARIABLE
from backhaul.testing import InProcessCluster

PROGRAM = Path(__file__).parent / "logged_program.py"


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fail() -> None:
    raise ValueError("on purpose")


def lines(caplog: pytest.LogCaptureFixture, sign: str) -> list[str]:
    """The log messages of both workers about the links between them, in this process."""
    found = [each.getMessage() for each in caplog.records if each.name.startswith("backhaul.link.")]
    return [line.removeprefix(f"{sign} ") for line in found if line.startswith(sign)]


def run_everything(sockets: bool) -> None:
    with InProcessCluster(2, sockets=sockets) as pair, pair[0].as_current():
        x = torch.ones(2, requires_grad=True)
        rpc.rpc_sync("worker1", double, (x,))
        rpc.rpc_sync("worker1", double, (torch.ones(1 << 20),))
        torch.futures.wait_all([rpc.rpc_async("worker1", double, (torch.ones(1),)) for _ in range(50)])
        with pytest.raises(ValueError, match="on purpose"):
            rpc.rpc_sync("worker1", fail)
        rpc.remote("worker1", double, (x,)).to_here()
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [rpc.rpc_sync("worker1", double, (x,)).sum()])


@pytest.mark.parametrize("sockets", [False, True])
def test_both_ends_log_the_same(sockets: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "backhaul.link")
    run_everything(sockets)
    sent, received = lines(caplog, ">"), lines(caplog, "<")
    # Messages in flight when the cluster closes may not arrive.
    assert set(received) <= set(sent)
    assert {line.split()[0] for line in received} >= {"Call", "Result", "Failure", "Create", "Fetch", "Gradients"}
    calls = [line for line in received if line.startswith("Call ")]
    assert len(calls) == 54
    assert calls[0].split()[:3] == ["Call", "worker0/1", f"{__name__}.double"]
    results = [line for line in received if re.match(r"(Result|Failure) worker0/", line)]
    numbers = [line.split()[1] for line in results]
    assert {line.split()[1] for line in calls} <= set(numbers)
    (failure,) = (line for line in received if line.startswith("Failure"))
    assert "builtins.ValueError" in failure
    large = next(line for line in calls if int(line.split()[-2]) > 4 << 20)
    assert large.endswith(" B")
    gradients = [line for line in received if line.startswith("Gradients")]
    assert len({line.split()[2] for line in gradients}) == 1  # the pass


@pytest.mark.parametrize("sockets", [False, True])
def test_the_states_of_a_link(sockets: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "backhaul.link")
    with InProcessCluster(2, sockets=sockets) as pair:
        pair[0].rpc_sync("worker1", int)
        assert pair[0].inspection.snapshot()["peers"][0]["sent"] > 0  # the bytes are still counted
        pair[0].agent.cut_off(1)
    states = [(each.name, each.getMessage()) for each in caplog.records if each.getMessage().startswith("=")]
    path = "unix" if sockets else "memory"
    assert ("backhaul.link.worker1", f"= open over {path}, by worker0") in states
    assert ("backhaul.link.worker0", f"= open over {path}, by worker0") in states
    assert ("backhaul.link.worker1", "= worker 'worker1' is lost: it does not answer") in states
    assert ("backhaul.link.worker1", "= closed") in states
    assert ("backhaul.link.worker0", "= closed") in states


def test_a_line_that_is_not_logged_has_no_logging_channel(
    pair: InProcessCluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "backhaul")
    pair[0].rpc_sync("worker1", int)
    for worker in pair:
        for line in [*worker.agent.calling(), *worker.agent.serving.lines]:
            assert not isinstance(line.channel, LoggedChannel)
    assert not any(worker.agent.observers for worker in pair)


def test_one_link_can_be_logged_alone(trio: InProcessCluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "backhaul.link.worker2")
    trio[0].rpc_sync("worker1", int)
    trio[0].rpc_sync("worker2", int)
    assert {each.name for each in caplog.records} == {"backhaul.link.worker2"}


def test_the_name_of_a_logger() -> None:
    assert link_logger("host.example.org").name == "backhaul.link.host_example_org"
    assert "\n" not in link_logger("a\nb").name


# `backhaul run`.


def run(*arguments: str, options: tuple[str, ...]) -> tuple[str, str]:
    command = [sys.executable, "-m", "backhaul", "run", "-n", "2", *options, str(PROGRAM), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_run_logs_and_serves_metrics() -> None:
    from test_metrics import free_ports

    out, err = run(options=("--log-level", "debug", "--metrics-port", str(free_ports(2))))
    stamped = r"\d\d:\d\d:\d\d\.\d{3}"
    for worker, peer, sign in (("worker0", "worker1", ">"), ("worker1", "worker0", "<")):
        line = rf"\[{worker}\] {stamped} {worker} DEBUG backhaul\.link\.{peer} {sign} Call worker0/\d+ builtins\.abs"
        assert re.search(line, err), err
    assert re.search(rf"\[worker1\] {stamped} worker1 INFO backhaul\.metrics metrics of worker1: http://127", err), err
    assert 'function="abs"' in out


@pytest.mark.slow
def test_a_program_with_logging_of_its_own_keeps_it() -> None:
    from test_metrics import free_ports

    _, err = run("configured", options=("--log-level", "debug", "--metrics-port", str(free_ports(2))))
    assert re.search(r"\[worker0\] mine: > Call worker0/\d+ builtins\.abs", err), err
    assert not re.search(r"DEBUG backhaul", err)


@pytest.mark.parametrize("arguments", [("--log-level", "loud"), ("--metrics-port", "65535"), ("--metrics-port", "-1")])
def test_bad_options_are_refused_at_once(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "backhaul", "run", "-n", "2", *arguments, str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert arguments[0] in done.stderr or "metrics_port" in done.stderr


@pytest.fixture
def quiet() -> Iterator[logging.Logger]:
    """The logger of Backhaul without handlers; restored afterwards."""
    log = logging.getLogger("backhaul")
    handlers, level = log.handlers, log.level
    log.handlers = []
    yield log
    log.handlers = handlers
    log.setLevel(level)


def test_setting_up_twice_adds_one_handler(quiet: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_logging("worker0")
    assert quiet.handlers == []
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "DEBUG")
    for name in ("worker0", "100%"):
        set_up_logging(name)
    (handler,) = quiet.handlers
    assert isinstance(handler, logs._Fallback)
    record = logging.LogRecord("backhaul.link.a", logging.DEBUG, "", 0, "> %s", ("Ping",), None)
    assert re.fullmatch(r"[\d:.]{12} 100% DEBUG backhaul\.link\.a > Ping", handler.format(record))


def test_an_invalid_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL_VARIABLE, "loud")
    with pytest.raises(OptionError, match="BACKHAUL_LOG_LEVEL: 'loud' must be one of debug, info"):
        set_up_logging("worker0")
