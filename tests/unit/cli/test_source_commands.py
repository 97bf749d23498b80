"""Commands in messages, pages and help of the source: each exists, with its options and arguments."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from shown_commands import ROOT, misuse_of

SOURCE = ROOT / "src" / "graftwork"
_QUOTED = re.compile(r"`(graft [^`]+)`")
_BEGINS = re.compile(r"\A(graft [^`;,(]+)")
_EXAMPLE = re.compile(r"^ *Example: +(graft .+)$", re.MULTILINE)
_IN_PAGE = re.compile(r'(?<=[`"])graft [^`"<{]+|(?<=<code>)graft [^<{]+')
_NAMES = {"graft gate VALUE", "graft train on one GPU"}
"""Of a test suite and of an engine: these are not run."""
_VALUE = "\0"
"""Where a message puts a value in."""


def texts_in(tree: ast.AST) -> Iterator[str]:
    """Every string; of one with values in it the whole, not its parts."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else _VALUE for part in child.values)
            yield "".join(str(part) for part in parts)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        elif isinstance(child, ast.List) and ast.unparse(child).startswith("['graft', "):
            yield " ".join(_word(part) for part in child.elts)
        else:
            yield from texts_in(child)


def _word(part: ast.expr) -> str:
    if isinstance(part, ast.Starred):
        return ""
    return str(part.value) if isinstance(part, ast.Constant) else _VALUE


def commands_in(path: Path) -> Iterator[str]:
    if path.suffix != ".py":
        yield from _IN_PAGE.findall(path.read_text())
        return
    for text in texts_in(ast.parse(path.read_text())):
        for pattern in (_QUOTED, _BEGINS, _EXAMPLE):
            yield from pattern.findall(text)


def test_every_command_that_the_source_shows_exists_with_its_options():
    pages = [
        path for kind in ("*.jinja", "*.js") for path in SOURCE.rglob(kind) if "vendor" not in path.parts
    ]
    shown = {
        (
            path.relative_to(SOURCE).as_posix(),
            re.sub(rf"(?<=\w){_VALUE}+", "", command).replace(_VALUE, "VALUE"),
        )
        for path in (*SOURCE.rglob("*.py"), *pages)
        for command in commands_in(path)
    }
    assert len(shown) > 300
    wrong = [
        f"{path}: {command}: {misuse}"
        for path, command in sorted(shown)
        if command not in _NAMES and (misuse := misuse_of(command))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "misuse"),
    [
        ("graft run --model X", "No such option: --model"),
        ("graft data nothing", "no command 'nothing'"),
        ("graft status now", "unexpected argument 'now'"),
        ("graft release ab --metric", ""),
        ("graft gate --junit gate.xml && echo x", ""),
        ("graft data …", ""),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command, misuse):
    assert misuse in (misuse_of(command) or "")
    assert bool(misuse_of(command)) == bool(misuse)
