"""The code in the documentation runs, and its links lead somewhere.

The Python of a page runs in the order of the page, as one program: the page with
everything else blanked out, so that line numbers in a traceback are those of the page. The first
line of a block says how it runs:

- ``python``           with the rest of its page
- ``python script``    alone, as a separate program
- ``python file=x.py`` not here: it must equal the content of that file
- ``python notest``    not at all

A page that starts processes runs in its own interpreter; the others run in this one.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import backhaul.autograd as dist_autograd
from backhaul import errors
from backhaul.options import Quotas, RpcOptions
from backhaul.security.keys import read_key_file
from backhaul.security.tls import TLS
from backhaul.wire.messages import KINDS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
EXAMPLE = "examples/two_workers.py"
PATIENCE = 90.0

_FENCE = re.compile(r"^```(.*)$")
_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
_NOT_FOR_ANCHORS = re.compile(r"[^\w\- ]")


class Block(NamedTuple):
    kind: str  # what follows "python" on the fence
    line: int  # number of its first line in the page, from 0
    source: str


def blocks(page: Path) -> Iterator[Block]:
    """The Python blocks of a page."""
    opened: tuple[str, int] | None = None
    lines = page.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if opened is None:
            opened = fence[1].strip(), number + 1
            continue
        language, _, kind = opened[0].partition(" ")
        if language == "python":
            yield Block(kind, opened[1], "".join(lines[opened[1] : number]))
        opened = None
    assert opened is None, f"{page.name}: the block at line {opened[1]} has no end"


def program(page: Path) -> str:
    """The page's Python in its place, with empty lines elsewhere."""
    lines = [""] * (page.read_text().count("\n") + 1)
    for block in blocks(page):
        if not block.kind:
            body = block.source.splitlines()
            lines[block.line : block.line + len(body)] = body
    return "\n".join(lines) + "\n"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def by_name(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=name)


def starts_processes(page: Path) -> bool:
    return "backhaul.cluster(" in program(page)


RUN_ELSEWHERE = [ROOT / "docs/clusters-ray.md"]  # run by tests/ray, which has Ray
RUN_BY_US = [page for page in PAGES if page not in RUN_ELSEWHERE]
RUN_HERE = [page for page in RUN_BY_US if program(page).strip() and not starts_processes(page)]
RUN_APART = [page for page in RUN_BY_US if starts_processes(page)]
SCRIPTS = [(page, block) for page in RUN_BY_US for block in blocks(page) if block.kind == "script"]


