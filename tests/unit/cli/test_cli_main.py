"""The command line as a whole: help on terminals of any width, views by name, threads."""

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from graftwork.cli.main import make_app, reflow
from graftwork.views import VIEWS

SOURCE = Path(__file__).parents[3] / "src" / "graftwork"


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


def test_every_record_with_a_view_is_defined_and_so_is_the_view():
    sources = (path.read_text() for path in SOURCE.rglob("*.py"))
    records = {name for text in sources for name in re.findall(r"^class (\w+)\(Record\)", text, re.M)}
    assert set(VIEWS) <= records
    for view in VIEWS.values():
        module, function = view.split(".")
        assert callable(getattr(import_module(f"graftwork.views.{module}"), function)), view


SCRIPT = """
import os, sys
from graftwork.cli.main import main
sys.argv = ["graft", "--help"]
try:
    main()
except SystemExit:
    import numpy
    numpy.linalg.eigh(numpy.eye(300))
    print("threads:", len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_products_of_a_command_start_no_threads():
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "threads: 1"
