"""`graft data captures forget`: what is deleted, what is only counted, and which copies are found."""

import json

import pytest
import yaml
from typer.testing import CliRunner

from graftwork.cli.main import app
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.interaction import Feedback
from graftwork.serve.captures import ServedExchange, make_capture
from graftwork.serve.project import prune_captures
from graftwork.serve.settings import ServeSettings
from graftwork.store.captures import FeedbackStore

SECRET_TEXT = "the unmistakable words of ada"


def captured(number, *, session=None, user=None, text="hello"):
    request = {"messages": [{"role": "user", "content": text}], **({"user": user} if user else {})}
    exchange = ServedExchange(
        id=f"{number:032x}",
        at=1e9,
        session=session or user,
        model="champion",
        release="r",
        request=request,
        reply="yes",
        finish_reason="stop",
        prompt_tokens=1,
        reply_tokens=1,
        first_token_ms=None,
        total_ms=1.0,
        user=user,
    )
    return make_capture(exchange)


@pytest.fixture
def work(tmp_path):
    settings = {"project": "p", "data": {"logs": ["logs/*.jsonl"]}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        opened.captures.add(
            [
                captured(1, session="chat-17", text=SECRET_TEXT),
                captured(2, session="chat-1"),
                captured(3, user="ada@example.org"),
                captured(4, session="chat-2", user="ada@example.org"),
                captured(5, session="chat-3", user="bob", text="is chat-17 over?"),
            ]
        )
        feedback = FeedbackStore(opened.database, project="p")
        feedback.add(Feedback(capture=f"{1:032x}", at="2026-01-01", score=1.0))
        feedback.add(Feedback(capture=f"{5:032x}", at="2026-01-01", score=0.0, who="ada", comment="bad"))
        yield opened


def forget(work, *options):
    done = CliRunner().invoke(
        app, ["data", "captures", "forget", *options, "-C", str(work.project.root), "--json"]
    )
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)


def left(work):
    return [int(capture.id, 16) for capture in work.captures.export()]


def test_nothing_is_deleted_without_yes(work):
    found = forget(work, "--session", "chat-17")
    assert (found["deleted"], found["captures"], found["feedback"]) == (False, 1, 1)
    assert left(work) == [1, 2, 3, 4, 5]


def test_a_session_is_deleted_to_the_last_byte(work):
    found = forget(work, "--session", "chat-17", "--yes")
    assert (found["deleted"], found["captures"], found["feedback"]) == (True, 1, 1)
    assert left(work) == [2, 3, 4, 5]
    for file in work.project.state.rglob("state.db*"):
        assert SECRET_TEXT.encode() not in file.read_bytes()
    assert forget(work, "--session", "chat-17", "--yes")["captures"] == 0


def test_a_user_is_found_by_a_name_that_was_redacted(work):
    assert "ada@example.org" not in "".join(c.to_journal() for c in work.captures.export())
    assert forget(work, "--user", "ada@example.org", "--yes")["captures"] == 2
    assert left(work) == [1, 2, 5]


def test_feedback_that_a_user_gave_on_other_captures_is_deleted_too(work):
    found = forget(work, "--user", "ada", "--yes")
    assert (found["captures"], found["feedback"]) == (0, 1)
    assert FeedbackStore(work.database, project="p").count() == 1
    assert left(work) == [1, 2, 3, 4, 5]


def test_log_files_with_copies_are_named_and_not_changed(work):
    logs = work.project.root / "logs"
    logs.mkdir()
    lines = "".join(capture.to_line() + "\n" for capture in work.captures.export())
    (logs / "captured.jsonl").write_text(lines)
    (logs / "other.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    found = forget(work, "--session", "chat-17", "--yes")
    assert [(file["file"].rpartition("/")[2], file["lines"]) for file in found["files"]] == [
        ("captured.jsonl", 1)
    ]
    assert (logs / "captured.jsonl").read_text() == lines


def test_datasets_that_cannot_be_searched_for_copies_are_named(work):
    damaged = work.project.datasets / "d1"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text('{"a_key": "of another version"}')
    found = forget(work, "--session", "chat-17")
    assert (found["datasets"], found["unread"]) == ([], [str(damaged)])


def test_session_or_user_must_be_named(work):
    for options in ((), ("--session", "a", "--user", "b"), ("--session", "")):
        done = CliRunner().invoke(app, ["data", "captures", "forget", *options, "-C", str(work.project.root)])
        assert done.exit_code == 2


def test_the_settings_say_how_long_captures_are_kept(work):
    assert prune_captures(work, ServeSettings()) is None
    prune_captures(work, ServeSettings(capture_keep_days=10_000))()
    assert left(work) == [1, 2, 3, 4, 5]
    prune_captures(work, ServeSettings(capture_keep_days=30))()
    assert left(work) == []
