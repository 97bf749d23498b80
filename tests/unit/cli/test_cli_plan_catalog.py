"""`graft plan catalog` shows what plans are made of, and marks what is old."""

import json
from datetime import date
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from graftwork.api.plans import CATALOG_PARTS, list_catalog
from graftwork.cli.main import app
from graftwork.records.errors import UserError
from graftwork.views.comparison import view_catalog
from graftwork.views.terminal import print_document


def test_one_document_holds_every_kind_with_source_and_age():
    done = CliRunner().invoke(app, ["plan", "catalog", "--json"])
    listed = json.loads(done.stdout)
    assert tuple(listed) == CATALOG_PARTS
    for rows in listed.values():
        assert rows
        assert all(row["source"] and row["age_days"] >= 0 for row in rows)
    assert all("stale" in row for row in listed["prices"])
    first = listed["models"][0]["parameters"]
    assert {"value", "low", "high", "unit"} <= set(first)


def test_only_what_was_asked_for_is_listed():
    assert list(list_catalog("gpus", overlay=None, today=date(2026, 11, 1))) == ["gpus"]
    with pytest.raises(UserError, match="no part"):
        list_catalog("moons", overlay=None, today=date(2026, 11, 1))


def test_old_prices_are_marked():
    listed = list_catalog("prices", overlay=None, today=date(2026, 8, 22))
    fresh = {row["dated"] for row in listed["prices"] if not row["stale"]}
    old = {row["dated"] for row in listed["prices"] if row["stale"]}
    assert "2026-08-22" in fresh
    assert "2024-04-22" in old
    console = Console(file=StringIO(), width=200)
    print_document(console, view_catalog(list_catalog(None, overlay=None, today=date(2026, 8, 22))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rows are old" in text
    assert "deepseek-coder-6.7b" in text
