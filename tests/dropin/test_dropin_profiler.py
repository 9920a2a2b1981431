"""Torch's profilers under the drop-in, and calls that TorchScript cannot make there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dropin_runs import run

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place: Path = tmp_path_factory.mktemp("rendezvous") / "file"
    lines: dict[str, Any] = json.loads(run("-m", "backhaul.dropin", "profiler_program.py", str(place)).splitlines()[-1])
    return lines


def test_kineto_shows_what_calls_do_where_they_run(found: dict[str, Any]) -> None:
    names = found["profile"]["names"]
    for key, operator in (
        ("rpc_sync#aten::mul(worker0 -> worker0)", "aten::mul"),
        ("rpc_remote#__torch__.add_one(worker0 -> worker0)", "aten::add"),
    ):
        assert key in names
        assert f"{key}#remote_op: {operator}" in names
    assert "rpc_async#_rref_typeof_on_owner(worker0 -> worker0)" in names


def test_a_reference_that_no_profiler_saw_has_no_profiling_future(found: dict[str, Any]) -> None:
    problem = found["profile"]["no future"]
    assert problem["is_runtime_error"]
    assert "Profiling future has not been set: no profiler was on" in problem["text"]


@pytest.mark.parametrize(
    ("case", "function"),
    [
        ("a call inside", "call_inside"),
        ("for a reference", "call_inside"),
        ("below Python", "call_inside"),
        ("a function here", "call_inside"),
        ("a module here", "forward"),
    ],
)
def test_a_call_inside_torchscript_explains_why_it_is_impossible(
    case: str, function: str, found: dict[str, Any]
) -> None:
    problem = found[case]
    assert problem["is_runtime_error"]
    assert problem["text"].startswith("a call made inside TorchScript needs torch's own RPC agent")
    assert problem["text"].count("backhaul.dropin has replaced it") == 1
    assert function in problem["text"]
    assert problem["seconds"] < 5


@pytest.mark.parametrize("case", ["an RRef", "an RRef inside a list"])
def test_a_reference_cannot_go_into_torchscript(case: str, found: dict[str, Any]) -> None:
    problem = found[case]
    assert problem["is_runtime_error"]
    assert "takes_anything, a TorchScript function, cannot take <OwnerRRef" in problem["text"]
    assert "Give it the value" in problem["text"]


def test_a_reference_cannot_go_into_torchscript_here(found: dict[str, Any]) -> None:
    problem = found["an RRef here"]
    assert problem["is_runtime_error"]
    assert "takes_reference, a TorchScript function, cannot take <OwnerRRef" in problem["text"]


def test_scripted_functions_work_as_before(found: dict[str, Any]) -> None:
    assert found["scripted"] == [2.0, 2.0]
