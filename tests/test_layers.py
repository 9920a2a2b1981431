"""The shape of the package: which module may import which, and what is public."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import backhaul
from backhaul import rpc

ROOT = Path(backhaul.__file__).parent

# From the bottom up: each layer imports only from itself and from the layers before it.
LAYERS = [
    "compat",
    "errors",
    "ids",
    "environments",
    "current_worker",
    "eager",
    "directories",
    "news",
    "wire",
    "security",
    "trust",
    "devices",
    "edges",
    "options",
    "transport",
    "agent",
    "functions",
    "remote_profile",
    "refs",
    "drawing",
    "autograd",
    "inspection",
    "rendezvous",
    "launch",
    "worker",
    "rpc",
    "seeing",
    "profiler",
    # Written with the public functions.
    "spread",
    "nn",
    "optim",
    "checkpoint",
    "federation",
    "cluster",
    "ray",
    "testing",
    "dropin",
    "doctor",
    "bench",
    # The package itself and its command export what the others define.
    "__init__",
    "__main__",
]


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def layer(module: str) -> str:
    return module.split(".")[0]


def above(module: str, others: Iterable[str]) -> set[str]:
    """The modules among ``others`` that are in a higher layer than this one."""
    mine = LAYERS.index(layer(module))
    return {other for other in others if LAYERS.index(layer(other)) > mine}


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those that only a type checker sees. The bodies of functions count: cycles hide there."""
    rest = [tree]
    while rest:
        for node in ast.iter_child_nodes(rest.pop()):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from node.orelse
                rest += node.orelse
            else:
                yield node
                rest.append(node)


def imported(node: ast.AST) -> list[str]:
    """The absolute names in an import statement, members of packages included."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def own(name: str) -> str | None:
    """The module of this package that a dotted name names or is in."""
    if name == "backhaul":
        return "__init__"
    if not name.startswith("backhaul."):
        return None
    rest = name.removeprefix("backhaul.")
    while rest and rest not in FILES:
        rest = rest.rpartition(".")[0]
    return rest or "__init__"


def imports_of(module: str) -> set[str]:
    """The modules of this package that a module imports when it runs."""
    found = {own(name) for node in runtime_nodes(tree_of(module)) for name in imported(node)}
    return {name for name in found if name is not None} - {module}


class _Imports(dict[str, set[str]]):
    """Of each module, found when they are asked for: each process of `make test` imports this file, and one runs it."""

    def __missing__(self, module: str) -> set[str]:
        found = self[module] = imports_of(module)
        return found


IMPORTS = _Imports()


def test_test_files_have_unique_names() -> None:
    """One run may import all of them, and their folders are not packages, so names must be unique."""
    tests = Path(__file__).parent
    apart = (tests / "ray", tests / "clusters")
    names = Counter(path.name for path in tests.rglob("*.py") if not any(each in path.parents for each in apart))
    del names["conftest.py"]
    assert not [name for name, count in names.items() if count > 1]


def test_every_file_has_a_layer() -> None:
    assert {layer(module) for module in FILES} <= set(LAYERS)


def test_the_imports_are_found() -> None:
    """Without them, no test below could fail."""
    assert {"errors", "wire.messages", "wire.frames", "wire.landing"} <= IMPORTS["wire.decoder"]
    assert "wire.pickles" in IMPORTS["wire.values"]  # inside a function
    assert "agent.watch" not in IMPORTS["agent.serving"]  # for the type checker only
    assert "functions" in IMPORTS["rpc"]  # a module, imported from its package
    assert "cluster" in IMPORTS["__init__"]


def test_a_module_imports_only_from_its_own_and_lower_layers() -> None:
    wrong = {module: above(module, IMPORTS[module]) for module in FILES}
    assert {module: others for module, others in wrong.items() if others} == {}


# What a module knows of the layers above it, by type only, so that its callers get a typed answer.
SEAMS = {
    "current_worker": {"worker"},
    "remote_profile.caller": {"refs.rref"},
    "trust.guard": {"agent.execution", "agent.line", "options"},
    "trust.policy": {"options"},
    "trust.rights": {"refs.counting"},
}


def test_typing_imports_from_higher_layers_are_listed() -> None:
    found = {}
    for module in FILES:
        named = {own(name) for node in ast.walk(tree_of(module)) for name in imported(node)}
        found[module] = above(module, (name for name in named if name is not None))
    assert {module: others for module, others in found.items() if others} == SEAMS


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """A path that leads back to its start, if any."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        for other in sorted(graph[module]):
            found = visit(other, [*path, module])
            if found:
                return found
        done.add(module)
        return None

    return next(filter(None, (visit(module, []) for module in graph)), None)


def test_cycles_are_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_imports_have_no_cycle() -> None:
    assert cycle({module: IMPORTS[module] for module in FILES}) is None


def test_the_bottom_layers_know_nothing_of_sockets_or_threads() -> None:
    """These layers are sans-IO: bytes in, messages out."""
    forbidden = {"socket", "select", "threading", "asyncio", "subprocess"}
    for module in FILES:
        if layer(module) == "wire" or module in ("errors", "ids", "options", "security.handshake"):
            names = {name.split(".")[0] for node in runtime_nodes(tree_of(module)) for name in imported(node)}
            assert not names & forbidden, module


