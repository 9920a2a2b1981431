"""Private directories in the temporary directory: those of dead processes are removed, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from backhaul.directories import PREFIX, PrivateDirectory, remove_dead
from backhaul.options import RpcOptions
from backhaul.transport.stream import StreamTransport

MAKER = """\
import os, sys
from backhaul.directories import PrivateDirectory
made = PrivateDirectory()
print(made.path, flush=True)
if sys.argv[1] == "forks":
    if os.fork():
        os._exit(0)
sys.stdin.read()
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory that no other process knows, with a short name."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.delenv("BACKHAUL_RUNTIME_DIR", raising=False)
        yield Path(directory)


def make_elsewhere(how: str = "") -> tuple[subprocess.Popen[str], Path]:
    """A process that has made a directory, and lives until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.communicate()


def test_the_next_worker_removes_the_directory_of_a_killed_one(parent: Path) -> None:
    process, path = make_elsewhere()
    (path / "socket").touch()
    worker = StreamTransport(RpcOptions())
    worker.listen()
    assert path.exists()
    worker.close()
    end(process)
    assert path.exists()
    worker = StreamTransport(RpcOptions())
    worker.listen()
    try:
        assert not path.exists()
        assert [each.name for each in parent.iterdir()] == [Path(worker.addresses.unix or "").parent.name]
    finally:
        worker.close()
    assert list(parent.iterdir()) == []


def test_a_directory_stays_while_a_forked_child_uses_it(parent: Path) -> None:
    process, path = make_elsewhere("forks")
    process.wait()
    remove_dead(str(parent))
    assert path.exists()
    process.communicate("")  # its child ends with its standard input


def test_files_and_directories_of_others_stay(parent: Path) -> None:
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (elsewhere / "lock").touch()
    kept = [parent / f"{PREFIX}{name}" for name in ("open", "new", "file", "link")]
    kept[0].mkdir(mode=0o755)
    (kept[0] / "lock").touch()
    kept[1].mkdir(mode=0o700)
    kept[2].touch(mode=0o600)
    kept[3].symlink_to(elsewhere)
    dead = parent / f"{PREFIX}dead"
    dead.mkdir(mode=0o700)
    (dead / "lock").touch()
    remove_dead(str(parent))
    assert not dead.exists()
    assert all(os.path.lexists(each) for each in [*kept, elsewhere, elsewhere / "lock"])
    remove_dead(str(parent / "nowhere"))


def test_a_directory_is_private_and_is_removed_with_its_content(parent: Path) -> None:
    made = PrivateDirectory()
    assert os.stat(made.path).st_mode & 0o777 == 0o700
    Path(made.path, "file").touch()
    made.remove()
    made.remove()
    assert list(parent.iterdir()) == []
