"""``python -m backhaul.dropin``: the program finds the same environment as with plain ``python``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from dropin_runs import run, start

pytestmark = pytest.mark.timeout(300)

TELL = """
import atexit, json, sys
import torch.distributed.rpc as rpc

class Here:
    pass

def tell():  # when the script is over
    spec, main = getattr(__spec__, "name", None), sys.modules["__main__"]
    place = {"argv": sys.argv, "path": sys.path[0], "file": __file__, "spec": spec, "package": __package__}
    print(json.dumps({**place, "name": __name__, "is main": main.Here is Here, "rpc": rpc.__name__}))

atexit.register(tell)
sys.exit(3)
"""


def told(cwd: Path, *argv: str) -> dict[str, Any]:
    done = start("-m", "backhaul.dropin", *argv, cwd=cwd)
    assert done.returncode == 3, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    script = tmp_path / "folder" / "script.py"
    script.write_text(TELL)
    assert told(tmp_path, "folder/script.py", "-m", "--help", "x") == {
        "argv": ["folder/script.py", "-m", "--help", "x"],
        "path": str(script.parent),
        "file": str(script),
        "spec": None,
        "package": None,
        "name": "__main__",
        "is main": True,
        "rpc": "backhaul.dropin.rpc",
    }


@pytest.mark.parametrize(("module", "file"), [("package.module", "module"), ("package", "__main__")])
def test_a_module(tmp_path: Path, module: str, file: str) -> None:
    (tmp_path / "package").mkdir()
    path = tmp_path / "package" / f"{file}.py"
    path.write_text(TELL)
    assert told(tmp_path, "-m", module, "--module", "x") == {
        "argv": [str(path), "--module", "x"],
        "path": str(tmp_path),
        "file": str(path),
        "spec": f"package.{file}",
        "package": "package",
        "name": "__main__",
        "is main": True,
        "rpc": "backhaul.dropin.rpc",
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 cannot be told so")
def test_the_directory_of_a_script_stays_out_if_python_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.path)")
    assert str(tmp_path) not in run("-m", "backhaul.dropin", "script.py", cwd=tmp_path, PYTHONSAFEPATH="1")


def test_an_exception_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\nraise ValueError('no luck')\n")
    done = start("-m", "backhaul.dropin", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: no luck\n")
    assert 'script.py", line 2, in <module>' in done.stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: SCRIPT"),
        (["nothing.py"], "no such script: nothing.py"),
        (["-m", "nothing"], "no module named nothing"),
        (["-m", "nothing.at.all"], "no module named nothing.at.all"),
        (["-m", "json"], "no module named json.__main__"),
    ],
)
def test_a_wrong_command_line(tmp_path: Path, argv: list[str], message: str) -> None:
    done = start("-m", "backhaul.dropin", *argv, cwd=tmp_path)
    assert done.returncode == 2
    assert f"python -m backhaul.dropin: error: {message}" in done.stderr


def test_a_module_whose_import_fails(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("import nothing_of_the_kind")
    done = start("-m", "backhaul.dropin", "-m", "broken.part", cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'nothing_of_the_kind'" in done.stderr
