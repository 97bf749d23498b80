"""Views are found by the name of a record's class: each name must exist."""

import re
from importlib import import_module

import pytest
from shown_commands import ROOT

from graftwork.views import VIEWS

DEFINED = {
    name
    for path in (ROOT / "src" / "graftwork").rglob("*.py")
    for name in re.findall(r"^class (\w+)\(Record\)", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize(("record", "view"), VIEWS.items())
def test_every_record_with_a_view_is_defined_and_so_is_the_view(record, view):
    module, function = view.split(".")
    assert record in DEFINED
    assert callable(getattr(import_module(f"graftwork.views.{module}"), function))
