"""The fleet on the terminal."""

import io

from rich.console import Console

from graftwork.records.fleet import Reconciled
from graftwork.views.terminal import show


def test_machines_that_are_not_in_the_ledger_are_shown():
    out = io.StringIO()
    show(Console(file=out, width=100), Reconciled(unknown=("graft-0-1: not in this ledger",)))
    assert "unknown   graft-0-1: not in this ledger" in out.getvalue()
