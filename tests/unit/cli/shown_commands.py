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
from typing import Any, NamedTuple

import pytest
import typer

from graftwork.cli import output
from graftwork.cli.main import app, main

ROOT = Path(__file__).parents[3]
ANSWERS = ROOT / "docs" / "answers"
WIDTH = 118
LEFT_OUT = "…"
_UsageError: Any = typer.BadParameter.__base__
_BLOCK = re.compile(r"^```console\n\$ graft (.+)\n([\s\S]*?)^```$", re.MULTILINE)
_FENCED = re.compile(r"^```[\s\S]*?^```$", re.MULTILINE)


class Shown(NamedTuple):
    command: str
    lines: tuple[str, ...]


class Printed(NamedTuple):
    lines: tuple[str, ...]
    failed: bool


def misuse_of(line: str) -> str | None:
    """What is wrong with a shown command `graft …`; None if it parses.

    It may leave values out, and have a word in capitals for one.
    """
    command: Any = typer.main.get_command(app)
    shown = re.split(r" +(?:\||&&|;|>|--|#|·) ", f"{line} ")[0]
    words = shlex.split(re.sub(r"[…[\]]", "", shown))[1:]
    context = command.make_context("graft", [], resilient_parsing=True)
    while words and hasattr(command, "get_command") and not words[0].startswith("-"):
        subcommand = command.get_command(context, words[0])
        if subcommand is None:
            break
        command, words = subcommand, words[1:]
    if hasattr(command, "get_command") and words and not words[0].startswith("-"):
        if words[0].isupper():
            return None
        return f"no command {words[0]!r}"
    try:
        _, rest, _ = command.make_parser(command.context_class(command)).parse_args(list(words))
    except _UsageError as error:
        # The last option may leave its value out.
        return None if error.message == f"Option {words[-1]!r} requires an argument." else error.message
    return f"unexpected argument {rest[0]!r}" if rest else None


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
