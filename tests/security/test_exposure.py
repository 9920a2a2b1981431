"""What is exposed, and to which peers; and what is not, although it looks exposed."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import exposed
import pytest
import torch
from exposed import Account, Current, Savings, Vault

from backhaul import rpc
from backhaul.errors import MisuseError, OptionError, QuotaError
from backhaul.trust import exposure, operators
from backhaul.trust.exposure import Exposed, PeerNames, Table

SHOP = PeerNames("shop", 1 << 20)
BANK = PeerNames("bank-7", 1 << 20)


@pytest.fixture(autouse=True)
def _table_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposure.registry, "_entries", dict(exposure.registry._entries))


def refused(names: PeerNames, name: str) -> str:
    with pytest.raises(MisuseError) as refusal:
        names.find(name)
    return str(refusal.value).replace(repr(name), "NAME")


def test_an_exposed_function_is_found_by_its_name() -> None:
    assert SHOP.find("exposed:double") is exposed.double
    assert SHOP.name_of(exposed.double) == "exposed:double"


def test_a_function_is_exposed_only_to_matching_names() -> None:
    assert BANK.find("exposed:for_some") is exposed.for_some
    assert PeerNames("worker1", 0).find("exposed:for_some") is exposed.for_some
    for name in ("shop", "bank", "worker10", "Bank-7", "xbank-1", "BANK-1"):
        refused(PeerNames(name, 0), "exposed:for_some")


def test_a_worker_s_table_overrides_that_of_the_process() -> None:
    mine, other = Table(below=exposure.registry), Table(below=exposure.registry)
    mine.expose(exposed.hidden, to="shop")
    mine.expose(exposed.for_some, to="shop")
    assert PeerNames("shop", 0, mine).find("exposed:hidden") is exposed.hidden
    assert PeerNames("shop", 0, mine).find("exposed:for_some") is exposed.for_some
    assert PeerNames("shop", 0, mine).find("exposed:double") is exposed.double
    refused(PeerNames("bank-7", 0, mine), "exposed:for_some")  # which the entry of this worker replaces
    refused(PeerNames("shop", 0, other), "exposed:hidden")
    refused(PeerNames("shop", 0), "exposed:hidden")


def test_a_worker_s_table_knows_the_exceptions_of_the_process() -> None:
    class Overdrawn(Exception):
        pass

    Overdrawn.__qualname__ = "Overdrawn"
    below = Table()
    mine = Table(below=below)
    name = exposure.type_name(Overdrawn)
    assert mine.exception(name) is None
    below.expose(Overdrawn, to="shop")
    assert mine.exception(name) == Exposed(Overdrawn, ("shop",))
    mine.expose(Overdrawn, to="bank-*")
    assert mine.exception(name) == Exposed(Overdrawn, ("bank-*",))
    assert below.exception(name) == Exposed(Overdrawn, ("shop",))


def test_missing_and_unexposed_names_give_the_same_text() -> None:
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


def test_the_exposed_object_is_used_even_if_its_name_was_rebound(monkeypatch: pytest.MonkeyPatch) -> None:
    before = exposed.double
    monkeypatch.setattr(exposed, "double", exposed.hidden)
    assert SHOP.find("exposed:double") is before


def test_exposing_a_function_again_replaces_its_peers() -> None:
    rpc.expose(exposed.double, to="bank-*")
    refused(SHOP, "exposed:double")
    assert BANK.find("exposed:double") is exposed.double
    assert rpc.expose(exposed.double) is exposed.double
    assert SHOP.find("exposed:double") is exposed.double


def test_a_function_of_another_module() -> None:
    refused(SHOP, "textwrap:dedent")
    rpc.expose(textwrap.dedent)
    assert SHOP.find("textwrap:dedent") is textwrap.dedent


@pytest.mark.parametrize(
    ("pattern", "matches", "others"),
    [
        ("bank[1]", ["bank[1]"], ["bank1", "bank", "bank[1"]),
        ("bank?", ["bank?"], ["bank1", "bankx"]),
        ("bank.1", ["bank.1"], ["bankx1"]),
        ("bank-*", ["bank-", "bank-1", "bank-\n"], ["bank", "xbank-1"]),
        ("*-bank-*", ["a-bank-b", "-bank-"], ["bank", "a-bank"]),
        ("[!a]", ["[!a]"], ["b"]),
    ],
)
def test_only_the_star_is_special_in_a_pattern(pattern: str, matches: list[str], others: list[str]) -> None:
    entry = Exposed(exposed.double, (pattern,))
    assert all(map(entry.is_for, matches))
    assert not any(map(entry.is_for, others))


@pytest.mark.parametrize("to", ["", [], (), [""], ["a", ""], None, 7, b"bank", {"a": 1}, [b"bank"]])
def test_the_argument_to_must_be_names(to: Any) -> None:
    with pytest.raises(OptionError, match="give the name of a worker, or a list of names"):
        rpc.expose(exposed.hidden, to=to)
    refused(SHOP, "exposed:hidden")


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        (lambda: 1, "'<lambda>' has no name|has no name that a peer can send"),
        (7, "7 is neither a function nor a class"),
        (functools.partial(print), "has no name to look up"),
        (staticmethod(exposed.hidden), "below @staticmethod"),
        (classmethod(exposed.hidden), "expose the class"),
        (Account(1).deposit, "bound to a Account"),
    ],
)
def test_objects_that_cannot_be_exposed(thing: Any, text: str) -> None:
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
def test_other_attributes_are_not_methods_and_do_not_run(name: str) -> None:
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


def test_methods_are_exposed_to_the_peers_of_their_class() -> None:
    assert SHOP.method(Vault(), "open") is None
    assert BANK.method(Vault(), "open") is not None


def test_another_class_of_the_same_name() -> None:
    imposter = type("Account", (), {"deposit": lambda self: 1, "__module__": "exposed", "__qualname__": "Account"})
    assert SHOP.method(imposter(), "deposit") is None


@pytest.mark.parametrize("value", [1, "text", torch.ones(1), [1], print, Account, exposed])
def test_objects_of_unexposed_classes_have_no_methods(value: Any) -> None:
    for name in ("append", "add", "format", "deposit", "title", "__call__"):
        assert SHOP.method(value, name) is None


# Exceptions.


def test_exceptions_that_may_be_rebuilt() -> None:
    assert SHOP.exception("builtins.ValueError") is ValueError
    assert SHOP.exception("backhaul.errors.QuotaError") is QuotaError
    assert SHOP.exception("exposed.Declined") is exposed.Declined


def test_an_exception_is_rebuilt_only_for_peers_of_its_class() -> None:
    assert BANK.exception("exposed.Overdrawn") is exposed.Overdrawn
    assert SHOP.exception("exposed.Overdrawn") is None


NO_EXCEPTIONS = """
builtins.SystemExit builtins.KeyboardInterrupt builtins.GeneratorExit builtins.BaseException builtins.StopIteration
builtins.StopAsyncIteration builtins.eval builtins.UnicodeDecodeError builtins.ExceptionGroup exposed.Unknown
exposed.Account exposed:Declined backhaul.errors.os backhaul.errors.PartialError ValueError
subprocess.CalledProcessError
"""


@pytest.mark.parametrize("name", ["", *NO_EXCEPTIONS.split()])
def test_exceptions_that_may_not_be_rebuilt(name: str) -> None:
    assert SHOP.exception(name) is None


# Operators.


@pytest.fixture
def all_exposed() -> None:
    for operator in operators.TABLE.values():
        rpc.expose(operator.function)


def test_no_operator_is_exposed_unless_it_is_named() -> None:
    refused(SHOP, "torch:tanh")
    rpc.expose(torch.tanh, to="bank-*")
    refused(SHOP, "torch:tanh")
    assert BANK.find("torch:tanh")(torch.zeros(1)) == 0


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.norm,
        torch.floor_divide,
        torch.zeros,
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.Tensor.add,
        torch.Tensor.numpy,
        torch.einsum,
        torch.nn.functional.softmax,
    ],
)
def test_native_code_that_is_not_in_the_table_cannot_be_exposed(function: Any) -> None:
    with pytest.raises(MisuseError, match=r"expose a function of your own that checks .*, or one of abs, add"):
        rpc.expose(function)


def test_every_operator_is_found_and_runs(all_exposed: None) -> None:
    assert 20 < len(operators.TABLE) < 32
    x = torch.tensor([[1.0, 4.0], [9.0, 16.0]])
    for name, operator in operators.TABLE.items():
        found = SHOP.find(SHOP.name_of(operator.function))
        operand = x[None] if name == "bmm" else x
        needed = [operand for kind in operator.parameters.values() if kind in ("tensor", "operand")]
        kwargs = {"min": 2.0} if name == "clamp" else {}
        assert torch.equal(found(*needed, **kwargs), operator.function(*needed, **kwargs))
    assert torch.equal(SHOP.find("torch:add")(x, 1, alpha=2), x + 2)
    assert torch.equal(SHOP.find("torch:sum")(x, dim=[0, 1], keepdim=True), x.sum([0, 1], keepdim=True))
    assert SHOP.find("torch:matmul")(torch.ones(3), torch.ones(3)) == 3


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("add", (torch.ones(10**6, 1), torch.ones(1, 10**6))),
        ("matmul", (torch.ones(10**6, 1), torch.ones(1, 10**6))),
        ("bmm", (torch.ones(2, 10**5, 1), torch.ones(2, 1, 10**5))),
    ],
)
def test_no_operator_makes_a_large_result_from_small_arguments(name: str, args: Any, all_exposed: None) -> None:
    with pytest.raises(QuotaError, match="may be larger than 1048576 bytes"):
        SHOP.find(f"torch:{name}")(*args)


def test_no_operator_takes_minutes(all_exposed: None) -> None:
    square = torch.empty(2100, 2100)
    with pytest.raises(QuotaError, match="9261000000 multiplications; the limit is 8589934592"):
        PeerNames("shop", 1 << 40).find("torch:mm")(square, square)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "text"),
    [
        ("div", (torch.ones(1), 2), {"rounding_mode": "trunc"}, "may give it input, other"),
        ("div", (torch.tensor([-(2**63)]), torch.tensor([-1])), {}, "not give it tensors of torch.int64"),
        ("add", (torch.ones(1), 2), {"out": torch.ones(1)}, "may give it input, other, alpha"),
        ("add", (torch.ones(1), exposed.hidden), {}, "its other is not"),
        ("add", (torch.ones(1), 1 << 70), {}, "its other is not"),
        ("add", (torch.ones(1), 2), {"input": torch.ones(1)}, "may give it"),
        ("add", (torch.ones(1), 1j), {}, "its other is not"),
        ("add", (torch.ones(1),), {}, "its other is missing"),
        ("mm", (torch.ones(1, 1),), {}, "its mat2 is missing"),
        ("mm", (torch.ones(1, 1).expand(9, 9), torch.ones(9, 9)), {}, r"send tensor.contiguous\(\)"),
        ("sum", (torch.ones(1),), {"dim": [0] * 65}, "its dim is not"),
        ("sum", (torch.ones(1),), {"dtype": torch.int64}, "may give it input, dim, keepdim"),
        ("exp", (torch.eye(2).to_sparse(),), {}, "strided tensors that have data"),
        ("exp", (torch.ones(2, device="meta"),), {}, "strided tensors that have data"),
        ("sum", (torch.ones(0, 10**6), 0), {}, "strided tensors that have data"),
        ("exp", (torch.ones(2, dtype=torch.complex64),), {}, "tensors of torch.complex64"),
    ],
)
def test_operators_refuse_dangerous_arguments(name: str, args: Any, kwargs: Any, text: str, all_exposed: None) -> None:
    with pytest.raises(MisuseError, match=text):
        SHOP.find(f"torch:{name}")(*args, **kwargs)
