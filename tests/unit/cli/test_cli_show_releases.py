"""Releases, the moves of an alias, runs and comparisons on a terminal of 80 columns."""

from io import StringIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from graftwork.pipeline.status import RunStatus
from graftwork.pipeline.steps.release import TryOut
from graftwork.records.release import ReleaseEntry, Tried
from graftwork.views.document import Document
from graftwork.views.release import view_entries, view_try_out
from graftwork.views.status import list_runs
from graftwork.views.terminal import fit_words, print_document, table

ID, OTHER = "477bdf94bf14" + "0" * 52, "49afc134d83a" + "0" * 52


def printed(view, *args, width=80, **named):
    return written(lambda console: print_document(console, view(*args, **named)), width=width)


def written(show, *, width=80):
    console = Console(width=width, file=StringIO())
    show(console)
    text = console.file.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    return text


def entry(**fields):
    known = {
        "id": ID,
        "model": "main",
        "version": "1.6.2",
        "base": "tiny",
        "decision": "not_enough_evidence",
        "run_id": "r",
        "dataset_hash": "d",
        "parent": None,
        "created_at": "2026-11-15T16:45:00+00:00",
        "aliases": ("challenger", "canary"),
        "tags": ("audited", "keep"),
    }
    return ReleaseEntry(**{**known, **fields})


def test_a_list_of_releases_breaks_no_word_on_80_columns():
    text = printed(view_entries, (entry(), entry(decision="deploy")))
    words = text.split()
    for word in ("not", "enough", "evidence", "challenger,", "canary", "audited,", "keep", "deploy"):
        assert word in words, word
    assert "_" not in text
    assert "2026-11-15 16:45" in text


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_console_that_is_too_narrow_is_not_overrun(width):
    assert ID[:6] in printed(view_entries, (entry(),), width=width)


def run_standing(**fields):
    known = {"id": "63accaf0a3ed", "state": "failed", "updated_at": "2026-11-15T04:25:09+00:00"}
    return RunStatus(**{**known, **fields})


def show_runs(*runs):
    return printed(lambda: Document(parts=[list_runs(runs)]))


def test_a_run_with_everything_to_say_breaks_no_time_on_80_columns():
    busy = run_standing(
        state="running",
        health="working",
        done=1200,
        total=98000,
        seconds_left=86000.0,
        expected_step_seconds=35.0,
        measured_step_seconds=9.3,
    )
    words = show_runs(busy, run_standing()).split()
    for word in ("63accaf0a3ed", "running", "working", "1200/98000", "2026-11-15", "04:25:09"):
        assert word in words, word


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.text("abcdefg ", max_size=30), min_size=4, max_size=4), min_size=1, max_size=4))
def test_words_are_cut_only_where_they_do_not_fit_side_by_side(rows):
    console = Console(width=60, file=StringIO())
    made = table("one", "two", "three", "four")
    for cells in rows:
        made.add_row(*cells)
    console.print(fit_words(console, made))
    text = console.file.getvalue()
    assert all(len(line) <= 60 for line in text.splitlines())
    columns = zip(*rows, strict=True)
    longest = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    if sum(max(width, 5) for width in longest) <= 60 - 11:
        assert {word for cells in rows for cell in cells for word in cell.split()} <= set(text.split())


def test_line_feeds_of_an_untrained_base_do_not_fill_the_terminal():
    tried = Tried(
        case_id="c",
        question="Where?",
        reference="Here.",
        base_answer="\n\n" * 200 + "end",
        release_answer="\n".join(f"line {number}" for number in range(200)),
        answered_by=ID,
        capture_id="k",
        captured_reply="",
        seconds=1.0,
    )
    text = printed(view_try_out, TryOut(tried=(tried,)))
    assert len(text.splitlines()) < 30
    assert "end" in text
    assert "line 11" in text
    assert "…" in text
    assert "line 12" not in text
