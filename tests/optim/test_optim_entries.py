"""Entries of parameter groups: what counts as a change, and that copies are independent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backhaul.optim import entries
from backhaul.optim.entries import apply, change, copied, entries_of, same


class NoTruth:
    def __eq__(self, other: object) -> Any:
        raise ValueError("it cannot be told")

    __hash__ = None  # type: ignore[assignment]


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.1),
        (None, None),
        ((0.9, 0.999), (0.9, 0.999)),
        ([1, {"a": torch.ones(2)}], [1, {"a": torch.ones(2)}]),
        (torch.tensor(0.1), torch.tensor(0.1)),
        (NAN, NAN),
    ],
)
def test_equal_entries_are_the_same(one: Any, other: Any) -> None:
    assert same(one, other)
    assert same(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.1, 0.2),
        (1, True),
        (1, 1.0),
        (None, False),
        ((0.9, 0.999), [0.9, 0.999]),
        ((0.9, 0.999), (0.9, 0.9)),
        ((0.9,), (0.9, 0.9)),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        (torch.tensor(0.1), torch.tensor(0.2)),
        (torch.tensor(0.1), torch.tensor(0.1, dtype=torch.float64)),
        (torch.tensor(0.1), torch.tensor([0.1])),
        (torch.tensor(0.1), 0.1),
        (NoTruth(), NoTruth()),
    ],
)
def test_different_entries_are_not_the_same(one: Any, other: Any) -> None:
    assert not same(one, other)
    assert not same(other, one)


def test_a_change_and_its_application() -> None:
    known = {"lr": 0.1, "betas": (0.9, 0.99), "old": 1}
    group = {"params": [1], "param_names": ["a"], "lr": 0.2, "betas": (0.9, 0.99), "initial_lr": 0.1}
    found = change(known, group)
    assert found == ({"lr": 0.2, "initial_lr": 0.1}, ["old"])
    apply(found, known)
    assert known == {"lr": 0.2, "betas": (0.9, 0.99), "initial_lr": 0.1} == entries_of(group)
    assert change(known, group) is None
    apply(found, known)  # applying it again is not an error
    assert change(known, group) is None


@pytest.mark.parametrize(
    ("known", "group", "found"),
    [
        ({"a": None}, {"params": [], "a": None}, None),
        ({"a": None}, {"params": [], "b": None}, ({"b": None}, ["a"])),
        ({"a": None}, {"params": []}, ({}, ["a"])),
        ({"a": None}, {"params": [], "param_names": [], "a": None}, None),
        ({"a": None}, {"params": [], "param_names": [], "a": None, "b": None}, ({"b": None}, [])),
        ({"a": None, "b": None}, {"params": [], "param_names": [], "a": None}, ({}, ["b"])),
        ({}, {"params": []}, None),
    ],
)
def test_entries_that_are_absent_are_not_entries_that_are_none(known: Any, group: Any, found: Any) -> None:
    assert change(known, group) == found


def test_values_that_are_the_same_objects_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    group = {"params": [1], "lr": 0.1, "betas": (0.9, 0.99), "foreach": None}
    known = entries_of(group)
    monkeypatch.setattr(entries, "same", None)
    assert change(known, group) is None
    with pytest.raises(TypeError):
        change(known, {**group, "lr": 0.2})


def test_a_tensor_that_is_changed_in_place_is_a_change() -> None:
    group: dict[str, Any] = {"lr": torch.tensor(0.1)}
    known = entries_of(group)
    group["lr"].fill_(0.2)
    found = change(known, group)
    assert found is not None
    group["lr"].fill_(0.3)
    apply(found, known)
    assert known["lr"] == torch.tensor(0.2)
    found[0]["lr"].fill_(0.4)
    assert known["lr"] == torch.tensor(0.2)


def test_copies_share_nothing() -> None:
    inner = torch.ones(2)
    value = {"a": [inner, (inner,)], "b": "text", "c": torch.ones(1, requires_grad=True)}
    copy = copied(value)
    inner.zero_()
    value["a"].append(1)  # type: ignore[attr-defined]
    assert copy["a"][0].tolist() == copy["a"][1][0].tolist() == [1, 1]
    assert len(copy["a"]) == 2
    assert copy["c"].requires_grad
    assert copy["c"].is_leaf
