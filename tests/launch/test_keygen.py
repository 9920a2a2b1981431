"""`backhaul keygen`, and `backhaul run` with a key: on real processes that do not import torch."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from backhaul.__main__ import main
from backhaul.security.keys import read_key_file


def backhaul(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "backhaul", *argv],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **env},
        timeout=60,
        check=False,
    )


def test_keygen(tmp_path: Path) -> None:
    done = backhaul("keygen", "cluster.key", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    path = tmp_path / "cluster.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = read_key_file(str(path))
    assert "wrote a new key to cluster.key" in done.stdout
    assert key.hex()[:8] not in done.stdout


def test_keygen_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    before = path.read_text()
    assert main(["keygen", str(path)]) == 1
    assert f"backhaul keygen: {path} exists" in capsys.readouterr().err
    assert path.read_text() == before


SHOW = """
import os
print([os.environ.get(name) for name in ("BACKHAUL_KEY_FILE", "BACKHAUL_HOST")])
"""


def test_run_hands_the_key_file_and_the_host_to_its_workers(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    assert main(["keygen", str(tmp_path / "cluster.key")]) == 0
    done = backhaul("run", "--key-file", "cluster.key", "--host", "127.0.0.2", "show.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"['{tmp_path}/cluster.key', '127.0.0.2']" in done.stdout
    done = backhaul("run", "show.py", cwd=tmp_path, BACKHAUL_KEY_FILE="/from/outside", BACKHAUL_HOST="::1")
    assert "['/from/outside', '::1']" in done.stdout


def test_run_refuses_a_bad_key_before_it_starts_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    path.chmod(0o644)
    for options, text in (
        (["--key-file", str(path)], f"`chmod 600 {path}`"),
        (["--key-file", "/no/such/key"], "there is no key file /no/such/key"),
        (["--host", ""], "must be a name or an address of this machine"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["run", *options, str(tmp_path / "show.py")])
        assert end.value.code == 2
        assert text in capsys.readouterr().err
