"""`graft data captures`: which exchanges are written, which are left out, and why that is said."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.data import capture_export as exporting
from graftwork.data.review import list_items
from graftwork.evaluate.cases import read_case_file
from graftwork.evaluate.live.drift import measure_drift
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.records.interaction import TRY_OUT_SESSION, Capture, Feedback
from graftwork.store.captures import FeedbackStore

sys.path.append(str(Path(__file__).parents[1] / "data"))
from dataset_samples import row, write_dataset

NAMES = {
    name: f"{number:032x}" for number, name in enumerate(("plain", "good", "bad", "fixed", "tried", "late"))
}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


def in_parts(text):
    """A turn as clients with attachments send it."""
    return {"role": "user", "content": [{"type": "text", "text": text}]}


def captured(name, **more):
    return Capture(
        **{
            "id": NAMES[name],
            "at": "2026-11-10T12:00:00.000+00:00",
            "session": "s1",
            "model": "champion",
            "release": "a" * 64,
            "request": {"messages": [{"role": "user", "content": f"What of the {name} one?"}]},
            "reply": "It is.",
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "reply_tokens": 3,
            "first_token_ms": None,
            "total_ms": 5.0,
            **more,
        }
    )


@pytest.fixture
def export(tmp_path):
    """Keep some captures, run the command with options; the names that it wrote, and what it said."""

    def run(*options, section=None, file="out.jsonl"):
        data = {"logs": ["x.jsonl"], "captures": section or {}}
        (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": "p", "data": data}))
        with use_project(open_project(tmp_path), NullReporter()) as work:
            work.captures.add(
                [
                    *(captured(name) for name in ("plain", "good", "bad", "fixed")),
                    captured("tried", session=TRY_OUT_SESSION),
                    captured("late", at="2026-11-14T12:00:00.000+00:00", release="b" * 64, session="s2"),
                ]
            )
            feedback_store = FeedbackStore(work.database, project="p")
            for name, score, correction in (
                ("good", 1.0, None),
                ("bad", 0.0, None),
                ("fixed", 0.0, "It is not."),
            ):
                feedback_store.add(
                    Feedback(capture=NAMES[name], at="2026-11-11", score=score, correction=correction)
                )
            feedback_store.add(Feedback(capture=NAMES["fixed"], at="2026-11-12", score=0.1))
        out = tmp_path / file
        done = CliRunner().invoke(
            app, ["data", "captures", "--out", str(out), "-C", str(tmp_path), "--json", *options]
        )
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        ids = {number: name for name, number in NAMES.items()}
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return {ids[row["id"]]: row for row in rows}, json.loads(done.stdout)

    return run


@pytest.mark.parametrize(
    ("options", "section", "written"),
    [
        ((), {}, {"plain", "good", "fixed", "late"}),
        (("--feedback", "positive"), {}, {"good", "fixed"}),
        ((), {"feedback": "positive"}, {"good", "fixed"}),
        (("--feedback", "negative"), {}, {"bad"}),
        (("--feedback", "all"), {}, {"plain", "good", "bad", "fixed", "late"}),
        (("--since", "2026-11-14"), {}, {"late"}),
        (("--until", "2026-11-14"), {}, {"plain", "good", "fixed"}),
        (("--release", "bbbbbbbb"), {}, {"late"}),
        (("--session", "s2"), {}, {"late"}),
        (("--text", "WHAT OF THE LATE"), {}, {"late"}),
        (("--text", "it is not", "--feedback", "all"), {}, {"fixed"}),
        (("--model", "champion", "--min-score", "0.9"), {}, {"good"}),
        (("--max-score", "0.1", "--feedback", "all"), {}, {"bad", "fixed"}),
        (("--model", "another"), {}, set()),
        (("--check", "valid_json"), {}, set()),
        ((), {"releases": ["aaaaaaaa"]}, {"plain", "good", "fixed"}),
    ],
)
def test_captures_are_chosen_by_feedback_release_time_and_session(export, options, section, written):
    rows, printed = export(*options, section=section)
    assert set(rows) == written
    assert printed["captures"] == len(written)
    selected = {"--text", "--model", "--max-score", "--check"} & set(options)
    assert selected or sum(printed["left_out"].values()) == len(NAMES) - len(written)


def test_corrections_become_cases_and_those_are_never_trained_on(export, tmp_path):
    _, printed = export("--as", "cases", "--feedback", "all", file="cases.jsonl")
    assert printed["captures"] == 1
    assert exporting.NOT_CORRECTED in printed["left_out"]
    [case] = read_case_file(tmp_path / "cases.jsonl")
    assert (case.id, case.reference) == (NAMES["fixed"], "It is not.")
    settings = {**yaml.safe_load((tmp_path / "graft.yaml").read_text()), "evaluate": {"cases": "cases.jsonl"}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        log = exporting.CaptureExport(work, work.settings.data.captures, feedback="all")
        assert NAMES["fixed"] not in {capture.id for capture in log}
        assert log.left_out[exporting.HELD_OUT] == 1


def test_without_a_file_the_newest_are_listed_with_what_speaks_against_them(export, tmp_path):
    export()
    listed = CliRunner().invoke(
        app, ["data", "captures", "-C", str(tmp_path), "--json", "--max-score", "0.2"]
    )
    found = json.loads(listed.stdout)
    assert found["count"] == 2
    assert {entry["id"]: bool(entry["left_out"]) for entry in found["captures"]} == {
        NAMES["bad"]: True,
        NAMES["fixed"]: False,
    }
    text = CliRunner().invoke(app, ["data", "captures", "-C", str(tmp_path)]).stdout
    assert "6 captures" in text


def test_each_row_says_the_latest_feedback_and_keeps_the_correction(export):
    rows, printed = export()
    assert (rows["fixed"]["feedback"], rows["fixed"]["correction"]) == (0.1, "It is not.")
    assert (rows["good"]["feedback"], rows["good"]["correction"]) == (1.0, None)
    assert "users said that this reply is bad" in printed["left_out"]


def test_held_out_questions_are_left_out_by_content(export, monkeypatch):
    monkeypatch.setattr(exporting, "_held_out_questions", lambda _work: {"what of the plain one"})
    rows, printed = export()
    assert "plain" not in rows
    assert printed["left_out"][exporting.HELD_OUT] == 1


def test_a_held_out_question_in_parts_is_left_out_too(monkeypatch, tmp_path):
    monkeypatch.setattr(exporting, "_held_out_questions", lambda _work: {"what of it"})
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": "p"}))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        work.captures.add([captured("plain", request={"messages": [in_parts("What of it?")]})])
        log = exporting.CaptureExport(work, work.settings.data.captures, feedback="all")
        assert list(log) == []
        assert log.left_out == {exporting.HELD_OUT: 1}


@pytest.mark.parametrize("step", ["prepare", "prepare@tagger"])
def test_the_held_out_questions_of_every_model_are_left_out(tmp_path, step):
    models = {"planner": {}, "tagger": {}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": "p", "models": models}))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        asked = {"planner": "Something else?", "tagger": "What of the plain one?"}
        folders = {
            name: str(write_dataset(tmp_path / name, test=[row(question)]))
            for name, question in asked.items()
        }
        output = {"folder": folders["planner"], "folders": folders}
        work.ledger.put(step, fingerprint="f", output=output, finished_at="2026-11-10", seconds=0.0)
        work.captures.add([captured("plain"), captured("good")])
        log = exporting.CaptureExport(work, work.settings.data.captures, feedback="all")
        assert [capture.id for capture in log] == [NAMES["good"]]


def test_what_another_version_noted_of_the_dataset_is_no_obstacle(tmp_path):
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": "p"}))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        noted = {"folder": str(tmp_path / "gone"), "folders": {}, "portions": [{"rows_an_epoch": 1.0}]}
        work.ledger.put("prepare", fingerprint="f", output=noted, finished_at="2026-11-10", seconds=0.0)
        work.captures.add([captured("plain")])
        log = exporting.CaptureExport(work, work.settings.data.captures, feedback="all")
        assert [capture.id for capture in log] == [NAMES["plain"]]
        assert measure_drift(work).why_not
        assert [item.capture for item in list_items(work)] == [NAMES["plain"]]


def test_every_written_case_can_be_asked(tmp_path):
    turns = {
        "plain": [in_parts("What of it?")],
        "good": [in_parts("And?"), {"role": "assistant", "content": "Yes,"}],
        "bad": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump({"project": "p"}))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        requests = {name: {"messages": messages, "tools": [TOOL]} for name, messages in turns.items()}
        work.captures.add([captured(name, request=request) for name, request in requests.items()])
        for name in turns:
            feedback = Feedback(capture=NAMES[name], at="2026-11-11", score=0.0, correction="It is not.")
            FeedbackStore(work.database, project="p").add(feedback)
        exported = exporting.export_captures(
            work,
            tmp_path / "cases.jsonl",
            work.settings.data.captures,
            feedback="all",
            query=exporting.CaptureQuery(),
            output_format="cases",
        )
    [case] = read_case_file(tmp_path / "cases.jsonl")
    assert case.id == NAMES["plain"]
    assert [turn.role for turn in case.messages] == ["system", "user"]
    assert '"lookup"' in case.messages[0].content
    assert case.messages[1].content == "What of it?"
    assert exported.left_out == {exporting.NO_QUESTION: 2}


def test_a_text_is_looked_for_in_what_was_said_alone():
    capture = captured("plain", request={"messages": [{"role": "user", "content": 'Say "hi"\nto C:\\x'}]})
    found = {
        text: exporting.CaptureQuery(text=text).selects(capture)
        for text in ('say "hi"', 'hi"\nto', "C:\\x", "role", "content")
    }
    assert [text for text, selected in found.items() if not selected] == ["role", "content"]


def test_a_time_that_is_none_is_named_by_its_option(export):
    with pytest.raises(UserError, match="--since"):
        export("--since", "yesterday")
