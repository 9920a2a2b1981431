"""A name leads back to the same object; an object without a name gets an error that says what to do."""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from backhaul.errors import MisuseError, UnsendableError
from backhaul.wire import callables
from backhaul.wire.callables import find, name_of

HERE = __name__


def plain(x: Any) -> Any:
    return x


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorate
def decorated(x: Any) -> Any:
    return x


class Owner:
    @classmethod
    def of_class(cls) -> type:
        return cls

    @staticmethod
    def static() -> None: ...

    def method(self) -> None: ...

    class Inner:
        def method(self) -> None: ...


class Heir(Owner):
    pass


@functools.lru_cache
def cached(x: int) -> int:
    return x


NAMES = [
    (plain, f"{HERE}:plain"),
    (decorated, f"{HERE}:decorated"),
    (cached, f"{HERE}:cached"),
    (Owner, f"{HERE}:Owner"),
    (Owner.static, f"{HERE}:Owner.static"),
    (Owner.method, f"{HERE}:Owner.method"),
    (Owner.of_class, f"{HERE}:Owner.of_class"),
    (Heir.of_class, f"{HERE}:Heir.of_class"),
    (Owner.Inner.method, f"{HERE}:Owner.Inner.method"),
    (len, "builtins:len"),
    (int, "builtins:int"),
    (math.sqrt, "math:sqrt"),
    (operator.add, "_operator:add"),
    (str.upper, "builtins:str.upper"),
    (dict.fromkeys, "builtins:dict.fromkeys"),
    (torch.add, "torch:add"),
    (torch.ones, "torch:ones"),
    (torch.einsum, "torch.functional:einsum"),
    (torch.Tensor, "torch:Tensor"),
    (torch.Tensor.add, "torch:Tensor.add"),
    (torch.Tensor.__add__, "torch:Tensor.__add__"),
    (torch.Tensor.backward, "torch._tensor:Tensor.backward"),
    (torch.nn.Linear, "torch.nn.modules.linear:Linear"),
    (F.gelu, "torch.nn.functional:gelu"),
    (F.relu, "torch.nn.functional:relu"),
    (F.max_pool2d, "torch.nn.functional:max_pool2d"),
    (torch.special.erf, "torch.special:erf"),
    (torch.linalg.inv, "torch.linalg:inv"),
    (torch.fft.fft, "torch.fft:fft"),
    (torch.sparse.mm, "torch.sparse:mm"),
    (torch.ops.aten.add, "torch:ops.aten.add"),
    (torch.ops.aten.add.Tensor, "torch:ops.aten.add.Tensor"),
    (torch.ops.aten.relu.default, "torch:ops.aten.relu.default"),
]


@pytest.mark.parametrize(("obj", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_name_is_found_again(obj: Any, name: str) -> None:
    for _ in range(2):  # the second time from the cache
        assert name_of(obj) == name
        assert find(name) == obj


def test_script_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("scripted_module")
    monkeypatch.setitem(sys.modules, "scripted_module", module)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.__module__ = "scripted_module"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(double)
        traced = torch.jit.trace(double, torch.ones(1))
    module.double = scripted  # type: ignore[attr-defined]
    assert name_of(scripted) == "scripted_module:double"
    with pytest.raises(UnsendableError):
        name_of(traced)
    module.double = traced  # type: ignore[attr-defined]
    assert name_of(traced) == "scripted_module:double"
    elsewhere = types.ModuleType("elsewhere")
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)
    del module.double
    elsewhere.double = traced  # type: ignore[attr-defined]
    assert name_of(traced) == "elsewhere:double"
    with pytest.raises(UnsendableError):
        name_of(scripted)


def test_functions_of_main_keep_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec("def f(): pass", main.__dict__)
    assert name_of(main.f) == "__main__:f"
    assert find("__main__:f") is main.f


def local() -> Any:
    def inner() -> None: ...

    return inner


class Shadow:
    __name__ = "shadow"
    __module__ = HERE

    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("obj", "advice"),
    [
        (lambda: 0, "at module level"),
        (local(), "as an argument"),
        (decorated.__wrapped__, "another object.*pass .*decorated itself"),  # type: ignore[attr-defined]
        (Owner().method, "bound to a Owner"),
        (functools.partial(plain), "no name"),
        (functools.wraps(len)(functools.partial(plain)), "another object"),
        (3, "no name"),
        (type(None), "no name"),
        (Shadow(), "no name"),
    ],
)
def test_the_error_for_a_callable_without_a_name_gives_advice(obj: Any, advice: str) -> None:
    with pytest.raises(UnsendableError, match=advice):
        name_of(obj)


