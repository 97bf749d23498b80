"""A prepared dataset on the terminal: what was left out and why, where it lies, what one does next."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from graftwork.files.dataset import read_manifest
from graftwork.records.dataset import Drop
from graftwork.records.interaction import Origin
from graftwork.views.dataset import count_reasons, view_prepared
from graftwork.views.terminal import print_document

sys.path.append(str(Path(__file__).parents[1] / "data"))
from dataset_samples import row, write_dataset

REASONS = (
    *("the same as log.jsonl:1", "the same as log.jsonl:2", "the same as a b.jsonl:77"),
    *("overlong: 1196 tokens, data.max_tokens is 1024", "overlong: 2,000 tokens, data.max_tokens is 1024"),
    *("nearly the same as log.jsonl:1", "nearly the same as log.jsonl:9"),
    *("other reply to the same prompt in log.jsonl:4", "other reply to the same prompt in log.jsonl:5"),
    *("schema: no known shape (keys: a); expected one of: x", "schema: no known shape (keys: a); expected y"),
    "truncated: ends at 512 tokens",
)


def drop(reason, line=1):
    return Drop(origin=Origin(file="log.jsonl", line=line), step="s", reason=reason)


def printed(folder, *, folders=None, portions=()):
    out = io.StringIO()
    prepared = SimpleNamespace(
        folder=str(folder), dataset=read_manifest(folder), folders=folders or {}, portions=portions
    )
    print_document(Console(file=out, width=80), view_prepared(prepared))
    return out.getvalue()


def test_reasons_that_differ_in_rows_and_figures_count_as_one():
    assert count_reasons(map(drop, REASONS)) == {
        "the same as another row": 3,
        "longer than data.max_tokens": 2,
        "nearly the same as another row": 2,
        "other reply to the same prompt in another row": 2,
        "schema: no known shape (keys: a)": 2,
        "truncated: ends at … tokens": 1,
    }


def test_the_most_frequent_reasons_are_reported_with_the_folder_and_what_to_do_next(tmp_path):
    folder = write_dataset(
        tmp_path, train=[row("a", "b")], drops=[drop(one, n + 1) for n, one in enumerate(REASONS)]
    )
    text = printed(folder)
    assert "left out: 12 rows" in text
    assert "3 × the same as another row" in text
    assert text.count(" × ") == 5
    assert str(folder) in text
    assert "graft data show" in text
    assert "graft data trace FILE:LINE" in text
    assert "question groups" in text


def test_a_dataset_without_dropped_rows_reports_none(tmp_path):
    assert "left out" not in printed(write_dataset(tmp_path, train=[row("a", "b")]))


def test_of_very_many_drops_only_the_first_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.views.dataset.MOST_DROPS", 4)
    folder = write_dataset(tmp_path, train=[row("a", "b")], drops=[drop("x: y", n) for n in range(1, 10)])
    text = printed(folder)
    assert "left out: 9 rows; most often, among the first 4" in text
    assert "4 × x: y" in text


@pytest.mark.parametrize("split_by", ["session", "customer.id"])
def test_groups_are_called_what_the_rows_were_split_by(tmp_path, split_by):
    text = printed(write_dataset(tmp_path, train=[row("a", "b")], settings={"split_by": split_by}))
    assert "question groups" not in text
    assert split_by in text


def test_a_reason_with_control_characters_is_shown_harmless(tmp_path):
    folder = write_dataset(tmp_path, train=[row("a", "b")], drops=[drop("bad \x1b[2J :smile: [red]")])
    assert "1 × bad ␛[…J :smile: [red]" in printed(folder)
