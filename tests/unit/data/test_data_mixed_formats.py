"""Logs of several formats in one project: captures come back, and no row is lost without a word."""

import pytest
from data_rows import THINGS, chat, write_log
from rich.console import Console
from test_data_captures import capture
from test_data_prepare import all_rows, preparation, run

from graftwork.data.ingest.read import read_file
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction
from graftwork.views.dataset import list_unread, view_unread
from graftwork.views.terminal import print_document

ASKS = ("What does the {} cost?", "Who made our {} in 1950?", "Where can one borrow any {} on Sundays?")
LOGGED = [
    chat(ask.format(thing), f"Number {n} answer on the {thing}.")
    for n, ask in enumerate(ASKS)
    for thing in THINGS
]
OWN = [
    {"request": {"text": row["messages"][0]["content"]}, "said": row["messages"][1]["content"]}
    for row in LOGGED
]
CAPTURED = [
    capture(f"How is the {thing} tuned?", f"Like any {thing}.", number=n) for n, thing in enumerate(THINGS)
]
MAPPING = {"question": "request.text", "reply": "said"}
LOGS = ("log.jsonl", "new.jsonl")


@pytest.mark.parametrize(("logged", "form"), [(LOGGED, {"format": "chat"}), (OWN, {"mapping": MAPPING})])
def test_captures_are_read_whatever_form_the_other_rows_have(tmp_path, logged, form):
    write_log(tmp_path / "new.jsonl", CAPTURED)
    dataset, folder = run(tmp_path, logged, logs=LOGS, **form)
    assert len(all_rows(folder)) == len(logged) + len(CAPTURED)
    assert dataset.dropped.get("read", 0) == 0
    assert list_unread(folder) == ()


def test_each_log_file_may_have_a_format_or_a_mapping_of_its_own(tmp_path):
    write_log(tmp_path / "other.jsonl", OWN[:20])
    logs = ("log.jsonl", "other.jsonl")
    dataset, folder = run(tmp_path, LOGGED[20:], logs=logs, formats={"oth*.jsonl": MAPPING})
    assert len(all_rows(folder)) == len(LOGGED)
    assert list(dataset.settings["formats"]) == ["oth*.jsonl"]


def test_the_same_rows_under_another_name_are_read_by_the_format_of_that_name(tmp_path):
    write_log(tmp_path / "first.jsonl", OWN)
    formats = {"second.jsonl": MAPPING}
    _, folder = run(tmp_path, LOGGED, logs=("log.jsonl", "first.jsonl"), formats=formats)
    assert [drop.origin.file for drop, _ in list_unread(folder)] == ["first.jsonl"]
    (tmp_path / "first.jsonl").rename(tmp_path / "second.jsonl")
    _, folder = run(tmp_path, logs=("log.jsonl", "second.jsonl"), formats=formats)
    assert list_unread(folder) == ()


def test_a_pattern_of_formats_that_no_log_matches_is_a_warning(tmp_path):
    write_log(tmp_path / "log.jsonl", LOGGED)
    [warning] = [text for text in prepare_warnings(tmp_path, {"lgo.jsonl": "chat"}) if "data.formats" in text]
    assert "lgo.jsonl" in warning
    assert not any("data.formats" in text for text in prepare_warnings(tmp_path, {"./log.jsonl": "chat"}))


def prepare_warnings(folder, formats):
    return preparation(folder, formats=formats).warnings


def test_rows_that_could_not_be_read_are_named_by_file_and_first_line(tmp_path):
    write_log(tmp_path / "new.jsonl", [LOGGED[0], *OWN[:7]])
    dataset, folder = run(tmp_path, LOGGED[1:], logs=LOGS)
    console = Console(record=True, width=200)
    print_document(console, view_unread(folder, dataset))
    text = console.export_text()
    assert "7 rows of the logs are not learned from" in text
    assert "new.jsonl: 7, line 2: no known shape" in text
    [(first, rows)] = list_unread(folder)
    assert (first.origin.file, rows, first.origin.line) == ("new.jsonl", 7, 2)
    assert "no known shape" in first.reason


def test_an_own_format_with_request_and_reply_is_no_capture(tmp_path):
    row = {"request": {"messages": LOGGED[0]["messages"][:1]}, "reply": "Ten.", "text": "Twelve."}
    mapping = {"messages": "request.messages", "reply": "text"}
    write_log(tmp_path / "log.jsonl", [row])
    [read] = read_file("log.jsonl", root=tmp_path, settings=DataSettings(mapping=mapping))
    assert isinstance(read, Interaction)
    assert read.reply == "Twelve."
