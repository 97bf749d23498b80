"""`graft data review`: the queue, its keys, and what decisions do."""

import json
import os
import pty
import subprocess
import sys

import pytest
import yaml
from typer.testing import CliRunner

from graftwork.cli.data import run_review
from graftwork.cli.main import app
from graftwork.data.review import (
    ReviewQueue,
    apply_reviews,
    list_corrections,
    list_items,
    list_judge_labels,
    write_review,
)
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.dataset import ReviewDecision, ReviewItem
from graftwork.records.interaction import Capture, Feedback, Message, Origin
from graftwork.store.captures import FeedbackStore, ReviewStore


def captured(number, *, question=None, reply=None, **more):
    return Capture(
        **{
            "id": f"{number:032x}",
            "at": "2026-11-10T12:00:00.000+00:00",
            "session": f"s{number}",
            "model": "champion",
            "release": "a" * 64,
            "request": {"messages": [{"role": "user", "content": question or f"Where is house {number}?"}]},
            "reply": reply or f"In street {number}.",
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "reply_tokens": 3,
            "first_token_ms": None,
            "total_ms": 5.0,
            **more,
        }
    )


@pytest.fixture
def work(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"prompt": "a question?", "completion": "an answer."}\n')
    settings = {"project": "p", "data": {"logs": ["log.jsonl"]}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


def rate(work, number, score, **more):
    store = FeedbackStore(work.database, project="p")
    assert store.add(Feedback(capture=f"{number:032x}", at=f"2026-11-1{number}", score=score, **more))


class Script:
    """A terminal that types what it was given, and remembers what it saw."""

    def __init__(self, keys, edits=()):
        self.keys, self.edits = list(keys), list(edits)
        self.shown, self.said = [], []

    def show(self, item, *, waiting):
        self.shown.append(item.key)

    def say(self, text):
        self.said.append(text)

    def read_key(self):
        return self.keys.pop(0) if self.keys else ""

    def edit(self, text):
        return self.edits.pop(0)


def test_the_queue_begins_with_what_helps_most(work):
    work.captures.add([captured(n) for n in range(4)])
    work.captures.add(
        [captured(4, question="Who owns it?", reply="Ada."), captured(5, question="Who owns it?")]
    )
    rate(work, 1, 0.1)
    rate(work, 2, 1.0)
    items = list_items(work)
    assert [sorted(item.reasons) for item in items] == [
        ["disagreement", "unrated"],
        ["disagreement", "unrated"],
        ["low_reward"],
        ["unrated"],
        ["unrated"],
    ]
    assert f"capture:{2:032x}" not in {item.key for item in items}


def test_a_conflict_comes_with_the_other_answers_to_the_same_or_nearly_the_same_prompt(work):
    replies = {4: ("Who owns it?", "Ada."), 5: ("Who owns it?", "Bob."), 6: ("who owns it", "Eve.")}
    work.captures.add([captured(n, question=asked, reply=reply) for n, (asked, reply) in replies.items()])
    work.captures.add([captured(7)])
    by_capture = {int(item.capture, 16): item.others for item in list_items(work)}
    assert {(answer.reply, answer.question) for answer in by_capture[4]} == {
        ("Bob.", ""),
        ("Eve.", "who owns it"),
    }
    assert by_capture[7] == ()


def test_no_row_is_shown_twice_over_sessions_and_reviewers(work):
    work.captures.add([captured(n) for n in range(6)])
    first = Script("asr")
    assert run_review(ReviewQueue(work, who="ada"), first, limit=3) == 3
    second = Script("aaaaaaa")
    assert run_review(ReviewQueue(work, who="bob"), second) == 3
    assert len(set(first.shown + second.shown)) == 6
    assert second.said == ["nothing is waiting for a review"]


def test_the_same_answer_to_the_same_prompt_is_shown_once_and_decided_for_all(work):
    same = {"question": "Who owns it?", "reply": "Ada."}
    work.captures.add([captured(n, **same) for n in range(3)])
    [item] = list_items(work)
    assert {item.capture, *item.alike} == {f"{n:032x}" for n in range(3)}
    queue = ReviewQueue(work, who="ada")
    run_review(queue, Script("r"))
    assert queue.apply()[0] == 3
    work.captures.add([captured(3, **same)])
    assert list_items(work) == []


def test_two_reviewers_at_once_cannot_decide_about_the_same_row(work):
    work.captures.add([captured(1)])
    ada, bob = ReviewQueue(work, who="ada"), ReviewQueue(work, who="bob")
    item = bob.next()
    assert ada.decide(item, "accept")
    assert not bob.decide(item, "reject")


def test_two_reviewers_cannot_decide_about_the_same_answer_under_two_names(work):
    """The same answer was captured again between the starts of their sessions."""
    same = {"question": "Who owns it?", "reply": "Ada."}
    work.captures.add([captured(1, **same)])
    ada = ReviewQueue(work, who="ada")
    work.captures.add([captured(2, **same)])
    bob = ReviewQueue(work, who="bob")
    theirs = bob.next()
    assert theirs.key != ada.next().key
    assert ada.decide(ada.next(), "accept")
    assert not bob.decide(theirs, "reject")
    assert bob.next() is None
    assert ada.undo() is not None
    assert bob.decide(theirs, "reject")


def test_a_decision_that_is_undone_while_decisions_are_applied_gives_no_feedback(work, monkeypatch):
    work.captures.add([captured(1)])
    queue = ReviewQueue(work, who="ada")
    queue.decide(queue.next(), "reject")
    standing = ReviewStore.standing

    def undo_after_reading(store):
        found = standing(store)
        assert queue.undo() is not None
        return found

    monkeypatch.setattr(ReviewStore, "standing", undo_after_reading)
    assert apply_reviews(work)[0] == 0
    assert FeedbackStore(work.database, project="p").count() == 0


def test_two_who_apply_at_once_give_feedback_once(work, monkeypatch):
    work.captures.add([captured(1)])
    queue = ReviewQueue(work, who="ada")
    queue.decide(queue.next(), "reject")
    standing, given = ReviewStore.standing, []

    def apply_after_reading(store):
        found = standing(store)
        monkeypatch.setattr(ReviewStore, "standing", standing)
        given.append(apply_reviews(work)[0])
        return found

    monkeypatch.setattr(ReviewStore, "standing", apply_after_reading)
    given.append(apply_reviews(work)[0])
    assert given == [1, 0]
    assert FeedbackStore(work.database, project="p").count() == 1


def test_undo_brings_the_rows_back_in_reverse_order(work):
    work.captures.add([captured(n) for n in range(3)])
    script = Script("aruuee", edits=["In no street.", "Nowhere."])
    assert run_review(ReviewQueue(work, who="ada"), script) == 2
    one, two, three, back, again, next_one = script.shown[:6]
    assert (back, again) == (two, one)
    assert next_one == two
    assert len({one, two, three}) == 3


def test_nothing_that_was_applied_is_undone(work):
    work.captures.add([captured(1)])
    queue = ReviewQueue(work, who="ada")
    queue.decide(queue.next(), "reject")
    queue.apply()
    assert queue.undo() is None


def test_decisions_about_captures_become_feedback_once(work):
    work.captures.add([captured(n) for n in range(4)])
    run_review(ReviewQueue(work, who="ada"), Script("ares", edits=["In Park Lane."]))
    assert apply_reviews(work)[0] == 3
    assert apply_reviews(work)[0] == 0
    rows = sorted(work.captures.export(), key=lambda capture: capture.id)
    assert [(row.feedback, row.correction, row.corrected_by) for row in rows] == [
        (1.0, "In street 0.", "ada"),
        (0.0, None, None),
        (0.0, "In Park Lane.", "ada"),
        (None, None, None),
    ]


def test_an_edit_that_changes_nothing_decides_nothing(work):
    work.captures.add([captured(1)])
    script = Script("eq", edits=["In street 1."])
    assert run_review(ReviewQueue(work, who="ada"), script) == 0
    assert "not changed" in script.said[0]


def test_an_edited_row_replaces_the_logged_one_and_a_rejected_one_removes_it(tmp_path):
    from graftwork.data.audit.row_checks import AuditContext
    from graftwork.data.corpus.build import build_corpus
    from graftwork.data.ingest.read import hash_line
    from graftwork.data.settings import DataSettings

    lines = [json.dumps({"prompt": f"question {n}?", "completion": f"answer {n}."}) for n in range(3)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    decisions = []
    for number, action in ((0, "edit"), (1, "reject"), (2, "accept")):
        item = ReviewItem(
            key=str(number),
            kind="row",
            # The dataset may have another system prompt than the log.
            messages=(
                Message(role="system", content="Be kind."),
                Message(role="user", content=f"question {number}?"),
            ),
            reply=f"answer {number}.",
            reasons={"wrong_label": "x"},
            origin=Origin(file="log.jsonl", line=number + 1),
            input_hash=hash_line(lines[number].encode()),
        )
        decisions.append(
            ReviewDecision(item=item, action=action, who="ada", at="2026-11-15", reply="Better.")
        )
    written = [line for decision in decisions if (line := write_review(decision))]
    (tmp_path / "reviewed.jsonl").write_bytes(b"".join(written))
    corpus = build_corpus(
        AuditContext(settings=DataSettings(logs=("log.jsonl", "reviewed.jsonl"))),
        folder=tmp_path / "features",
        root=tmp_path,
        on_progress=lambda *_: None,
    )
    passed = corpus.column("passed").astype(bool)
    kept = [row for place, row in corpus.rows_at(range(corpus.rows)) if passed[place]]
    assert [(row.reply, row.rejected) for row in kept] == [("answer 2.", None), ("Better.", "answer 0.")]
    assert kept[1].answered.name == "ada"
    assert not corpus.column("unconfirmed").any()


def test_corrections_that_differ_are_listed_as_conflicts(work):
    work.captures.add([captured(1), captured(2, question="Where is house 1?", reply="Here."), captured(3)])
    rate(work, 1, 0.0, correction="In Oak Road.", who="ada")
    rate(work, 2, 0.0, correction="in oak road", who="bob")
    rate(work, 3, 0.0, correction="Gone.", who="ada")
    assert list_corrections(work).conflicts == ()
    rate(work, 2, 0.0, correction="In Elm Road.", who="bob")
    found = list_corrections(work)
    assert len(found.corrections) == 3
    (conflict,) = found.conflicts
    assert conflict.question == "Where is house 1?"
    assert {(c.reviewer, c.corrected) for c in conflict.corrections} == {
        ("ada", "In Oak Road."),
        ("bob", "In Elm Road."),
    }
    assert "disagreement" in list_items(work)[0].reasons


def test_a_correction_labels_the_served_answer_bad_and_itself_good(work):
    work.captures.add([captured(1), captured(2), captured(3)])
    rate(work, 1, 0.0, correction="In Oak Road.", who="ada")
    rate(work, 2, 1.0, correction="In street 2.", who="ada")
    rate(work, 3, 0.75, who="bob")
    labels = [(label.answer, label.score, label.reviewer) for label in list_judge_labels(work)]
    assert labels == [
        ("In street 1.", 0.0, "ada"),
        ("In Oak Road.", 1.0, "ada"),
        ("In street 2.", 1.0, "ada"),
        ("In street 3.", 0.75, "bob"),
    ]


def invoke(work, *arguments, **more):
    done = CliRunner().invoke(app, ["data", *arguments, "-C", str(work.project.root)], **more)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_commands_print_the_queue_and_the_corrections(work, tmp_path):
    work.captures.add([captured(1), captured(2)])
    rate(work, 1, 0.0, correction="In Oak Road.", who="ada")
    assert json.loads(invoke(work, "review", "--json"))["waiting"] == 1
    labels = tmp_path / "labels.jsonl"
    assert (
        json.loads(invoke(work, "review", "--corrections", "--json", "--labels", str(labels)))["conflicts"]
        == []
    )
    assert len(labels.read_text().splitlines()) == 2
    assert "1 correction, 0 conflicts" in invoke(work, "review", "--corrections")
    assert "1 decided, 0 waiting; 1 became feedback" in invoke(work, "review", input="r\n")


@pytest.mark.skipif(sys.platform != "linux", reason="drives a pseudo-terminal")
def test_a_reviewer_at_a_terminal_edits_in_the_editor_and_quits(work, tmp_path):
    work.captures.add([captured(1), captured(2)])
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nprintf 'In Park Lane.' > \"$1\"\n")
    editor.chmod(0o700)
    main, side = pty.openpty()
    command = [sys.executable, "-m", "graftwork.cli.main", "data", "review", "--reviewer", "ada"]
    process = subprocess.Popen(
        [*command, "-C", str(work.project.root)],
        stdin=side,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "EDITOR": str(editor), "VISUAL": ""},
    )
    os.write(main, b"eq")
    output, _ = process.communicate(timeout=120)
    os.close(main)
    os.close(side)
    assert process.returncode == 0, output
    assert b"1 decided, 1 waiting" in output
    corrected = [capture.correction for capture in work.captures.export()]
    assert sorted(filter(None, corrected)) == ["In Park Lane."]
