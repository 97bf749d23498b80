"""Who can be talked to: named without a look at other machines."""

import pytest

from graftwork.evaluate.chat import list_chat_subjects
from graftwork.model import base
from graftwork.project.folder import open_project
from graftwork.project.open_project import timestamp, use_project
from graftwork.project.reporter import NullReporter


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
