"""docs/clusters-hosts.md as written: its commands, on hosts with a real sshd, print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ssh_hosts import Network, needed

import backhaul
from backhaul.launch.placement import parse_hostfile

PAGE = Path(__file__).parent.parent.parent / "docs" / "clusters-hosts.md"
LONG = 120.0


def on_hosts(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (pytest.mark.slow, *needed):
        test = mark(test)
    return test


class Example(NamedTuple):
    command: str
    shown: list[str]


def examples() -> list[Example]:
    """The commands of the page, each with the lines below it."""
    found: list[Example] = []
    for block in re.findall(r"(?:^    .*\n)+", PAGE.read_text(), flags=re.MULTILINE):
        lines = [line[4:] for line in block.splitlines()]
        if lines[0].startswith("$ "):
            found.append(Example(lines[0][2:], lines[1:]))
    return found


def script() -> str:
    (found,) = re.findall(r"^```python notest\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return str(found)


def is_shown(shown: list[str], printed: list[str]) -> None:
    """Check that each line of the page is printed; … matches anything, and a line with … alone matches any lines."""
    left = list(printed)
    for line in shown:
        if line.strip() == "…":
            continue
        pattern = re.compile(".*".join(re.escape(part) for part in line.split("…")))
        matching = [each for each in left if pattern.fullmatch(each)]
        assert matching, f"{line!r} is not in\n" + "\n".join(printed)
        left.remove(matching[0])
    if not any(line.strip() == "…" for line in shown):
        assert not [line for line in left if line.startswith("[worker")]


def test_the_page_has_every_option_of_several_hosts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "backhaul", "run", "--help"], capture_output=True, text=True, check=True, timeout=LONG
    )
    group = done.stdout.partition("several hosts, over ssh:")[2]
    options = re.findall(r"^  (--[a-z-]+)", group, flags=re.MULTILINE)
    assert "--hostfile" in options
    table = PAGE.read_text().partition("## Options")[2].partition("## Where")[0]
    for option in [*options, "--env", "--rejoin", "--dry-run"]:
        assert f"`{option} " in table or f"`{option}`" in table, f"the table lacks {option}"


def test_the_hostfile_of_the_page() -> None:
    text = PAGE.read_text().partition("    # cat hosts\n")[2].partition("\n\n")[0]
    assert [host.slots for host in parse_hostfile(text, "hosts")] == [2, 2, 4]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    source = str(Path(backhaul.__file__).parent.parent)
    network = Network(tmp_path_factory.mktemp("hosts"), PYTHONPATH=source)
    yield network
    network.close()


@on_hosts
@pytest.mark.parametrize("example", examples(), ids=lambda example: example.command)
def test_a_command_of_the_page(example: Example, network: Network, tmp_path: Path) -> None:
    """The environment, with a `backhaul` and an `ssh` that know the test's hosts, as ~/.ssh/config would."""
    for name, command in (
        ("backhaul", f"{sys.executable} -m backhaul"),
        ("ssh", network.ssh.replace("ssh", "/usr/bin/ssh", 1)),
    ):
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text(script())
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*network.before, "sh", "-c", example.command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    failed = any(line.startswith("backhaul: ") for line in example.shown)
    assert (done.returncode != 0) == failed, done.stderr
    is_shown(example.shown, (done.stderr if failed else done.stdout).splitlines())
    network.assert_empty()
