"""A teacher on this machine: the engine in a process of its own, and a repair with it."""

import json
import sys
import threading
from pathlib import Path

import pytest
import yaml

from graftwork.api.project import open_project
from graftwork.data.settings import RepairSettings
from graftwork.engines.interface import DecodingSettings, EngineSource
from graftwork.engines.local import EngineChild
from graftwork.process import stdio
from graftwork.records.errors import WorkerFailed
from graftwork.records.interaction import Message

ASKED = (Message(role="user", content="Where?"),)
SILENT = "import sys; open(sys.argv[1], 'w').close(); sys.stdin.read()"


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    """An engine that runs this code with one argument, a path; `on_start` gets its process at once."""

    def make(code, on_start=lambda _process: None):
        def start(_command, **options):
            process = real.Popen([sys.executable, "-c", code, str(tmp_path / "started")], **options)
            on_start(process)
            return process

        real = stdio.subprocess

        class ShownSubprocess:
            PIPE = real.PIPE
            TimeoutExpired = real.TimeoutExpired
            Popen = staticmethod(start)

        monkeypatch.setattr(stdio, "subprocess", ShownSubprocess)
        source = EngineSource(base_folder=tmp_path, device="cpu", precision="q8_0", fingerprint="x")
        return EngineChild("silent", source, folder=tmp_path / "engine")

    return make


@pytest.fixture
def silent_engine(tmp_path, make_engine):
    """An engine that reads questions and never answers; it creates `started` once it runs."""
    return make_engine(SILENT), tmp_path / "started"


def test_an_engine_that_is_stopped_while_it_starts_gives_up_the_answer(make_engine):
    child = make_engine(SILENT, lambda _process: child.stop())
    with pytest.raises(WorkerFailed, match="the silent engine exited"):
        child.ask_once(ASKED, DecodingSettings(8))


def test_an_engine_that_ended_before_it_was_asked_is_an_error_with_a_reason(make_engine):
    child = make_engine("import sys; sys.exit('no memory')", lambda process: process.wait())
    with pytest.raises(WorkerFailed, match="the silent engine exited") as caught:
        child.ask_once(ASKED, DecodingSettings(8))
    assert caught.value.why == "no memory"


def test_an_engine_that_answers_something_else_is_an_error(make_engine):
    child = make_engine("import sys; print('loading', flush=True); sys.stdin.read()")
    with pytest.raises(WorkerFailed, match="the silent engine exited"):
        child.ask_once(ASKED, DecodingSettings(8))


def test_a_stopped_engine_gives_up_the_answer_at_once_and_is_not_started_again(silent_engine):
    child, started = silent_engine
    failures = []

    def ask():
        try:
            child.ask_once(ASKED, DecodingSettings(8))
        except WorkerFailed as error:
            failures.append(error.what)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not started.exists():
        threading.Event().wait(0.01)
    child.stop()
    for thread in threads:
        thread.join(600)
    child.close()
    assert failures == ["the silent engine exited"] * 3


def test_rows_are_repaired_by_llama_cpp_on_this_machine(tmp_path, tiny_base):
    pytest.importorskip("xllamacpp")
    cut = {"role": "assistant", "content": "This answer went well until it suddenly stopped and then it was"}
    rows = [
        {"messages": [{"role": "user", "content": f"Explain item {n}."}, cut], "finish_reason": "length"}
        for n in range(3)
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = {"engine": "llamacpp", "model": str(tiny_base), "max_tokens": 16}
    settings = {"project": "p", "base": str(tiny_base), "data": {"logs": ["log.jsonl"]}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    repair = RepairSettings.model_validate({"teacher": teacher})
    outcome = open_project(tmp_path).repair(repair)
    # A random model never ends its answers: all are decided, and none of them enters.
    assert outcome.states == {"refused": 3}
    assert outcome.spent.requests == 3
    assert outcome.spent.cost == 0
    answers = Path(tmp_path / ".graft" / "repair" / "answers.jsonl").read_text()
    assert answers.count('"finish_reason":"length"') == 3
