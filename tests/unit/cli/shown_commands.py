"""Pages that show commands with their output: what stands in them, and what is printed today.

A block of `console` begins with the command and is run again; what stands in any other block is not.
"""

import io
import re
import shlex
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from graftwork.cli import output
from graftwork.cli.main import main

ROOT = Path(__file__).parents[3]
ANSWERS = ROOT / "docs" / "answers"
WIDTH = 118
LEFT_OUT = "…"
_BLOCK = re.compile(r"^```console\n\$ graft (.+)\n([\s\S]*?)^```$", re.MULTILINE)
_FENCED = re.compile(r"^```[\s\S]*?^```$", re.MULTILINE)


class Shown(NamedTuple):
    command: str
    lines: tuple[str, ...]


class Printed(NamedTuple):
    lines: tuple[str, ...]
    failed: bool


def shown_in(page: Path) -> list[Shown]:
    found = _BLOCK.findall(page.read_text())
    return [Shown(command, tuple(line for line in text.splitlines() if line)) for command, text in found]


@cache
def printed_by(command: str) -> Printed:
    """What `graft COMMAND` prints, at the width of the pages; each is run once."""
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(io.StringIO()) as captured:
        patched.chdir(ROOT)
        patched.setattr(sys, "argv", ["graft", *shlex.split(command)])
        patched.setattr(output.stdout, "_width", WIDTH)
        with pytest.raises(SystemExit) as ended:
            main()
    lines = (line.rstrip() for line in captured.getvalue().splitlines())
    return Printed(tuple(line for line in lines if line), bool(ended.value.code))


def astray(shown: Shown, printed: Printed) -> list[str]:
    """Lines that are not printed, or not where the page has them: what is left out is marked as such."""
    at, marked, wrong = 0, False, []
    for line in shown.lines:
        if line == LEFT_OUT:
            marked = True
            continue
        here = next((place for place in range(at, len(printed.lines)) if printed.lines[place] == line), None)
        if here is None or (here > at and not marked):
            wrong.append(line)
        at, marked = at if here is None else here + 1, False
    if at < len(printed.lines) and not marked:
        wrong.append("(the rest)")
    return wrong


def unshown_figures(page: Path, *, units: str, others: tuple[Path, ...] = ()) -> list[str]:
    """Figures of the text with one of these units that no block of the page, nor a page next to it, has."""
    content = page.read_text()
    known = " ".join([*_FENCED.findall(content), *(path.read_text() for path in others)])
    figures = re.findall(rf"(?<![\d.,])(\d[\d,]*(?:\.\d+)?) (?:{units})(?!\w)", _FENCED.sub("", content))
    assert len(figures) > 10
    return [figure for figure in figures if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?!\.?\d)", known)]
