"""The tree of exceptions is as drawn, and each exception can be sent."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback
from typing import Any

import pytest

from backhaul import errors
from backhaul.errors import (
    BackhaulError,
    OptionError,
    PartialError,
    ProtocolError,
    RemoteError,
    RemoteTraceback,
    RpcTimeoutError,
    UnsendableError,
    WorkerLostError,
    WorkerUnresponsiveError,
    fresh,
    kept,
    user_frames,
)
from backhaul.options import RpcOptions

CLASSES = {name: cls for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
TREE = {name: cls for name, cls in CLASSES.items() if issubclass(cls, BackhaulError)}


def drawn() -> dict[str, tuple[str | None, str | None]]:
    """The tree in the module's docstring: name -> its base class, and the builtin in brackets."""
    found: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    (?P<branch>[│├└─ ]*)(?P<name>\w+(Error|Timeout))(\((?P<builtin>\w+)\))?(\s|$)", line)
        if match:
            depth = len(match["branch"]) // 4
            above[depth:] = [match["name"]]
            found[match["name"]] = (above[depth - 1] if depth else None, match["builtin"])
    return found


def test_the_tree_is_as_drawn() -> None:
    tree = drawn()
    assert set(tree) == set(TREE)
    for name, (parent, builtin) in tree.items():
        bases = [base.__name__ for base in TREE[name].__bases__]
        assert bases == [base for base in (parent, builtin) if base], name


def test_nothing_else_is_defined_beside_the_tree() -> None:
    assert set(CLASSES) - set(TREE) == {"RemoteTraceback"}


@pytest.mark.parametrize("name", CLASSES)
def test_each_error_has_its_own_docstring(name: str) -> None:
    assert inspect.getdoc(CLASSES[name]) != inspect.getdoc(CLASSES[name].__base__)  # type: ignore[arg-type]


EXAMPLES: list[Any] = [cls("what went wrong") for cls in TREE.values()] + [
    WorkerLostError("gone", "worker3"),
    WorkerUnresponsiveError("silent", "worker3"),
    RemoteError("there", "worker3", "mod.Type", "Traceback ..."),
    RemoteTraceback("worker3", "Traceback ..."),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_each_error_can_be_pickled_and_copied(error: Exception) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(other) is type(error)
        assert str(other) == str(error)
        assert vars(other) == vars(error)


def test_errors_can_be_caught_as_builtin_types() -> None:
    assert issubclass(RpcTimeoutError, TimeoutError)
    assert issubclass(RpcTimeoutError, RuntimeError)
    assert issubclass(WorkerLostError, ConnectionError)
    assert issubclass(WorkerLostError, RuntimeError)
    assert issubclass(OptionError, ValueError)
    assert issubclass(UnsendableError, TypeError)
    assert issubclass(ProtocolError, RuntimeError)
    assert not issubclass(WorkerLostError, TimeoutError)


def test_the_lost_worker_is_named() -> None:
    assert WorkerLostError("gone", "worker3").worker == "worker3"
    assert WorkerLostError("gone").worker == ""


def test_a_remote_error_keeps_worker_type_and_traceback() -> None:
    error = RemoteError("mod.Type on worker 'w': no", "w", "mod.Type", "Traceback ...")
    assert (error.worker, error.type_name, error.remote_traceback) == ("w", "mod.Type", "Traceback ...")
    assert RemoteError("x").worker == ""


def test_a_partial_error_names_the_workers_that_are_done() -> None:
    errors: dict[str, BaseException] = {
        "ps1": ValueError("no such shape"),
        "ps2": WorkerLostError("gone", "ps2"),
        "ps3": RpcTimeoutError("late"),
    }
    error = PartialError("the optimizer step", ["ps0", "trainer"], errors)
    assert str(error) == (
        "the optimizer step failed on 3 of 5 workers\n"
        "  worker 'ps1' failed: ValueError: no such shape\n"
        "  worker 'ps2' failed, but may have done its part: WorkerLostError: gone\n"
        "  worker 'ps3' failed, but may have done its part: RpcTimeoutError: late\n"
        "  done on 'ps0', 'trainer'"
    )
    assert (error.done, error.errors) == (("ps0", "trainer"), errors)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(PartialError("it", errors=errors)).endswith("done on no worker")


def test_a_remote_traceback_is_shown_as_the_cause() -> None:
    error = ValueError("no")
    error.__cause__ = RemoteTraceback("worker3", "Traceback (most recent call last): over there")
    text = "".join(traceback.format_exception(error))
    assert "Traceback on worker 'worker3':\nTraceback (most recent call last): over there" in text


# Stored exceptions.


class Odd(Exception):
    """Copying it fails: its __init__ takes other arguments than those in `args`."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
        self.first = first


class Changing(Exception):
    """An exception whose copy has another type."""

    def __reduce__(self) -> Any:
        return ValueError, ("changed",)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_kept_exception_has_the_text_of_its_traceback_and_not_the_frames() -> None:
    error = raised(ValueError("no"))
    found = kept(error, "worker1")
    assert found is not error
    assert type(found) is ValueError
    assert found.args == ("no",)
    assert found.__traceback__ is None
    assert isinstance(found.__cause__, RemoteTraceback)
    assert found.__cause__.worker == "worker1"
    assert "in raised" in found.__cause__.text
    assert "ValueError: no" in found.__cause__.text


def test_a_kept_exception_that_was_never_raised_keeps_its_cause() -> None:
    error = ValueError("no")
    error.__cause__ = KeyError("first")
    found = kept(error, "worker1")
    assert found.__cause__ is error.__cause__
    assert found.__suppress_context__


def test_a_fresh_exception_collects_its_own_frames() -> None:
    error = kept(raised(ValueError("no")), "worker1")
    for _ in range(2):
        found = raised(fresh(error))
        assert found is not error
        assert found.__cause__ is error.__cause__
    assert error.__traceback__ is None


@pytest.mark.parametrize("error", [Odd(1, 2), WorkerLostError("gone", "w"), KeyError("k")])
def test_exceptions_with_odd_constructors_can_be_kept(error: Exception) -> None:
    found = kept(raised(error), "worker1")
    assert type(found) is type(error)
    assert found.args == error.args
    assert vars(found) == vars(error)
    assert str(found) == str(error)


def test_an_exception_that_copies_into_another_type_stays_itself() -> None:
    error = Changing("x")
    assert fresh(error) is error


def test_the_frames_of_the_package_are_left_out() -> None:
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:
        fail()
    assert user_frames(caught.tb) is caught.tb
    options = RpcOptions()
    with pytest.raises(OptionError) as refusal:
        options.rpc_timeout = -1
    assert user_frames(refusal.tb) is refusal.tb  # it starts with the caller's own frame
    assert refusal.tb.tb_next is not None
    assert user_frames(refusal.tb.tb_next) is None
    assert user_frames(None) is None
