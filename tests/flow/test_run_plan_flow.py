"""The whole run is planned stage by stage, and each run of a stage makes the next plan better."""

import json

import pytest
from flows import opened
from typer.testing import CliRunner

from graftwork.pipeline.table import STEPS, plan_whole_run, run_pipeline


@pytest.fixture
def project(small_project, listener):
    with opened(small_project, listener) as work:
        yield work


def test_before_anything_is_done_every_stage_has_a_time(project):
    planned = plan_whole_run(project)
    assert [stage.stage for stage in planned.stages] == [step.name for step in STEPS]
    assert all(stage.seconds.value > 0 for stage in planned.stages)
    states = {stage.stage: stage.state for stage in planned.stages}
    assert states["audit"] == states["train"] == "to do"
    assert states["release"] == states["try"] == "if the gate says deploy"
    assert planned.rough
    assert planned.minutes.low < planned.minutes.value < planned.minutes.high
    assert planned.minutes.value == pytest.approx(
        sum(stage.seconds.value for stage in planned.stages) / 60, rel=1e-6
    )
    assert project.ledger.get("audit") is None


def test_steps_that_are_up_to_date_take_no_time_and_training_has_its_plan(project):
    made = run_pipeline(project, upto="plan")
    planned = plan_whole_run(project)
    stages = {stage.stage: stage for stage in planned.stages}
    assert {name for name, one in stages.items() if one.state == "up to date"} == {"prepare", "plan"}
    assert stages["prepare"].seconds.value == 0
    assert stages["train"].seconds.value == pytest.approx(60 * made.outputs["plan"].minutes.value)
    assert not planned.rough


def test_a_stage_that_ran_is_remembered_and_is_no_training_run(project):
    run_pipeline(project, upto="plan")
    project.ledger.forget("prepare")
    stages = {stage.stage: stage for stage in plan_whole_run(project).stages}
    assert (stages["prepare"].state, stages["prepare"].runs) == ("to do", 1)
    assert stages["evaluate"].runs == 0
    assert project.residuals.past() == ()


def test_graft_plan_shows_the_whole_run(small_project):
    from graftwork.cli.main import app

    shown = CliRunner().invoke(app, ["plan", "-C", str(small_project)])
    assert shown.exit_code == 0, shown.output
    assert "whole run" in shown.output
    assert "evaluate" in shown.output
    asked = CliRunner().invoke(app, ["plan", "-C", str(small_project), "--json"])
    found = json.loads(asked.stdout)
    assert found["minutes"]["value"] > 0
    assert found["run"]["minutes"]["value"] > found["minutes"]["value"]
    assert [stage["stage"] for stage in found["run"]["stages"]] == [step.name for step in STEPS]
