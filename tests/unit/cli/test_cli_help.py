"""Help texts on terminals of any width."""

import inspect

import pytest
import typer

from graftwork.cli.main import make_app, reflow


def walk(app: typer.Typer, path: str = "graft"):
    for command in app.registered_commands:
        yield f"{path} {command.name or command.callback.__name__}", command.help
    for group in app.registered_groups:
        yield from walk(group.typer_instance, f"{path} {group.name}")


def test_no_help_text_keeps_the_line_breaks_of_its_source():
    for name, text in walk(make_app()):
        for paragraph in (text or "").split("\n\n"):
            _, *later = paragraph.splitlines()
            assert all(line.startswith(("Example:", "Exit code")) for line in later), name


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("One\ntwo.\n\nThree\nfour.", "One two.\n\nThree four."),
        ("Does it.\nExit code 1: no.\nExample:  a\nExample:  b", None),
        ("", ""),
    ],
)
def test_a_paragraph_is_one_line_and_examples_have_their_own(source, shown):
    assert reflow(source) == (source if shown is None else shown)
    assert reflow(inspect.cleandoc(reflow(source))) == reflow(source)