def test_a_function_that_was_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = plain
    name = name_of(old)
    monkeypatch.setattr(sys.modules[HERE], "plain", len)
    assert find(name) is len
    with pytest.raises(UnsendableError, match="another object"):
        name_of(old)
    monkeypatch.delattr(sys.modules[HERE], "plain")
    with pytest.raises(UnsendableError, match="no name"):
        name_of(old)


def test_names_do_not_keep_functions_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("short_lived")
    monkeypatch.setitem(sys.modules, "short_lived", module)
    exec("def f(): pass", module.__dict__)
    name_of(module.f)
    alive = weakref.ref(module.f)
    del module.f
    assert alive() is None


def test_names_are_not_remembered_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callables, "_CACHED", 3)
    for obj, name in NAMES:
        assert name_of(obj) == name
    assert len(callables._hints) <= 3


def test_a_name_too_long_to_find_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "f" * 600
    function = types.FunctionType(plain.__code__, globals(), name)
    function.__qualname__ = name
    monkeypatch.setattr(sys.modules[HERE], name, function, raising=False)
    with pytest.raises(UnsendableError):
        name_of(function)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":",
        "math",
        "math:",
        ":sqrt",
        "math:sqrt.",
        "math:.sqrt",
        "math:sq rt",
        "a..b:c",
        "math:sqrt:x",
        "../math:sqrt",
        f"{HERE}:plain.__globals__",
        f"{HERE}:plain.__globals__.clear",
        f"{HERE}:plain.__class__.mro",
        f"{HERE}:__dict__",
        "math:" + "a" * 600,
    ],
)
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(MisuseError):
        find(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:f", "importing 'no_such_module' failed"),
        ("math:no_such_function", "no attribute 'no_such_function'"),
        ("math:sqrt.deeper", "no attribute 'deeper'"),
        ("torch:ops.aten.no_such_operator", "no_such_operator"),
    ],
)
def test_the_error_for_a_missing_name_says_what_is_missing(name: str, says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        find(name)


@pytest.fixture
def broken_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "broken_on_import.py").write_text("1 / 0")
    (tmp_path / "sound_on_import.py").write_text("def f(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    yield "broken_on_import"
    sys.modules.pop("sound_on_import", None)


def test_find_imports(broken_module: str) -> None:
    assert find("sound_on_import:f").__name__ == "f"
    with pytest.raises(MisuseError, match="division by zero"):
        find(f"{broken_module}:f")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20) | st.from_regex(r"(math|torch):[a-z_.]{1,12}", fullmatch=True))
def test_find_finds_or_raises_misuse_error_for_any_text(name: str) -> None:
    try:
        find(name)
    except MisuseError:
        pass


def test_find_waits_for_an_import_on_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls may be the first to need a module, at once."""
    (tmp_path / "slow_module.py").write_text(
        "import slow_module_control as control\ncontrol.entered.set()\n"
        "assert control.release.wait(10)\ndef late():\n    return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    control = types.ModuleType("slow_module_control")
    control.entered, control.release = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "slow_module_control", control)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(find("slow_module:late")())) for _ in range(3)]
    threads[0].start()
    assert control.entered.wait(10)
    for thread in threads[1:]:
        thread.start()
    control.release.set()
    for thread in threads:
        thread.join(10)
    assert found == [1, 1, 1]
    del sys.modules["slow_module"]
