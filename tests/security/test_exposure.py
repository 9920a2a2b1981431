"""What is exposed, to whom; and what is not, though it looks like it."""

from __future__ import annotations

import functools
from typing import Any

import exposed
import pytest
import torch
from exposed import Account, Current, Savings, Vault

from backhaul import rpc
from backhaul.errors import MisuseError, OptionError, QuotaError
from backhaul.security import exposure, operators
from backhaul.security.exposure import PeerNames

SHOP = PeerNames("shop", 1 << 20)
BANK = PeerNames("bank-7", 1 << 20)


@pytest.fixture(autouse=True)
def _table_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure, "_table", dict(exposure._table))


def refused(names: PeerNames, name: str) -> str:
    with pytest.raises(MisuseError) as refusal:
        names.find(name)
    return str(refusal.value).replace(repr(name), "NAME")


def test_an_exposed_function_is_found_by_its_name() -> None:
    assert SHOP.find("exposed:double") is exposed.double
    assert SHOP.name_of(exposed.double) == "exposed:double"


def test_to_whom() -> None:
    assert BANK.find("exposed:for_some") is exposed.for_some
    assert PeerNames("worker1", 0).find("exposed:for_some") is exposed.for_some
    for name in ("shop", "bank", "worker10", "Bank-7", "xbank-1", "BANK-1"):
        refused(PeerNames(name, 0), "exposed:for_some")


def test_what_is_not_there_and_what_is_not_exposed_give_one_text() -> None:
    names = [
        "exposed:hidden",
        "exposed:for_some",
        "exposed:no_such_thing",
        "no_such_module:f",
        "os:system",
        "builtins:eval",
        "builtins:ValueError",
        "torch:load",
        "torch:zeros",
        "torch:Tensor.add",
        "torch:add_",
        "exposed:double.__globals__",
        "exposed:Account.deposit",
        "exposed:Savings",
        "backhaul.refs.proxy:invoke",
        "",
        ":",
        "x" * 100,
    ]
    assert len({refused(SHOP, name) for name in names}) == 1


def test_it_is_the_object_that_was_exposed_and_not_what_has_its_name_now(monkeypatch: pytest.MonkeyPatch) -> None:
    before = exposed.double
    monkeypatch.setattr(exposed, "double", exposed.hidden)
    assert SHOP.find("exposed:double") is before


def test_to_expose_it_again_replaces_it() -> None:
    rpc.expose(exposed.double, to="bank-*")
    refused(SHOP, "exposed:double")
    assert BANK.find("exposed:double") is exposed.double
    assert rpc.expose(exposed.double) is exposed.double
    assert SHOP.find("exposed:double") is exposed.double


def test_a_function_of_another_module() -> None:
    refused(SHOP, SHOP.name_of(torch.linalg.norm))
    rpc.expose(torch.linalg.norm)
    assert SHOP.find(SHOP.name_of(torch.linalg.norm)) is torch.linalg.norm


@pytest.mark.parametrize("to", ["", [], (), [""], ["a", ""], None, 7, b"bank", {"a": 1}, [b"bank"]])
def test_to_whom_must_be_names(to: Any) -> None:
    with pytest.raises(OptionError, match="give the name of a worker, or a list of names"):
        rpc.expose(exposed.hidden, to=to)
    refused(SHOP, "exposed:hidden")


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (lambda: 1, "'<lambda>' has no name|has no name to be called by"),
        (7, "7 is neither a function nor a class"),
        (functools.partial(print), "has no name to look up"),
        (staticmethod(exposed.hidden), "below @staticmethod"),
        (classmethod(exposed.hidden), "expose the class"),
        (Account(1).deposit, "bound to a Account"),
    ],
)
def test_what_cannot_be_exposed(thing: Any, text: str) -> None:
    with pytest.raises(MisuseError, match=text):
        rpc.expose(thing)


def test_a_local_function_cannot_be_exposed() -> None:
    def local() -> None: ...

    with pytest.raises(MisuseError, match="define it at module level"):
        rpc.expose(local)


# Methods.


def test_public_methods_that_are_written_in_the_class() -> None:
    account = Account(1)
    assert SHOP.method(account, "deposit")(2) == 3
    assert SHOP.method(account, "__call__")(4) == 7
    assert SHOP.method(account, "rate")() == 0.5
    assert SHOP.method(account, "title")() == "Account"


NO_METHODS = """
_audit __init__ __class__ __dict__ __reduce__ __getattr__ __getattribute__ inherited owner hook kind balance nothing
__doc__ deposit.__func__ deposit.__globals__
"""


@pytest.mark.parametrize("name", ["", *NO_METHODS.split()])
def test_nothing_else_is_a_method_and_nothing_runs(name: str) -> None:
    exposed.called.clear()
    assert SHOP.method(Account(1), name) is None
    assert not exposed.called


def test_an_attribute_of_the_object_does_not_take_the_place_of_a_method() -> None:
    account = Account(1)
    account.deposit = lambda amount: exposed.called.append("shadow")  # type: ignore[method-assign,assignment]
    assert SHOP.method(account, "deposit")(2) == 3


def test_a_subclass_is_not_exposed() -> None:
    for name in ("deposit", "withdraw"):
        assert SHOP.method(Savings(1), name) is None


def test_methods_of_a_base_that_is_exposed_too() -> None:
    current = Current(1)
    assert SHOP.method(current, "limit")() == 100
    assert SHOP.method(current, "deposit")(1) == 2
    assert SHOP.method(current, "inherited") is None


