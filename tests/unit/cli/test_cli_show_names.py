"""Tables and notebook views are found by the name of a record's class: each name must exist."""

import re
from importlib import import_module

import pytest
from shown_commands import ROOT

from graftwork.cli import show
from graftwork.views import notebook

DEFINED = {
    name
    for path in (ROOT / "src" / "graftwork").rglob("*.py")
    for name in re.findall(r"^class (\w+)\(Record\)", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize(("record", "printer"), show.PRINTERS.items())
def test_every_record_with_a_table_is_defined_and_so_is_its_printer(record, printer):
    module, function = printer.split(".")
    assert record in DEFINED
    assert callable(getattr(import_module(f"graftwork.cli.show.{module}"), function))


def test_every_record_with_a_notebook_view_is_defined():
    assert {*notebook.FIELDS, *notebook.COLUMNS} <= DEFINED
