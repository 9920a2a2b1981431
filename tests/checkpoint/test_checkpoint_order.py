"""The order in which a save puts its files on the disk. Power may fail between any two steps."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backhaul.checkpoint import files
from backhaul.checkpoint.files import INDEX
from backhaul.checkpoint.index import Index


def index_of(data: str) -> Index:
    return Index(data=data, common="common.pt", files={"common.pt": 1}, objects={})


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The system calls of a save in order: what was synced, replaced and removed, by its name in ``tmp_path``."""
    found: list[str] = []

    def name_of(path: str) -> str:
        name = str(Path(path).relative_to(tmp_path))
        return "next index" if name.startswith(f"{INDEX}.") else "data" if name.startswith("data-") else name

    def note(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(subject: Any, *rest: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{subject}") if isinstance(subject, int) else subject
            found.append(f"{what} {name_of(path)}")
            return function(subject, *rest)

        return run

    monkeypatch.setattr(os, "fsync", note("sync", os.fsync))
    monkeypatch.setattr(os, "replace", note("replace", os.replace))
    monkeypatch.setattr(shutil, "rmtree", note("remove", shutil.rmtree))
    return found


def test_an_index_names_only_files_on_the_disk(tmp_path: Path, steps: list[str]) -> None:
    files.commit(str(tmp_path), index_of(files.new_data(str(tmp_path))))
    assert steps == ["sync data", "sync next index", "sync .", "replace next index", "sync ."]


def test_old_data_goes_when_the_new_index_is_on_the_disk(tmp_path: Path, steps: list[str]) -> None:
    old = files.new_data(str(tmp_path))
    new = files.new_data(str(tmp_path))
    files.commit(str(tmp_path), index_of(new))
    steps.clear()
    files.clean(str(tmp_path))
    assert steps == ["sync .", "remove data"]
    assert (tmp_path / new).exists()
    assert not (tmp_path / old).exists()
