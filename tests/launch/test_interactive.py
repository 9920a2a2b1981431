"""A notebook's definitions are found, sent once, and sent again when they change."""

from __future__ import annotations

import functools
import linecache
import math
import os
import subprocess
import sys
import textwrap
import threading
from types import FunctionType, ModuleType
from typing import Any

import pytest

from backhaul.errors import UnsendableError
from backhaul.launch.interactive import Definition, Shipper, apply, definitions, names_of_main


class Notebook:
    """A ``__main__`` typed cell by cell, as in IPython."""

    def __init__(self) -> None:
        self.module = ModuleType("__main__")
        self.cells = 0

    @property
    def names(self) -> dict[str, Any]:
        return self.module.__dict__

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def type(self, source: str) -> None:
        source = textwrap.dedent(source)
        self.cells += 1
        filename = f"<cell {self.cells} of {id(self)}>"
        linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
        exec(compile(source, filename, "exec", dont_inherit=True), self.names)

    def type_without_source(self, source: str) -> None:
        exec(compile(textwrap.dedent(source), "<stdin>", "exec", dont_inherit=True), self.names)


class Remote:
    """A worker's ``__main__``."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.received: list[str] = []

    def receive(self, items: list[Definition]) -> None:
        self.received = [item.name for item in items]
        apply(items, self.names)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    made = Notebook()
    # Pickle looks functions and classes up in the real ``sys.modules``.
    monkeypatch.setitem(sys.modules, "__main__", made.module)
    return made


@pytest.fixture
def remote() -> Remote:
    return Remote()


def ship(notebook: Notebook, remote: Remote, name: str) -> Any:
    remote.receive(definitions(notebook[name], notebook.names))
    return remote.names[name]


def test_a_function_travels_with_everything_that_it_uses(notebook: Notebook, remote: Remote) -> None:
    notebook.type("import math as m, os.path\nfrom functools import partial")
    notebook.type("SCALE = 2.5\nTABLE = {'a': [1, 2]}")
    notebook.type(
        """
        def helper(x):
            return m.sqrt(x) * SCALE

        class Counter:
            def __init__(self, start=TABLE['a'][1]):
                self.n = start

            def up(self):
                self.n += helper(4)
                return self
        """
    )
    notebook.type("def f(x):\n    return partial(helper, x)() + Counter().up().n + len(os.path.join('a', 'b'))")
    f = ship(notebook, remote, "f")
    assert f.__globals__ is remote.names
    assert f(16) == notebook["f"](16) == 4 * 2.5 + 2 + 5 + 3
    assert remote.names["m"] is math
    assert set(remote.received) == {"f", "helper", "Counter", "m", "os", "partial", "SCALE", "TABLE"}
    assert remote.received.index("TABLE") < remote.received.index("Counter") < remote.received.index("f")


def test_names_that_only_look_global_are_left_alone(notebook: Notebook, remote: Remote) -> None:
    notebook.names["lock"] = threading.Lock()  # could not be sent
    notebook.type(
        """
        def f(lock, *, x=1):
            y = [lock for lock in range(3)]
            class Inner:
                lock = 1
            return lock.lock, y, Inner.lock, undefined_name
        """
    )
    ship(notebook, remote, "f")
    assert remote.received == ["f"]


def test_recursion_and_cycles(notebook: Notebook, remote: Remote) -> None:
    notebook.type("def even(n): return n == 0 or odd(n - 1)")
    notebook.type("def odd(n): return n != 0 and even(n - 1)")
    assert ship(notebook, remote, "even")(10) is True


def test_decorated_functions(notebook: Notebook, remote: Remote) -> None:
    notebook.type("from functools import lru_cache, wraps")
    notebook.type(
        """
        def twice(function):
            @wraps(function)
            def wrapper(x):
                return 2 * function(x)
            return wrapper

        @twice
        def f(x): return g(x)

        @lru_cache(maxsize=None)
        def g(x): return x + 1
        """
    )
    assert ship(notebook, remote, "f")(3) == 8
    assert isinstance(remote.names["g"], type(notebook["g"]))


def test_aliases_lambdas_and_methods(notebook: Notebook, remote: Remote) -> None:
    notebook.type("square = lambda x: x * x\ndef plus(x): return x + 1\nalias = plus")
    notebook.type("class Tool:\n    @classmethod\n    def use(cls, x): return alias(square(x))")
    remote.receive(definitions(notebook["Tool"].use, notebook.names))
    assert remote.names["Tool"].use(3) == 10


def test_classes_without_methods(notebook: Notebook, remote: Remote) -> None:
    notebook.type("from dataclasses import dataclass\nfrom enum import Enum")
    notebook.type("class Colour(Enum):\n    RED = 1")
    notebook.type("@dataclass\nclass Point:\n    x: int\n    colour: Colour = Colour.RED")
    notebook.type("class Error(Exception): pass")
    notebook.type("def f(): return Point(3).colour, Error")
    assert [str(value) for value in ship(notebook, remote, "f")()] == ["Colour.RED", "<class '__main__.Error'>"]


def test_the_latest_class_of_a_name_wins(notebook: Notebook, remote: Remote) -> None:
    notebook.type("class Box:\n    size = 1")
    notebook.type("class Box:\n    size = 2")
    assert ship(notebook, remote, "Box").size == 2


def test_values_bring_their_classes(notebook: Notebook, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook.type("class Point:\n    def __init__(self, x): self.x = x")
    notebook.type("ORIGIN = [Point(7)]\ndef f(): return ORIGIN[0].x")
    items = definitions(notebook["f"], notebook.names)
    assert [item.name for item in items] == ["Point", "ORIGIN", "f"]
    module = ModuleType("__main__")
    remote.names = module.__dict__
    monkeypatch.setitem(sys.modules, "__main__", module)
    remote.receive(items)
    assert remote.names["f"]() == 7


def test_source_that_is_indented_or_has_strings(notebook: Notebook, remote: Remote) -> None:
    notebook.type(
        '''
        if True:
            def f():
                return """one
            two"""
        '''
    )
    assert ship(notebook, remote, "f")() == notebook["f"]() == "one\n    two"


def test_lazy_annotations_stay_lazy(notebook: Notebook, remote: Remote) -> None:
    notebook.type("from __future__ import annotations\ndef f(x: NoSuchType) -> int: return 1")
    assert ship(notebook, remote, "f").__annotations__ == {"x": "NoSuchType", "return": "int"}


def test_a_traceback_there_shows_the_source(notebook: Notebook, remote: Remote) -> None:
    notebook.type("def f():\n    raise KeyError('shown')  # this very line")
    f = ship(notebook, remote, "f")
    assert "this very line" in linecache.getline(f.__code__.co_filename, 2)


def test_without_source_byte_code_travels(notebook: Notebook, remote: Remote) -> None:
    notebook.type_without_source(
        """
        BASE = 10
        def helper(x): return x + BASE
        def f(x, y=1, *, z=2): return [helper(x) for _ in range(1)][0] + y + z
        """
    )
    items = definitions(notebook["f"], notebook.names)
    assert {item.name: item.kind for item in items} == {"BASE": "value", "helper": "code", "f": "code"}
    f = ship(notebook, remote, "f")
    assert (f(1), f(1, z=0), f.__module__, f.__qualname__) == (14, 12, "__main__", "f")


def test_an_object_that_cannot_travel_is_named_in_the_error(notebook: Notebook) -> None:
    notebook.type_without_source("class Unknown:\n    def method(self): pass\ndef f(): return Unknown()")
    with pytest.raises(UnsendableError, match=r"do not have 'Unknown' of __main__.*put it into a file"):
        definitions(notebook["f"], notebook.names)
    notebook.names["lock"] = threading.Lock()
    notebook.type("def g(): return lock")
    with pytest.raises(UnsendableError, match=r"g\(\) uses the global 'lock', a lock, .* Pass it as an argument"):
        definitions(notebook["g"], notebook.names)
    notebook.names["big"] = bytes(2 << 20)
    notebook.type("def h(): return big")
    with pytest.raises(UnsendableError, match=r"h\(\) uses the global 'big', a bytes, .* it takes \d+ bytes"):
        definitions(notebook["h"], notebook.names)
    notebook.type("def make():\n    n = 1\n    def inner(): return n\n    return inner\nclosure = make()")
    notebook.type("def i(): return closure()")
    with pytest.raises(UnsendableError, match="do not have 'closure' of __main__"):
        definitions(notebook["i"], notebook.names)


def test_only_changed_definitions_are_sent_again(notebook: Notebook, remote: Remote) -> None:
    sent: list[list[str]] = []

    def send(items: list[Definition]) -> None:
        remote.receive(items)
        sent.append(remote.received)

    shipper = Shipper(send, notebook.names)
    notebook.type("LIST = [1]\nN = 1\ndef helper(): return N")
    notebook.type("def f(): return helper() + sum(LIST)")
    shipper(notebook["f"])
    assert sent == [["LIST", "N", "helper", "f"]]
    for _ in range(3):
        shipper(notebook["f"])
    assert len(sent) == 1
    notebook.type("def helper(): return N + 100")
    shipper(notebook["f"])
    notebook["LIST"].append(10)
    shipper(notebook["f"])
    notebook.type("N = 5")
    shipper(notebook["f"])
    assert sent[1:] == [["helper"], ["LIST"], ["N"]]
    notebook.type("def f(): return helper() + sum(LIST)")  # typed again, the same
    shipper(notebook["f"])
    assert len(sent) == 4
    assert remote.names["f"]() == 116


def test_a_name_that_comes_later(notebook: Notebook, remote: Remote) -> None:
    shipper = Shipper(remote.receive, notebook.names)
    notebook.type("def f(): return later()")
    shipper(notebook["f"])
    notebook.type("def later(): return 1")
    shipper(notebook["f"])
    assert remote.names["f"]() == 1


def test_a_send_that_fails_is_tried_again(notebook: Notebook, remote: Remote) -> None:
    failures = [OSError("lost")]

    def send(items: list[Definition]) -> None:
        if failures:
            raise failures.pop()
        remote.receive(items)

    shipper = Shipper(send, notebook.names)
    notebook.type("def f(): return 1")
    with pytest.raises(OSError, match="lost"):
        shipper(notebook["f"])
    shipper(notebook["f"])
    assert remote.received == ["f"]


def test_a_function_that_the_workers_have_is_not_sent(notebook: Notebook, remote: Remote) -> None:
    shipper = Shipper(remote.receive, notebook.names, at_home=lambda name, value: name == "known")
    notebook.type("LOCK = __import__('threading').Lock()\ndef known(): return LOCK\ndef f(): return known")
    shipper(notebook["f"])
    assert remote.received == ["f"]


def test_definitions_in_arguments_are_found(notebook: Notebook) -> None:
    notebook.type("class A: pass\nclass B: pass\nclass C: pass\ndef f(): pass\nlocal = (lambda: lambda: 0)()")
    value = notebook["A"]()
    value.inside = {"key": (notebook["B"](), value)}
    endless: list[Any] = []
    endless.append(endless)
    found = names_of_main(
        [value, notebook["C"], {notebook["f"]: 1}, notebook["local"], endless, list(range(1000)), math]
    )
    assert found == {"A", "B", "C", "f"}
    assert names_of_main((math.sqrt, threading.Lock, functools.partial, 3, "x", None)) == set()


def test_the_shipper_accepts_any_callable_and_arguments(notebook: Notebook, remote: Remote) -> None:
    shipper = Shipper(remote.receive, notebook.names)
    shipper(math.sqrt)
    shipper(lambda: 0)
    shipper(3, [1], {})
    assert remote.received == []


@pytest.mark.parametrize("how", ["-c", "stdin file"])
def test_the_text_of_a_program_without_a_file(how: str, tmp_path: Any) -> None:
    program = textwrap.dedent(
        """
        class Plain:
            size = 3

        def f():
            return Plain.size

        from backhaul.launch.interactive import definitions
        print(*[(item.name, item.kind) for item in definitions(f, globals())])
        """
    )
    (tmp_path / "program").write_text(program)
    with open(tmp_path / "program") as file:
        done = subprocess.run(
            [sys.executable, "-u", "-c", program] if how == "-c" else [sys.executable, "-"],
            stdin=file,
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert done.stdout == "('Plain', 'source') ('f', 'source')\n", done.stderr


IPYTHON = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
cells = [
    "import math\\nfrom dataclasses import dataclass\\nK = 3",
    "@dataclass\\nclass Point:\\n    x: float",
    "x = !true\\ndef f(x):\\n    return Point(math.sqrt(x) * K)",
    "import __main__\\nfrom backhaul.launch.interactive import definitions",
    "print([(item.name, item.kind) for item in definitions(f, vars(__main__))])",
]
for cell in cells:
    shell.run_cell(cell).raise_error()
"""


def test_ipython(tmp_path: Any) -> None:
    pytest.importorskip("IPython")
    done = subprocess.run(
        [sys.executable, "-c", IPYTHON],
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    expected = [("K", "value"), ("dataclass", "value"), ("Point", "source"), ("math", "source"), ("f", "source")]
    assert done.stdout == f"{expected}\n", done.stdout + done.stderr


def test_functions_made_by_exec_belong_to_main() -> None:
    """Functions made by exec belong to ``__main__``. The tests above rely on that."""
    notebook = Notebook()
    notebook.type("def f(): pass")
    assert isinstance(notebook["f"], FunctionType)
    assert notebook["f"].__module__ == "__main__"
