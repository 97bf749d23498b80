"""Who can be talked to: named without a look at other machines, and missed with an error."""

import pytest

from free_ports import free_port
from graftwork.evaluate.chat import Chat, list_chat_subjects
from graftwork.model import base
from graftwork.project.folder import open_project
from graftwork.project.open_project import timestamp, use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import EnvironmentFailure
from graftwork.serve.own_endpoint import OwnEndpoint
from graftwork.serve.settings import ServeSettings


def test_listing_who_can_be_asked_fetches_no_base(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "resolve", lambda *_: pytest.fail("the Hub was asked"))
    (tmp_path / "graft.yaml").write_text("project: p\nbase: org/model\ndata: {logs: [x.jsonl]}\n")
    with use_project(open_project(tmp_path), NullReporter()) as work:
        plan = {"base": "org/model", "base_fingerprint": "0" * 64}
        work.runs.create("r1", folder=str(tmp_path), plan=plan, when=timestamp())
        outcome = {"adapter_folder": str(tmp_path)}
        work.runs.update("r1", state="done", when=timestamp(), outcome=outcome)
        why_not = {choice.name: choice.why_not for choice in list_chat_subjects(work)}
    assert set(why_not) == {"run:r1", "base"}
    assert "not on this machine" in why_not["run:r1"]


def test_a_process_that_ended_before_it_was_asked_is_an_error(tmp_path):
    endpoint = OwnEndpoint(ServeSettings(port=free_port()), root=tmp_path)
    chat = Chat(subject="base", model="base", endpoint=endpoint, max_tokens=4, seconds=5.0)
    with pytest.raises(EnvironmentFailure, match="base did not answer"):
        chat.await_model()
