"""The page about the six managers shows what its commands print today."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from graftwork.cli import output
from graftwork.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "answers" / "federation.md"
BLOCKS = re.findall(r"^```console\n\$ graft (.+)\n([\s\S]*?)^```$", PAGE.read_text(), re.MULTILINE)
WIDTH = 118


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_every_line_that_is_shown_is_printed(monkeypatch, capsys, command, shown):
    monkeypatch.setattr(sys, "argv", ["graft", *shlex.split(command)])
    monkeypatch.setattr(output.stdout, "_width", WIDTH)
    with pytest.raises(SystemExit) as ended:
        main()
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    lines = [line for line in shown.splitlines() if line]
    assert [line for line in lines if line not in printed] == []
    assert bool(ended.value.code) is lines[0].startswith("✗")


def test_every_figure_of_the_text_stands_in_an_output():
    shown = " ".join(command + lines for command, lines in BLOCKS)
    text = re.sub(r"^```[\s\S]*?^```$", "", PAGE.read_text(), flags=re.MULTILINE)
    figures = re.findall(r"(\d+(?:\.\d+)?) (?:GiB|s|min)\b", text)
    assert len(figures) > 10
    assert [one for one in figures if not re.search(rf"(?<![\d.]){re.escape(one)}\b", shown)] == []


def test_the_page_has_its_commands():
    assert len(BLOCKS) > 8
