"""Captures on the page: filtered, corrected, and written as a log or as held-out cases."""

import json
import urllib.parse

import pytest

from graftwork.api.endpoint import read_capture
from graftwork.api.project import open_project

RATED_BAD = [f"{number:08x}" * 4 for number in range(5)]


def notice_of(answer) -> str:
    return urllib.parse.unquote_plus(answer.headers["location"])


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("max_score=0.4&feedback=all", "5 exchanges"),
        ("checks=json_valid", "6 exchanges"),
        ("models=nobody", "0 exchanges"),
        ("text=MOSS+NUMBER+12", "1 exchange<"),
        ("text=" + RATED_BAD[0], "1 exchange<"),
        ("until=2001-01-01", "0 exchanges"),
        ("since=2001-01-01", "80 exchanges"),
        ("release=none", "0 exchanges"),
    ],
)
def test_captures_are_filtered_as_by_the_command(page, query, count):
    text = page.visitor.get(f"/captures?{query}").text
    assert f'<p class="soft">{count}' in text
    assert page.visitor.get(f"/captures?{query}&page=9").status == 200


def test_a_selection_says_why_a_capture_would_be_left_out_and_the_command(page):
    text = page.visitor.get("/captures?max_score=0.4").text
    assert "left out: users said that this reply is bad" in text
    assert "graft data captures --max-score 0.4 --out logs/captured.jsonl" in text
    assert 'action="/actions/write-captures"' not in text
    for query in ("since=yesterday", "min_score=2", "feedback=some"):
        assert page.visitor.get(f"/captures?{query}").status == 404


def test_a_selection_becomes_a_log(acting):
    fields = {"as": "log", "file": "logs/captured.jsonl", "text": "moss number 12"}
    answer = acting.visitor.post("/actions/write-captures", **fields)
    assert "wrote 1 capture to logs/captured.jsonl" in notice_of(answer)
    [line] = (acting.folder / "logs" / "captured.jsonl").read_text().splitlines()
    assert "moss number 12" in line
    assert acting.visitor.post("/actions/write-captures", **fields).status == 404


def test_a_corrected_answer_becomes_a_held_out_case(acting):
    capture = RATED_BAD[0]
    same = acting.visitor.post("/playground/rate", capture=capture, score="correct", reply="By the wall.")
    assert same.status == 404
    acting.visitor.post("/playground/rate", capture=capture, score="correct", reply="By the pond.", note="x")
    given = read_capture(open_project(acting.folder), capture)[1][-1]
    assert (given.correction, given.score, given.comment) == ("By the pond.", 0.0, "x")
    fields = {"as": "cases", "file": "cases.jsonl", "max_score": "0.4"}
    answer = acting.visitor.post("/actions/write-captures", **fields)
    assert "wrote 1 capture" in notice_of(answer)
    assert "left out 4" in notice_of(answer)
    [case] = (acting.folder / "cases.jsonl").read_text().splitlines()
    assert json.loads(case)["reference"] == "By the pond."


@pytest.mark.parametrize(
    "file",
    [
        *("../out.jsonl", "/tmp/out.jsonl", "graft.yaml", ".graft/x.jsonl", "", "logs/interactions.jsonl"),
        "\u200b.graft/x.jsonl",
    ],
)
def test_captures_are_only_written_to_new_files_of_the_project(acting, file):
    before = (acting.folder / "logs" / "interactions.jsonl").read_bytes()
    answer = acting.visitor.post("/actions/write-captures", **{"as": "log", "file": file})
    assert answer.status == 404
    assert (acting.folder / "logs" / "interactions.jsonl").read_bytes() == before


def test_captures_are_not_written_by_another_page_or_a_page_that_only_shows(acting, page):
    fields = {"as": "log", "file": "logs/captured.jsonl"}
    assert (
        acting.visitor.post("/actions/write-captures", origin="https://evil.example", **fields).status == 403
    )
    assert page.visitor.post("/actions/write-captures", **fields).status == 409
    assert not (acting.folder / "logs" / "captured.jsonl").exists()