def test_nothing_uses_torch_s_own_rpc() -> None:
    """No module imports it, or reaches it through `torch.distributed`. Only the benchmark compares with it."""
    theirs = ("torch.distributed.rpc.", "torch.distributed.autograd.", "dist.rpc.", "dist.autograd.")
    found = {}
    for module in FILES.keys() - {"bench.ports"}:
        nodes = list(ast.walk(tree_of(module)))
        names = {name for node in nodes for name in imported(node)}
        names |= {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
        found[module] = [name for name in names if f"{name}.".startswith(theirs)]
    assert {module: names for module, names in found.items() if names} == {}


def test_each_module_says_what_it_is_for() -> None:
    assert [module for module in FILES if not ast.get_docstring(tree_of(module))] == []


def test_launching_needs_no_torch() -> None:
    """A launcher that imports torch would take seconds to say that a file does not exist."""
    reached: set[str] = set()
    todo = [module for module in FILES if layer(module) in ("launch", "__main__", "__init__")]
    while todo:
        module = todo.pop()
        if module not in reached:
            reached.add(module)
            tree = ast.parse(FILES[module].read_text())
            at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            names = [name for node in at_once for name in imported(node)]
            assert not [name for name in names if name.split(".")[0] == "torch"], module
            todo += [other for other in map(own, names) if other is not None]


# The public surface.

RPC = [
    "AuthenticationError",
    "BackendType",
    "BackhaulError",
    "ForkedError",
    "Future",
    "LeakError",
    "MisuseError",
    "NotInitializedError",
    "OptionError",
    "PartialError",
    "ProtocolError",
    "QuotaError",
    "Quotas",
    "RRef",
    "RefusedError",
    "RemoteError",
    "Retry",
    "RpcOptions",
    "RpcTimeoutError",
    "TLS",
    "UnknownWorkerError",
    "UnsendableError",
    "WorkerInfo",
    "WorkerLostError",
    "WorkerSuspectedError",
    "WorkerUnresponsiveError",
    "expose",
    "functions",
    "get_worker_info",
    "get_worker_infos",
    "init_rpc",
    "is_available",
    "on_joined",
    "on_lost",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]


def test_backhaul_rpc_exports_these_names() -> None:
    assert rpc.__all__ == RPC == sorted(RPC)


def test_the_package_exports_these_names() -> None:
    assert sorted(backhaul.__all__) == [
        "RpcOptions",
        "TLS",
        "Worker",
        "autograd",
        "checkpoint",
        "cluster",
        "errors",
        "federation",
        "functions",
        "nn",
        "optim",
        "options",
        "profiler",
        "rpc",
        "seeing",
        "worker",
    ]


def test_the_testing_package_exports_these_names() -> None:
    from backhaul import testing

    assert sorted(testing.__all__) == ["Faults", "FaultyTransport", "InProcessCluster", "Scheduler"]


EXTRAS = ("ray",)
"""Optional packages that parts of this one need."""


def public_modules() -> Iterator[types.ModuleType]:
    yield backhaul
    for info in pkgutil.walk_packages(backhaul.__path__, "backhaul."):
        if not info.name.endswith("__main__"):
            try:
                module = importlib.import_module(info.name)
            except ImportError as error:
                if error.name not in EXTRAS:
                    raise
                continue
            if hasattr(module, "__all__"):
                yield module


def test_every_exported_name_exists() -> None:
    checked = 0
    for module in public_modules():
        for name in module.__all__:
            assert getattr(module, name) is not None, f"{module.__name__}.{name}"
            checked += 1
    assert checked > len(RPC)


def test_no_name_is_exported_twice() -> None:
    for module in public_modules():
        assert len(set(module.__all__)) == len(module.__all__), module.__name__


def test_rpc_defines_no_other_public_functions() -> None:
    defined = {
        name
        for name, value in vars(rpc).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == rpc.__name__
    }
    assert defined == {
        "debug_info",
        "get_worker_info",
        "get_worker_infos",
        "init_rpc",
        "is_available",
        "on_joined",
        "on_lost",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    }


def test_everything_public_in_rpc_is_documented() -> None:
    for name in RPC:
        assert inspect.getdoc(getattr(rpc, name)), name


def test_an_unknown_name_of_the_package_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'backhaul' has no attribute 'nothing'"):
        backhaul.nothing  # noqa: B018


DRAWING = (ROOT.parents[1] / "docs/architecture.md").read_text().split("    ┌─ ")[1].split("    └──")[0]


def drawn_layers() -> set[str]:
    """Folders and files of the first column, and titles that are folders: `launch/`, `rpc.py`, `├─ agent/ ─`."""
    return set(re.findall(r"(?:│  |├─ )(\w+)(?:/|\.py) ", DRAWING))


def drawn_files() -> dict[str, set[str]]:
    """The files of each package that has its own section. A row alternates names and descriptions, two spaces apart."""
    found: dict[str, set[str]] = {}
    for section in DRAWING.split("├─")[1:]:
        title, *rows = section.splitlines()
        if package := re.match(r" (\w+)/ ", title):
            cells = [re.split(r" {2,}", row.strip(" │")) for row in rows]
            names = [name for row in cells for cell in row[::2] for name in cell.split(", ")]
            assert len(set(names)) == len(names), f"{package[1]}/ is drawn with a file twice"
            found[package[1]] = set(names) - {""}
    return found


def test_every_layer_is_drawn() -> None:
    """A reader of docs/architecture.md finds each of them, and none that is gone."""
    assert drawn_layers() == {layer(module) for module in FILES} - {"__init__", "__main__"}


def test_the_packages_that_are_drawn_file_by_file() -> None:
    """The layers below the public functions."""
    assert set(drawn_files()) == {
        "inspection",
        "autograd",
        "drawing",
        "refs",
        "agent",
        "transport",
        "devices",
        "edges",
        "security",
        "trust",
        "wire",
    }


@pytest.mark.parametrize(("package", "drawn"), drawn_files().items(), ids=drawn_files())
def test_a_package_is_drawn_with_its_files(package: str, drawn: set[str]) -> None:
    """A file that the drawing lacks fails, and so does a drawn file that is gone."""
    assert drawn == {name.split(".")[1] for name in FILES if name.startswith(f"{package}.")}
