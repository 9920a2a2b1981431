"""docs/launching.md has every option of `backhaul run` on one machine."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from backhaul.launch.command import add_parser

PAGE = Path(__file__).parents[2] / "docs" / "launching.md"


def test_the_page_has_every_option_of_one_machine(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), "0.9")
    with pytest.raises(SystemExit):
        parser.parse_args(["run", "--help"])
    shown = capsys.readouterr().out.partition("\noptions:\n")[2].partition("\nseveral hosts, over ssh:\n")[0]
    options = {name for line in re.findall("^  (-.*)", shown, re.MULTILINE) for name in re.findall("(--[a-z-]+)", line)}
    assert {"--nproc", "--max-restarts", "--dry-run"} < options
    page = PAGE.read_text().partition("## backhaul run")[2].partition("### The environment")[0]
    synopsis, _, table = page.partition("| option | meaning |")
    described = set(re.findall("`(--[a-z-]+)", table.partition("\n\n")[0]))
    assert described == options - {"--help", "--no-colour"}
    assert set(re.findall(r"\[(--[a-z-]+)", synopsis)) == options - {"--help", "--no-colour", "--nproc", "--module"}
