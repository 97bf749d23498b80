"""The report step of a project with several models: one page each, with the times of its own steps."""

from pathlib import Path

import pytest
import yaml
from report_sample import make_page

from graftwork.data.project import PreparedData
from graftwork.evaluate.cases import write_cases
from graftwork.evaluate.project import Evaluated
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.release import REPORT
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter


@pytest.fixture
def folder(tmp_path):
    settings = {
        "project": "small",
        "data": {"logs": ["log.jsonl"]},
        "models": {"main": {}, "billing": {"keep": {"domain": ["billing"]}}},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    write_cases(tmp_path / "cases.jsonl", cases=())
    return tmp_path


def outputs(folder):
    page = make_page()
    evaluated = Evaluated(cases_file=str(folder / "cases.jsonl"), folders={}, report=page.report)
    prepared = PreparedData(folder=str(folder), dataset=page.dataset, folders={}, portions=())
    return StepOutputs(
        {
            "audit": page.audit,
            "prepare": prepared,
            "plan": page.plan,
            "train": page.outcome,
            "evaluate": evaluated,
            "gate": page.verdict,
        }
    )


def test_the_report_of_one_model_does_not_replace_that_of_another(folder):
    made = outputs(folder)
    written = {}
    for model in ("main", "billing"):
        with use_project(open_project(folder), NullReporter(), model=model) as work:
            written[model] = REPORT.do(work, made)
    assert written["main"].path == str(folder / "report.html")
    assert written["billing"].path == str(folder / "report-billing.html")
    with use_project(open_project(folder), NullReporter()) as work:
        assert REPORT.still_there(work, written["main"])
        assert REPORT.still_there(work, written["billing"])


def test_the_report_shows_the_times_of_its_own_model(folder):
    with use_project(open_project(folder), NullReporter(), model="billing") as work:
        for entry, seconds in (("train", 3600.0), ("train@billing", 120.0)):
            work.ledger.put(entry, fingerprint="f", output={}, finished_at="2026-11-01", seconds=seconds)
        page = REPORT.do(work, outputs(folder)).path
    text = Path(page).read_text()
    assert "2 min 00 s" in text
    assert "1 h 00 min" not in text
