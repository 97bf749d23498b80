"""Every stage of a run has a time with a range, which its own past runs correct."""

import pytest
from test_plan_estimate import DEVICE, SMOL

from graftwork.plan.stages import MEASURED, StageFacts, add_up, estimate_stage, pool_stage, residual_name
from graftwork.records.base import Figure
from graftwork.records.plan import Residual


def facts(**changes):
    values = {
        "log_bytes": 1_000_000,
        "shape": SMOL,
        "device": DEVICE,
        "cases": 90,
        "prompt_tokens": 200.0,
        "answer_tokens": 40.0,
        "timed_cases": 8,
    }
    return StageFacts(**{**values, **changes})


@pytest.mark.parametrize("stage", MEASURED)
def test_a_stage_has_a_range_around_its_value(stage):
    figure = estimate_stage(stage, facts())
    assert 0 < figure.low < figure.value < figure.high
    assert figure.unit == "s"


@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("audit", {"log_bytes": 9_000_000}),
        ("prepare", {"log_bytes": 9_000_000}),
        ("evaluate", {"cases": 180}),
        ("evaluate", {"subjects": 3}),
        ("evaluate", {"answer_tokens": 80.0}),
        ("evaluate", {"timed_cases": 40}),
        ("try", {"answer_tokens": 80.0}),
    ],
)
def test_more_work_takes_longer(stage, more):
    assert estimate_stage(stage, facts(**more)).value > estimate_stage(stage, facts()).value


def off_by(stage, *ratios):
    prior = Figure.about(10.0, down=0.5, up=2.0, unit="s")
    return [Residual(name=residual_name(stage), planned=prior, actual=10.0 * ratio) for ratio in ratios]


def test_past_runs_of_the_stage_correct_it_however_much_work_there_is():
    prior = estimate_stage("evaluate", facts())
    pooled, runs = pool_stage("evaluate", prior, off_by("evaluate", 2.0, 2.1, 1.9))
    assert runs == 3
    assert pooled.value == pytest.approx(2 * prior.value)
    assert pooled.low <= 1.9 * prior.value
    assert pooled.high >= 2.1 * prior.value
    assert pooled.high / pooled.low < prior.high / prior.low


def test_one_past_run_does_not_narrow_the_range():
    prior = estimate_stage("evaluate", facts())
    pooled, runs = pool_stage("evaluate", prior, off_by("evaluate", 8.0))
    assert runs == 1
    assert pooled.low <= prior.low
    assert pooled.high >= 8 * prior.value


def test_runs_of_another_stage_say_nothing():
    prior = estimate_stage("audit", facts())
    assert pool_stage("audit", prior, off_by("evaluate", 8.0)) == (prior, 0)


def test_the_whole_run_is_the_sum_of_its_stages_in_minutes():
    whole = add_up({"a": Figure(value=60, low=30, high=90, unit="s"), "b": Figure.exact(30.0, "s")})
    assert (whole.low, whole.value, whole.high, whole.unit) == (1.0, 1.5, 2.0, "min")