def run(*argv: str) -> str:
    """The output of a Python program in which warnings are errors."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@by_name(RUN_HERE)
def test_a_page(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A module, because remote calls find functions by module and name.
    module = types.ModuleType(f"page_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(program(page), page, "exec", dont_inherit=True), module.__dict__)


@by_name(RUN_APART)
def test_a_page_that_starts_processes(page: Path, tmp_path: Path) -> None:
    script = tmp_path / f"{page.stem}.py"
    script.write_text(program(page))
    run(str(script))


@pytest.mark.parametrize(("page", "block"), SCRIPTS, ids=lambda value: getattr(value, "name", ""))
def test_a_script_on_a_page(page: Path, block: Block, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(block.source)
    run(str(script))


def test_the_example_of_two_workers() -> None:
    output = run("-m", "backhaul", "run", "-n", "2", EXAMPLE)
    assert output in (ROOT / "README.md").read_text().replace("    [worker0]", "[worker0]")


@by_name(PAGES)
def test_blocks_are_python(page: Path) -> None:
    """Blocks that do not run are checked too, and a shown file equals the file."""
    for block in blocks(page):
        key, _, value = block.kind.partition("=")
        assert key in ("", "script", "file", "notest"), f"{page.name}, line {block.line}: {block.kind}"
        ast.parse(block.source)
        if key == "file":
            assert block.source == (ROOT / value).read_text(), f"{page.name} does not show {value} as it is"


@by_name(PAGES)
def test_links(page: Path) -> None:
    for target in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue  # another site: not ours to keep
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}"


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {_NOT_FOR_ANCHORS.sub("", heading.lower()).replace(" ", "-") for heading in headings}


GUIDE = (ROOT / "docs" / "rpc.md").read_text()


def test_the_guide_has_every_option_with_its_default() -> None:
    table = GUIDE.partition("## Options")[2]
    for option in dataclasses.fields(RpcOptions):
        row = re.search(rf"^\| `{option.name}` \| `?([^|`]+?)`? \|", table, flags=re.MULTILINE)
        assert row, f"the table of options lacks {option.name}"
        number, _, unit = row[1].partition(" ")
        shift = {"MiB": 20, "GiB": 30}.get(unit)
        default = ast.literal_eval(row[1]) if shift is None else ast.literal_eval(number) << shift
        assert default == option.default, option.name


def test_the_architecture_has_every_kind_of_message() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    shown: dict[int, str] = {}
    for numbers, names in re.findall(r"^\| ([\d, ]+) \| ((?:`[A-Z]\w+`(?:, )?)+) \|", text, flags=re.MULTILINE):
        shown.update(zip(map(int, numbers.split(", ")), re.findall(r"\w+", names), strict=True))
    assert shown == {kind: message.__name__ for kind, message in KINDS.items()}


def test_the_guide_has_every_error_and_its_message() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    tree, _, table = GUIDE.partition("## Errors")[2].partition("| message | error |")
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(classes) > 10
    for error in classes:
        builtin = [base.__name__ for base in error.__bases__ if base.__module__ == "builtins"]
        shown = f"{error.__name__}({builtin[0]})" if builtin else error.__name__
        assert re.search(rf"(^|\W){re.escape(shown)}(\s|$)", tree), f"the tree of errors lacks {shown}"
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", table, flags=re.MULTILINE)
    assert len(rows) > 20
    for message, kind in rows:
        assert hasattr(errors, kind) or hasattr(builtins, kind), kind
        for piece in message.split(" … "):
            assert piece in sources, f"no message says {piece!r}"


AUTOGRAD = (ROOT / "docs" / "autograd.md").read_text()


def raised_by_autograd() -> Iterator[tuple[str, str]]:
    """The user-facing errors of autograd/, with their texts without the filled-in parts."""
    package = ROOT / "src" / "backhaul"
    for path in [*(package / "autograd").glob("*.py"), package / "trust" / "checking.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            kind, message = node.func.id, node.args[0]
            if kind.endswith("Error") and kind not in ("ProtocolError", "TimeoutError", "WorkerLostError"):
                texts = [part.value for part in ast.walk(message) if isinstance(part, ast.Constant)]
                # Else the text is defined elsewhere.
                if text := "".join(text for text in texts if isinstance(text, str)):
                    yield kind, text


def test_the_page_on_autograd_has_every_error_and_its_message() -> None:
    raised = list(raised_by_autograd())
    rows = re.findall(r"^\| `([^`]+)` \| `(\w+)` \|", AUTOGRAD, flags=re.MULTILINE)
    for message, kind in rows:
        pieces = message.split(" … ")
        assert any(kind == error and all(piece in text for piece in pieces) for error, text in raised), message
    for error, text in raised:
        shown = any(kind == error and message.split(" … ")[0] in text for message, kind in rows)
        assert shown, f"the table of messages lacks {error}: {text}"


def test_the_page_on_autograd_has_every_argument_of_backward() -> None:
    section = AUTOGRAD.partition("\n## backward\n")[2].partition("\n## ")[0]
    arguments = re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    assert arguments == list(inspect.signature(dist_autograd.backward).parameters)
    call = re.match(r"\s*`dist_autograd\.(backward\(.*?\))`", section, flags=re.DOTALL)
    assert call is not None
    shown = ast.parse(f"def {' '.join(call[1].split())}: ...").body[0]
    assert isinstance(shown, ast.FunctionDef)
    defaults = [default for default in [*shown.args.defaults, *shown.args.kw_defaults] if default is not None]
    assert [ast.literal_eval(default) for default in defaults] == [
        parameter.default
        for parameter in inspect.signature(dist_autograd.backward).parameters.values()
        if parameter.default is not parameter.empty
    ]


def test_the_page_on_training_names_existing_tests() -> None:
    section = (ROOT / "docs" / "training.md").read_text().partition("\n### What works inside a worker\n")[2]
    file = ""
    rows = re.findall(r"^\| .+ \|$", section.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert len(rows) > 8
    for row in rows:
        named = re.findall(r"`(?:tests/autograd/)?(test_\w+\.py)?(?:::(test_\w+))?`", row.rpartition(" | ")[2])
        assert named, row
        for path, test in named:
            file = path or file
            source = (ROOT / "tests" / "autograd" / file).read_text()
            assert not test or f"def {test}(" in source, row


SECURITY = (ROOT / "docs" / "security.md").read_text()


def commands(*programs: str) -> str:
    """The commands of the security page that begin with one of these, as a script."""
    text = re.sub(r"\\\n\s*", "", SECURITY)
    return "\n".join(
        line.strip() for line in text.splitlines() if line.startswith(tuple(f"    {p} " for p in programs))
    )


def test_the_commands_of_the_page_on_security(tmp_path: Path) -> None:
    """The commands make certificates that a worker accepts, and a key."""
    script = commands("openssl", "printf", "backhaul keygen", "backhaul doctor --trust")
    assert script.count("openssl") == 3
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is wrong" in done.stdout
    assert TLS(*(str(tmp_path / file) for file in ("ca.pem", "bank.pem", "bank.key"))).names() == {"bank"}
    assert read_key_file(str(tmp_path / "cluster.key"))


def test_the_log_lines_and_reasons_on_the_page_on_security_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "src" / "backhaul").rglob("*.py"))
    section = SECURITY.partition("## What the log says")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `(backhaul[.\w]+)` \| `([^`]+)` \|", section, flags=re.MULTILINE)
    assert len(lines) > 4
    for logger, line in lines:
        path = ROOT / "src" / Path(*logger.split(".")).with_suffix(".py")
        source = path.read_text() if path.exists() else sources
        assert path.exists() or f'getLogger("{logger}")' in sources
        assert line in source, line
    reasons = re.findall(r"^\| `([^`]+)` \| [^`]", section, flags=re.MULTILINE)
    assert len(reasons) > 10
    for reason in reasons:
        for piece in reason.split(" … "):
            assert piece in sources, f"no reason says {piece!r}"


def test_the_page_on_security_has_the_quotas_and_the_options_of_doctor() -> None:
    for quota in dataclasses.fields(Quotas):
        row = re.search(rf"^\| `{quota.name}` \| (\d+)( MiB)? \|", SECURITY, flags=re.MULTILINE)
        assert row, quota.name
        assert int(row[1]) << (20 if row[2] else 0) == quota.default
    section = SECURITY.partition("\n## backhaul doctor\n")[2]
    shown = set(re.findall(r"--[a-z-]+", section.partition("\n\n")[0]))
    known = set(re.findall(r"--[a-z-]+", run("-m", "backhaul", "doctor", "--help")))
    assert shown == known - {"--help"}
