"""A folder without a project: the page reads a log, weighs bases, and writes graft.yaml."""

import json
import re
import urllib.parse

import pytest
from served_page import serve

from graftwork.api.project import open_project

BASE = "smollm2-135m-instruct"


@pytest.fixture
def folder(tmp_path, embedded_base):
    (tmp_path / "logs").mkdir()
    rows = [
        {"prompt": f"Which plant is number {number}?", "completion": f"Fern {number} by the pond."}
        for number in range(40)
    ]
    (tmp_path / "logs" / "plants.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def empty(folder):
    with serve(folder, allow_actions=True) as served:
        served.folder = folder
        yield served


def test_a_folder_without_a_project_leads_to_the_form_that_creates_one(empty):
    assert empty.visitor.get("/").headers["location"] == "/start"
    text = empty.visitor.get("/start").text
    assert "New project" in text
    assert 'name="log"' in text
    assert empty.visitor.get("/runs").status == 404


def test_a_log_is_read_bases_are_weighed_and_the_project_is_written(empty):
    text = empty.visitor.post("/start", log="logs/plants.jsonl").text
    assert "40 rows read" in text
    assert "bases on " in text
    assert f">{BASE}</option>" in text
    assert not (empty.folder / "graft.yaml").exists()
    chosen = urllib.parse.unquote_plus(
        empty.visitor.post("/start", log="logs/plants.jsonl", base=BASE).headers["location"]
    )
    assert chosen == "/?notice=graft.yaml was written"
    settings = open_project(empty.folder).settings
    assert settings.base == BASE
    assert settings.data.logs == ("logs/plants.jsonl",)
    assert "Nothing has run yet" in empty.visitor.get("/").text
    assert empty.visitor.get("/start").headers["location"] == "/"
    assert f"graft init {empty.folder}/logs/plants.jsonl --base {BASE}" in empty.visitor.get("/actions").text


def test_a_project_that_exists_is_not_written_again(empty):
    (empty.folder / "graft.yaml").write_text("project: p\nbase: small\n")
    answer = empty.visitor.post("/start", log="logs/plants.jsonl", base=BASE)
    assert answer.status == 404
    assert "there is a graft.yaml already" in answer.text.lower()
    assert (empty.folder / "graft.yaml").read_text() == "project: p\nbase: small\n"


@pytest.mark.parametrize("log", ["", "logs/none.jsonl", "graft\x00.jsonl"])
def test_a_log_that_cannot_be_read_is_named(empty, log):
    answer = empty.visitor.post("/start", log=log)
    assert answer.status == 404
    assert "What to do" in answer.text
    assert not (empty.folder / "graft.yaml").exists()


def test_no_other_page_and_no_page_that_only_shows_creates_a_project(empty, folder):
    fields = {"log": "logs/plants.jsonl", "base": BASE}
    assert empty.visitor.post("/start", origin="https://evil.example", **fields).status == 403
    with serve(folder) as served:
        assert served.visitor.post("/start", **fields).status == 409
        text = served.visitor.get("/start").text
    assert "graft init LOG" in re.sub(r"<[^>]+>", "", text)
    assert 'name="log"' not in text
    assert not (folder / "graft.yaml").exists()