def test_a_method_that_is_hidden_by_an_unexposed_class() -> None:
    class Between(Account):
        def deposit(self, amount: int) -> int:
            exposed.called.append("between")
            return 0

    class Top(Between): ...

    Top.__qualname__ = "Top"
    Top.__module__ = "exposed"
    rpc.expose(Top)
    assert SHOP.method(Top(1), "rate")() == 0.5
    assert SHOP.method(Top(1), "deposit") is None


def test_methods_are_for_whom_the_class_is() -> None:
    assert SHOP.method(Vault(), "open") is None
    assert BANK.method(Vault(), "open") is not None


def test_another_class_of_the_same_name() -> None:
    imposter = type("Account", (), {"deposit": lambda self: 1, "__module__": "exposed", "__qualname__": "Account"})
    assert SHOP.method(imposter(), "deposit") is None


@pytest.mark.parametrize("value", [1, "text", torch.ones(1), [1], print, Account, exposed])
def test_nothing_is_a_method_of_what_is_no_instance_of_an_exposed_class(value: Any) -> None:
    for name in ("append", "add", "format", "deposit", "title", "__call__"):
        assert SHOP.method(value, name) is None


# Exceptions.


def test_exceptions_that_may_be_raised() -> None:
    assert SHOP.exception("builtins.ValueError") is ValueError
    assert SHOP.exception("backhaul.errors.QuotaError") is QuotaError
    assert SHOP.exception("exposed.Declined") is exposed.Declined


NO_EXCEPTIONS = """
builtins.SystemExit builtins.KeyboardInterrupt builtins.GeneratorExit builtins.BaseException builtins.StopIteration
builtins.StopAsyncIteration builtins.eval builtins.UnicodeDecodeError builtins.ExceptionGroup exposed.Unknown
exposed.Account exposed:Declined backhaul.errors.os backhaul.errors.PartialError ValueError
subprocess.CalledProcessError
"""


@pytest.mark.parametrize("name", ["", *NO_EXCEPTIONS.split()])
def test_exceptions_that_may_not(name: str) -> None:
    assert SHOP.exception(name) is None


# Operators.


def test_every_operator_is_found_and_runs() -> None:
    names = f"{operators.ELEMENTWISE} {operators.REDUCTIONS} {operators.PRODUCTS}".split()
    assert len(set(names)) == len(names) > 60
    for name in names:
        assert SHOP.find(SHOP.name_of(getattr(torch, name))).__name__ == name
    assert torch.equal(SHOP.find("torch:add")(torch.ones(2), 1), torch.full((2,), 2.0))
    assert SHOP.find("torch:matmul")(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    assert SHOP.find("torch:addmm")(torch.ones(4), torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    assert SHOP.find("torch:matmul")(torch.ones(3), torch.ones(3)) == 3
    assert SHOP.find("torch:sum")(torch.ones(3, 3), dim=[0, 1]) == 9


def test_no_operator_changes_what_it_is_given_or_makes_something_from_nothing() -> None:
    names = f"{operators.ELEMENTWISE} {operators.REDUCTIONS} {operators.PRODUCTS}".split()
    assert not [name for name in names if name.endswith("_")]
    made = {"zeros", "ones", "full", "rand", "randn", "arange", "eye", "empty", "load", "save", "from_file", "tensor"}
    assert not made & set(names)
    assert not {"repeat_interleave", "kron", "outer", "cartesian_prod", "combinations", "einsum", "cat"} & set(names)


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("add", (torch.ones(10**6, 1), torch.ones(1, 10**6))),
        ("matmul", (torch.ones(10**6, 1), torch.ones(1, 10**6))),
        ("addmm", (torch.ones(10**6, 1), torch.ones(1, 1), torch.ones(1, 10**6))),
        ("bmm", (torch.ones(2, 10**5, 1), torch.ones(2, 1, 10**5))),
        ("exp", (torch.ones(()).expand(1 << 50),)),
        ("sum", (torch.ones(()).expand(1 << 50),)),
        ("lerp", (torch.ones(10**6, 1, 1), torch.ones(1, 10**6, 1), torch.ones(1, 1, 10**6))),
    ],
)
def test_no_operator_makes_much_of_little(name: str, tensors: Any) -> None:
    with pytest.raises(QuotaError, match="may be larger than 1048576 bytes"):
        SHOP.find(f"torch:{name}")(*tensors)


def test_what_operators_are_not_given() -> None:
    for kwargs in ({"out": torch.ones(1)}, {"other": exposed.hidden}, {"other": Account(1)}):
        with pytest.raises(MisuseError, match="tensors, numbers and the like"):
            SHOP.find("torch:add")(torch.ones(1), **kwargs)
    tall, wide = torch.ones(10**6, 1), torch.ones(1, 10**6)
    with pytest.raises(MisuseError, match="give the tensors in their order"):
        SHOP.find("torch:mm")(mat2=wide, input=tall)
    for name in ("mm", "add"):
        with pytest.raises(MisuseError, match=r"send tensor.contiguous\(\)"):
            SHOP.find(f"torch:{name}")(torch.ones(1, 1).expand(100, 100), torch.ones(100, 100))
    for few in ((), (torch.ones(1),)):
        with pytest.raises(TypeError):
            SHOP.find("torch:mm")(*few)
