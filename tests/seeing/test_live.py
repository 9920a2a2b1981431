"""`backhaul top` in a terminal and the dashboard in a browser, for a cluster of processes of which one dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from backhaul import autograd, cluster, rpc
from backhaul.__main__ import main
from backhaul.options import RpcOptions
from backhaul.seeing import why_stuck
from backhaul.seeing.dashboard.server import Dashboard
from backhaul.seeing.guest import find_cluster, transport_for
from backhaul.worker import current
from crew import Crew

PATIENCE = 30.0
LOCK = threading.Lock()


def socket_directory() -> str:
    path = current().agent.membership.find(current().info).addresses.unix
    assert path is not None
    return os.path.dirname(path)


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def take_lock() -> None:
    with LOCK:
        pass


def call_back(to: str) -> None:
    rpc.rpc_sync(to, take_lock)


def hold_and_call(to: str, me: str) -> None:
    with LOCK:
        rpc.rpc_sync(to, call_back, args=(me,))


def work() -> None:
    """Calls and passes with worker1, and a context that stays open; all in the background."""

    def train() -> None:
        while True:
            with autograd.context() as context:
                y = rpc.rpc_sync("worker1", double, args=(torch.ones(3, requires_grad=True),))
                autograd.backward(context, [y.sum()])
            threading.Event().wait(0.02)

    def stay() -> None:
        with autograd.context():
            kept = rpc.rpc_sync("worker1", double, args=(torch.ones(3, requires_grad=True),))
            threading.Event().wait()
            del kept

    for each in (train, stay):
        threading.Thread(target=each, daemon=True).start()


def hang() -> None:
    """worker0 and worker1 wait for each other forever."""
    rpc.rpc_async("worker1", hold_and_call, args=("worker0", "worker1"), timeout=0)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as found:
        found[0].run(work)
        yield found


@pytest.fixture(scope="module")
def where(crew: Crew) -> str:
    found: str = crew[0].run(socket_directory)
    return found


def test_top_without_a_terminal(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", where, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "3 workers" in shown
    assert [line.split()[:2] for line in shown.splitlines() if "worker" in line][-1] == ["3", "worker2"]
    assert main(["top", where, "--once", "--json", "--interval", "0.2"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["state"]) for row in rows] == [(f"worker{rank}", "live") for rank in range(3)]
    assert rows[0]["calls_sent"] > 0
    assert rows[1]["calls_served"] > 0
    assert rows[1]["bytes_received"] > 0
    assert rows[0]["contexts"] >= 1
    assert rows[2]["calls_sent"] == 0
    assert all(row["memory"] > 1 << 20 for row in rows)


def until(text: str, look: Callable[[], str]) -> str:
    deadline = time.monotonic() + PATIENCE
    while text not in (seen := look()):
        assert time.monotonic() < deadline, f"{text!r} is not in:\n{seen}"
        time.sleep(0.05)  # there is no event for the output of another program
    return seen


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_top_in_a_terminal(where: str, tmp_path: Path) -> None:
    def tmux(*arguments: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout

    def screen() -> str:
        return tmux("capture-pane", "-p")

    top = f"{sys.executable} -m backhaul top {where} --interval 0.2"
    script = f"unset COLUMNS LINES; stty -a > before; {top}; echo code $?; stty -a > after"
    tmux("new-session", "-d", "-x", "150", "-y", "40", "-c", str(tmp_path), f"sh -c '{script}; echo over; cat'")
    try:
        seen = until("worker2", screen)
        assert "3 workers" in seen
        assert "calls/s" in seen
        tmux("send-keys", "1", "Enter")
        seen = until("train", screen)  # the function that its thread is in
        assert "test_live.py" in seen
        tmux("send-keys", "s")
        until("wait", screen)
        tmux("send-keys", "Escape")
        until("c calls", screen)
        tmux("send-keys", "q")
        seen = until("over", screen)
        assert "code 0" in seen
        assert "3 workers" not in seen  # the old content of the terminal is back
        assert (tmp_path / "after").read_text() == (tmp_path / "before").read_text()
    finally:
        tmux("kill-server")


CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not installed")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def test_the_dashboard_in_a_browser(crew: Crew, where: str, browser: Any) -> None:
    def text(id: str) -> str:
        found: str = browser.find_element("id", id).text
        return found

    def open_tab(name: str) -> None:
        browser.find_element("id", f"tab-{name}").click()

    def script(code: str) -> Any:
        return browser.execute_script(code)

    def until_true(code: str) -> None:
        until("yes", lambda: "yes" if script(f"return Boolean({code})") else "no")

    with Dashboard(find_cluster(where), transport_for(), interval=0.2) as dashboard:
        browser.get(dashboard.address)
        until("worker2", lambda: text("rows"))
        until_true("[...document.querySelectorAll('#matrix td')].some((cell) => Number(cell.dataset.bytes) > 0)")
        assert script("return document.querySelectorAll('#rows tr.live').length") == 3

        open_tab("latency")
        until_true("document.querySelector('#curves [data-function=double] path.p99')")

        open_tab("passes")
        until("started by worker0", lambda: text("pass-title"))
        until_true("document.querySelectorAll('#timeline rect.run').length > 1")
        assert {"worker0", "worker1"} <= set(text("timeline").split())

        open_tab("contexts")
        until("draw", lambda: text("context-list"))
        browser.find_element("id", "draw-latest").click()
        until_true("document.querySelector('#picture')?.naturalWidth > 100")

        open_tab("stacks")
        until("train", lambda: text("threads"))

        crew[0].run(hang)
        open_tab("stuck")
        until("a cycle, none of them can continue", lambda: text("stuck-text"))
        until_true("document.querySelectorAll('#stuck-graph path.edge.bad').length >= 3")

        open_tab("workers")
        crew[2].signal(signal.SIGSTOP)  # a worker that hangs does not delay the others
        until_true("document.querySelector('tr.silent[data-worker=worker2]')")
        assert script("return document.querySelectorAll('#rows tr.live').length") == 2
        crew[2].kill()
        until_true("document.querySelector('tr.lost[data-worker=worker2]')")
        assert "lost since" in text("rows")
        red, _, _ = script(
            "return getComputedStyle(document.querySelector('tr.lost')).color.match(/\\d+/g).map(Number)"
        )
        assert red > 150
        now = text("pulse")  # the rest continues
        until_true(f"document.getElementById('pulse').textContent !== {now!r}")
        assert script("return document.querySelectorAll('#rows tr.live').length") == 2

        open_tab("stuck")
        until("worker2: its process has ended", lambda: " ".join(text("stuck-text").split()))
        assert "a cycle, none of them can continue" in text("stuck-text")
        assert browser.get_log("browser") == []


def test_stuck_on_the_command_line(crew: Crew, where: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs after the others: by now, two workers wait for each other, and one is dead."""
    if crew[2].process.is_alive():
        crew[0].run(hang)
        crew[2].kill()
    assert main(["stuck", where]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "a cycle, none of them can continue" in said
    assert "worker2: its process has ended" in said


def test_a_message_that_a_stopped_worker_does_not_take_is_named() -> None:
    with cluster(1, options=RpcOptions(segment_pool_bytes=0)):
        pid = rpc.rpc_sync("worker1", os.getpid)

        def send() -> None:
            rpc.rpc_sync("worker1", torch.sum, args=(torch.ones(8 << 20),), timeout=60)

        thread = threading.Thread(target=send, name="a thread (send)")
        os.kill(pid, signal.SIGSTOP)
        try:
            thread.start()
            deadline = time.monotonic() + PATIENCE
            said = ""
            while "takes" not in said and time.monotonic() < deadline:
                said = "\n".join(chain.sentence for chain in why_stuck(1.5).chains)
        finally:
            os.kill(pid, signal.SIGCONT)
            thread.join()
    assert "(send) waits until worker1 takes 33,5" in said
    assert "worker1: it does not answer" in said


def test_a_closed_pipe_at_the_output_is_not_an_error() -> None:
    code = "from backhaul.seeing.top import print_json; print_json(['x' * 1_000_000]); print('more')"
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, timeout=PATIENCE * 2)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")
