"""Curves of learning from the runs of a project."""

import json

import pytest

from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import UserError
from graftwork.week.project import (
    WeekRequest,
    fit_project_curves,
    hours_as_run,
    hours_by_tokens,
    week_problem,
)

PROJECT = """
project: small
data: {logs: [log.jsonl]}
models: {main: {}, reads: {}}
fleet: {places: {local: {speed: 1.0}}}
plan: {week: {half_hours: 30}}
"""


@pytest.fixture
def project(tmp_path):
    """A project with one finished run of `main`, whose loss halves its distance every two hours."""
    (tmp_path / "graft.yaml").write_text(PROJECT)
    found = open_project(tmp_path)
    folder = found.state / "runs" / "r1"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"dataset_folder": str(found.state / "datasets" / "abc")}))
    steps = [
        {"step": n, "loss": 1 + 2 ** (-n / 40), "learning_rate": 1e-4, "gradient_norm": 1.0, "tokens": 1000,
         "trained_tokens": 500, "seconds": 180.0}
        for n in range(1, 161)
    ]  # fmt: skip
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    with use_project(found, NullReporter()) as work:
        work.ledger.put(
            "prepare", fingerprint="f", output={"folders": {"main": str(found.state / "datasets" / "abc")}},
            finished_at="2026-11-16T00:00:00Z", seconds=1.0,
        )  # fmt: skip
        work.runs.create("r1", folder=str(folder), plan={}, when="2026-11-16T00:00:00Z")
        work.runs.update("r1", state="done", when="2026-11-16T08:00:00Z")
    return found


def test_a_curve_is_fitted_to_the_journal_of_a_finished_run(project):
    assert fit_project_curves(project, hours_as_run) == {"main": pytest.approx(2.0, rel=0.1)}
    assert fit_project_curves(project, hours_by_tokens(10_000)) == {"main": pytest.approx(4.0, rel=0.1)}


def test_the_week_uses_fitted_curves_and_says_which_are_assumed(project):
    problem = week_problem(project, WeekRequest())
    curves = {model.name: model.curve for model in problem.models}
    assert curves["main"].source == "fitted from runs"
    assert curves["main"].half_hours == pytest.approx(2.0, rel=0.1)
    assert (curves["reads"].source, curves["reads"].half_hours) == ("assumed", 30)
    assert any("30 h: reads" in text for text in problem.assumptions)


def test_a_project_that_never_ran_is_left_as_it_is(tmp_path):
    (tmp_path / "graft.yaml").write_text(PROJECT)
    assert fit_project_curves(open_project(tmp_path), hours_as_run) == {}
    assert not (tmp_path / ".graft").exists()


def test_a_rented_place_without_a_price_is_refused_instead_of_used_for_nothing(tmp_path):
    (tmp_path / "graft.yaml").write_text(PROJECT.replace("local: {speed: 1.0}", "runpod: {speed: 1.0}"))
    with pytest.raises(UserError, match="runpod has no price"):
        week_problem(open_project(tmp_path), WeekRequest())
