"""Conversations on every page: calls as short lines, long instructions folded."""

import json

import pytest
from served_page import serve
from web_views import list_views

from graftwork.api.datasets import list_rows
from graftwork.api.project import open_project
from graftwork.records.dataset import Cluster, ReadableRow
from graftwork.records.interaction import Capture, Origin

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"order": "A1"}}\n</tool_call>'
SHOWN = "lookup(order=&#34;A1&#34;)"
TOOL = {"name": "lookup", "parameters": {"type": "object", "properties": {"order": {"type": "string"}}}}


@pytest.fixture
def called(shop):
    """A project with a capture and a case whose answers are calls."""
    project = open_project(shop)
    with project.open() as work:
        capture = work.captures.page(limit=1)[0]
        body = capture.model_dump() | {
            "id": "c" * 32,
            "request": {
                "messages": [
                    {"role": "system", "content": "Be brief. " * 60},
                    {"role": "user", "content": "Where is order A1?"},
                    {"role": "assistant", "content": CALL},
                    {"role": "tool", "content": "on its way"},
                    {"role": "user", "content": "And now?"},
                ],
                "tools": [{"type": "function", "function": TOOL}],
            },
            "reply": f"I look again.\n{CALL}",
        }
        work.captures.add([Capture.model_validate(body)])
    answers = shop / ".graft" / "evaluations" / "adapter" / "answers.jsonl"
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    changed = [{**line, "text": CALL} if line["case_id"] == "case-13" else line for line in lines]
    answers.write_text("".join(json.dumps(line) + "\n" for line in changed))
    with serve(shop) as served:
        yield served


@pytest.mark.parametrize(
    "path", ["/captures/" + "c" * 32, "/review?key=capture:" + "c" * 32, "/evaluation/cases/case-13"]
)
def test_calls_are_shown_as_calls(called, path):
    text = called.visitor.get(path).text
    assert SHOWN in text
    assert "&lt;tool_call&gt;" not in text.replace(f"{CALL}</textarea>", "")


def test_long_instructions_and_tools_of_a_capture_are_folded(called):
    text = called.visitor.get("/captures/" + "c" * 32).text
    assert "<details><summary>Be brief." in text
    assert "<summary>1 tool</summary>" in text
    assert "<code>lookup(order)</code>" in text
    assert "# Tools" not in text


def test_a_capture_whose_messages_are_of_no_known_form_is_shown_as_it_is(shop):
    with open_project(shop).open() as work:
        body = work.captures.page(limit=1)[0].model_dump() | {"id": "d" * 32, "request": {"messages": [7]}}
        work.captures.add([Capture.model_validate(body)])
    with serve(shop) as served:
        answer = served.visitor.get("/captures/" + "d" * 32)
    assert answer.status == 200
    assert "7" in answer.text


def test_rows_and_log_lines_are_shown_as_conversations(page, made_project):
    row = page.visitor.get(list_views(made_project)["row"]).text
    assert "<h3>reply (trained on)</h3>" in row
    traced = page.visitor.get("/data/trace?what=logs/interactions.jsonl:4").text
    assert "<h3>user</h3>" in traced
    assert "Where is the fern number 3 of garden" in traced


def test_a_conflict_is_reviewed_next_to_the_other_answers(shop):
    with open_project(shop).open() as work:
        first = work.captures.page(limit=1)[0]
        asked = {"messages": [{"role": "user", "content": "Where is the oak?"}]}
        for number, reply in enumerate(("By the gate.", CALL)):
            body = {"id": f"{number + 1}" * 32, "request": asked, "reply": reply}
            work.captures.add([Capture.model_validate(first.model_dump() | body)])
    with serve(shop) as served:
        text = served.visitor.get("/review?key=capture:" + "1" * 32).text
    assert "Other answers to the same prompt" in text
    assert 'href="/captures/' + "2" * 32 in text
    assert SHOWN in text


def test_a_row_that_contradicts_others_is_reviewed_next_to_them(shop):
    project = open_project(shop)
    row, other = list_rows(project).items[0], Origin(file="logs/interactions.jsonl", line=2)
    shown = tuple(
        ReadableRow(origin=origin, question="?", reply=reply)
        for origin, reply in ((row.origin, row.reply), (other, "Nowhere."))
    )
    cluster = Cluster(kind="conflicting_answers", size=2, rows=(row.origin, other), shown=shown)
    with project.open() as work:
        entry = work.ledger.get("audit")
        output = {**entry.output, "clusters": [cluster.model_dump(mode="json")]}
        work.ledger.put("audit", fingerprint="a", output=output, finished_at="x", seconds=1)
    [item] = [item for item in project.review_items() if item.origin == row.origin]
    assert [(answer.reply, answer.origin) for answer in item.others] == [("Nowhere.", other)]
