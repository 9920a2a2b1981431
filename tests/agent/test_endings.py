"""What a launcher tells its workers about processes that have ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from backhaul.agent.endings import Ending, Endings
from backhaul.news import promise, tell
from backhaul.transport.processes import name_of, own_name
from backhaul.transport.stream import RUNTIME_DIR_VARIABLE


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(tmp_path))
    return str(tmp_path)


def test_no_report_is_expected_unless_the_launcher_promised_one() -> None:
    endings = Endings()
    assert not endings.expected
    assert not endings.is_awaited("boot/ns/1/2")
    assert endings.wait("boot/ns/1/2") is None


@pytest.mark.parametrize("of_all_hosts", [False, True])
def test_the_launcher_s_report_of_an_end_is_read(directory: str, of_all_hosts: bool) -> None:
    promise(directory, of_all_hosts=of_all_hosts)
    endings = Endings()
    assert endings.expected
    assert endings.of_all_hosts is of_all_hosts
    tell(directory, "boot/ns/7/99", "was killed by SIGKILL (signal 9) on host b", replaced=True)
    found = Ending("boot/ns/7/99", "was killed by SIGKILL (signal 9) on host b", True)
    assert endings.read() == [found]
    assert endings.wait("boot/ns/7/99") == found
    assert endings.of("other-boot/ns/7/99") is None  # the same number on another machine
    endings.close()
    tell(directory, "boot/ns/8/99", "exited with code 0")  # nobody reads


def test_a_process_has_one_name_for_its_launcher_and_for_itself() -> None:
    assert own_name().split("/")[2].isdecimal()
    assert name_of(int(own_name().split("/")[2])) == own_name()
    assert name_of(2**22 + 1) == ""  # there is no such process
