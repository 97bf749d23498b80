"""Talking to a model that the gate did not pass: answers, feedback, and what must not be trained on."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from registry_samples import parts, publish_parts, write_adapter
from typer.testing import CliRunner

from free_ports import free_port
from graftwork.api.endpoint import CAPTURE_HEADER, ask_any, rate_answer
from graftwork.api.project import open_project
from graftwork.cli.main import app
from graftwork.data.capture_export import HELD_OUT, CaptureExport
from graftwork.data.settings import CaptureSettings
from graftwork.evaluate.ask.answers import read_answers
from graftwork.evaluate.chat import (
    ChatAddress,
    ChatSubject,
    chat_settings,
    find_chat_subject,
    is_loaded,
    list_chat_subjects,
    open_chat,
    read_example,
)
from graftwork.project.open_project import timestamp
from graftwork.records.errors import EnvironmentFailure, NegativeResult, UserError
from graftwork.records.interaction import Message
from graftwork.registry.project import open_store
from graftwork.serve.settings import ServeSettings
from graftwork.store.captures import FeedbackStore
from graftwork.text.tool_calls import ToolCall, write_call, write_tools
from graftwork.views.turns import show_turn

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {"type": "object", "properties": {"order": {"type": "string"}, "days": {}}},
    },
}


@pytest.fixture
def trained_project(small_project):
    project = open_project(small_project)
    project.train()
    return project


@pytest.fixture
def refused_project(trained_project, change_settings):
    """Its gate says no."""
    gate = {"rules": [{"metric": "latency_seconds", "under": 1e-9}], "primary": "none"}
    change_settings(trained_project.root, gate=gate)
    project = open_project(trained_project.root)
    with pytest.raises(NegativeResult, match="nothing was released"):
        project.release()
    return project


def graft(project, *words, lines=""):
    done = CliRunner().invoke(app, ["chat", *words, "--project", str(project.root)], input=lines)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def user(text):
    return Message(role="user", content=text)


def test_a_run_answers_before_any_release_and_is_rated(refused_project):
    project = refused_project
    with project.open() as work:
        assert work.releases.list() == ()
        newest = find_chat_subject(work, None)
        run_id = work.runs.list()[0].id
        assert newest.name == f"run:{run_id}"
        assert find_chat_subject(work, run_id[:8]) == newest
        assert find_chat_subject(work, "adapter") == newest
        case, pieces = read_example(work, 1), []
        with open_chat(work, newest) as chat:
            first = chat.ask(case.messages, on_text=pieces.append)
            assert "".join(pieces) == first.text
            turns = [*case.messages, Message(role="assistant", content=first.text), user("And the new plum?")]
            second = chat.ask(turns)
            third = chat.ask([user("Where do ferns grow that nobody asked about?")])
            chat.rate(second, 0.0, "not what I asked")
            chat.rate(third, 1.0)
        evaluated = project.evaluate()
        answers = {a.case_id: a.text for a in read_answers(Path(evaluated.folders["adapter"]))}
        # The engine, prompt and decoding of the evaluation.
        assert first.text == answers[case.id]
        captures = {capture.id: capture for capture in work.captures.page()}
        assert captures[second.capture].release == newest.name
        assert captures[second.capture].session == captures[first.capture].session
        feedback = FeedbackStore(work.database, project=work.settings.project)
        ((kept,),) = [feedback.of_capture(second.capture)]
        assert (kept.score, kept.comment) == (0.0, "not what I asked")
        # Held-out questions do not become training rows, nor what follows them in a conversation.
        export = CaptureExport(work, CaptureSettings(), feedback="all")
        assert [capture.id for capture in export] == [third.capture]
        assert export.left_out == {HELD_OUT: 2}
        assert not (work.project.serving / "chat").exists() or not list(
            (work.project.serving / "chat").iterdir()
        )


def test_the_command_prints_one_answer_or_holds_a_conversation(trained_project):
    project = trained_project
    printed = json.loads(graft(project, "--example", "2", "--json").stdout)
    with project.open() as work:
        case, run = read_example(work, 2), work.runs.list()[0].id
        assert printed["subject"] == f"run:{run}"
        assert (printed["case"], printed["reference"], printed["calls"]) == (case.id, case.reference, [])
        assert work.captures.get(printed["capture"]).reply == printed["text"]
        lines = ["What is a plum?", "+ short", "/tool {}", "/new", "-", "/nothing", "/example 2"]
        done = graft(project, "base", lines="\n".join(lines))
        asked = [capture.request["messages"] for capture in reversed(work.captures.page())][1:]
        assert [[turn["role"] for turn in turns] for turns in asked] == [
            ["user"],
            ["user", "assistant", "tool"],
            [turn.role for turn in case.messages],
        ]
        feedback = FeedbackStore(work.database, project=work.settings.project)
        rated = [kept for capture in work.captures.page() for kept in feedback.of_capture(capture.id)]
        assert [(kept.score, kept.comment) for kept in rated] == [(1.0, "short")]
    assert case.reference in done.stdout
    assert "there is no answer yet" in done.stderr
    assert "/nothing is not a command" in done.stderr


def test_the_page_asks_a_process_that_keeps_models_loaded(trained_project):
    project = trained_project
    question = [{"role": "user", "content": "What is a plum?"}]
    with project.open() as work:
        run, folder = f"run:{work.runs.list()[0].id}", work.project.serving / "chat" / f"model-{work.model}"
        (alone, adapted) = ask_any(project, ["base", run], question, max_tokens=4)
        assert (alone.error, adapted.error) == ("", "")
        process = ChatAddress.from_json((folder / "address.json").read_bytes()).pid
        (again,) = ask_any(project, [run], question, max_tokens=4)
        assert again.text == adapted.text
        assert ChatAddress.from_json((folder / "address.json").read_bytes()).pid == process
        assert is_loaded(work)
        capture = again.headers[CAPTURE_HEADER]
        rate_answer(project, capture, 1.0)
        assert work.captures.get(capture).release == run
        # Nothing was asked for a long time: it ends.
        os.utime(folder / "asked.json", (0, 0))
        for _ in range(600):
            if not is_loaded(work):
                break
            time.sleep(0.1)
        assert not is_loaded(work)


def test_a_model_is_talked_to_although_clients_call_another_one_by_its_name():
    large = {"large": {"url": "http://127.0.0.1:9/v1", "model": "gpt-4o"}}
    served = {"models": {"champion": {"to": "large"}}, "failover": {"endpoints": large}}
    work = SimpleNamespace(settings=SimpleNamespace(serve=ServeSettings.model_validate(served)))
    assert not chat_settings(work, ChatSubject("champion")).models


def test_calls_are_shown_as_calls():
    call = ToolCall("lookup", {"order": "A1", "days": 3})
    text = f"Let me see.\n{write_call(call)}"
    shown = show_turn(Message(role="assistant", content=text))
    assert (shown.text, shown.calls) == ("Let me see.", ('lookup(order="A1", days=3)',))
    system = Message(role="system", content=f"Help.\n\n{write_tools([TOOL])}")
    assert show_turn(system) == ("system", "Help.", (), ("lookup(order, days)",))
    broken = Message(role="assistant", content="<tool_call>\nno JSON\n</tool_call>")
    assert show_turn(broken).text == broken.content


def test_what_cannot_be_talked_to_is_refused_by_name(trained_project, change_settings, tmp_path):
    project = trained_project
    change_settings(
        project.root,
        serve={
            "failover": {"endpoints": {"large": {"url": f"http://127.0.0.1:{free_port()}/v1", "model": "m"}}}
        },
    )
    project = open_project(project.root)
    with project.open() as work:
        run = work.runs.list()[0]
        with pytest.raises(UserError, match="no 'nobody' to chat with") as unknown:
            find_chat_subject(work, "nobody")
        assert f"run:{run.id}" in unknown.value.why
        with pytest.raises(UserError, match="cannot answer questions of your own"):
            find_chat_subject(work, "log")
        with pytest.raises(UserError, match="no example 1000"):
            read_example(work, 1000)
        plan = {**run.plan, "base": "another", "base_fingerprint": "0" * 64}
        work.runs.create("other-base", folder=run.folder, plan=plan, when=timestamp())
        work.runs.update(
            "other-base", state="done", when=timestamp(), outcome={**run.outcome, "run_id": "other-base"}
        )
        with pytest.raises(UserError, match="run:other-base was trained on a different base"):
            find_chat_subject(work, "run:other-base")
        described = parts(write_adapter(tmp_path / "adapter", weights=b"x"))
        described["project"] = work.project.settings.project
        release = publish_parts(folder=open_store(work), index=work.releases, **described)
        with pytest.raises(UserError, match=f"release {release.id[:12]} was trained on a different base"):
            find_chat_subject(work, release.id[:12])
        work.runs.create("failing", folder=run.folder, plan=run.plan, when=timestamp())
        error = UserError("no room on the disk", why="it is full", fix="make room")
        work.runs.update("failing", state="failed", when=timestamp(), error=error.as_json())
        with pytest.raises(UserError, match="run failing failed: no room on the disk") as failed:
            find_chat_subject(work, "run:failing")
        assert (failed.value.why, failed.value.fix) == ("it is full", "make room")
        # The newest that can answer does.
        assert find_chat_subject(work, None).name == f"run:{run.id}"
        why_not = {choice.name: choice.why_not for choice in list_chat_subjects(work)}
        assert why_not["run:other-base"] == "it was trained on another"
        assert why_not["run:failing"] == "no room on the disk"
        assert why_not["large"] == why_not["base"] == ""
        with (
            open_chat(work, find_chat_subject(work, "large")) as chat,
            pytest.raises(EnvironmentFailure, match="large did not answer"),
        ):
            chat.ask([user("Are you there?")])
