"""Every stage of a run has a time with a range, which its own past runs correct."""

import pytest
from test_plan_estimate import DEVICE, SMOL

from graftwork.plan.catalog.hardware import default_rates
from graftwork.plan.stages import (
    MEASURED,
    AnswerLoad,
    StageFacts,
    add_up,
    alone,
    cpu_answers,
    estimate_stage,
    gpu_answers,
    pool_stage,
    residual_name,
    stage_parts,
)
from graftwork.records.base import Figure
from graftwork.records.plan import Residual

LOAD = AnswerLoad(
    cases=90, rows=32, prompt_tokens=200.0, shared_tokens=50.0, answer_tokens=40.0, longest_answer=60.0
)
CARD = DEVICE.model_copy(update={"kind": "cuda", "gflops": 700_000.0})


def changed(**changes):
    return LOAD.model_copy(update=changes)


def facts(**changes):
    values = {
        "log_bytes": 1_000_000,
        "shape": SMOL,
        "device": DEVICE,
        "answers": (LOAD, LOAD),
        "tried": changed(cases=6, rows=8),
        "timed_cases": 8,
    }
    return StageFacts(**{**values, **changes})


@pytest.mark.parametrize("device", [DEVICE, CARD])
@pytest.mark.parametrize("stage", MEASURED)
def test_a_stage_has_a_range_around_the_sum_of_its_parts(stage, device):
    figure = estimate_stage(stage, facts(device=device))
    assert 0 < figure.low < figure.value < figure.high
    assert figure.unit == "s"
    assert figure.value == pytest.approx(sum(stage_parts(stage, facts(device=device)).values()))


@pytest.mark.parametrize("device", [DEVICE, CARD])
@pytest.mark.parametrize(
    ("stage", "more"),
    [
        ("audit", {"log_bytes": 9_000_000}),
        ("prepare", {"log_bytes": 9_000_000}),
        ("evaluate", {"answers": (changed(cases=180), LOAD)}),
        ("evaluate", {"answers": (LOAD, LOAD, LOAD)}),
        ("evaluate", {"answers": (LOAD, changed(longest_answer=80.0))}),
        ("evaluate", {"answers": (LOAD, changed(shared_tokens=0.0))}),
        ("evaluate", {"timed_cases": 40}),
        ("evaluate", {"forked": False}),
        ("try", {"tried": changed(cases=6, rows=8, longest_answer=80.0)}),
        ("try", {"forked": False}),
    ],
)
def test_more_work_takes_longer(stage, more, device):
    little, much = facts(device=device), facts(device=device, **more)
    assert estimate_stage(stage, much).value > estimate_stage(stage, little).value


def test_only_a_card_records_passes_and_answers_in_one_process():
    here, there = stage_parts("evaluate", facts()), stage_parts("evaluate", facts(device=CARD))
    assert "recording" not in here
    assert there["recording"] > 0
    assert here["open"] == pytest.approx(3 * stage_parts("try", facts())["open"])
    assert there["open"] == pytest.approx(stage_parts("try", facts(device=CARD))["open"])


def test_a_machine_that_was_not_measured_has_a_wider_range():
    unknown = facts(device=DEVICE.model_copy(update={"gflops": None}))
    wide, narrow = (estimate_stage("evaluate", found) for found in (unknown, facts()))
    assert wide.high / wide.value > narrow.high / narrow.value


MEASURED_ON_ONE_CORE = [
    # example `cited_answers`, 126 cases in batches of 72, one thread; processor seconds (2026-11-18)
    (
        "base",
        AnswerLoad(
            cases=126,
            rows=72,
            prompt_tokens=208.9,
            shared_tokens=149.0,
            answer_tokens=29.2,
            longest_answer=56.0,
        ),
        {"reading": 21.0, "writing": 24.0},
    ),
    (
        "adapter",
        AnswerLoad(
            cases=126,
            rows=72,
            prompt_tokens=109.9,
            shared_tokens=50.0,
            answer_tokens=24.5,
            longest_answer=45.0,
        ),
        {"reading": 21.2, "writing": 19.3},
    ),
    (
        "base alone",
        alone(AnswerLoad(cases=1, rows=1, prompt_tokens=211.0, answer_tokens=28.0, longest_answer=28.0)),
        {"reading": 0.58, "writing": 1.47},
    ),
]


@pytest.mark.parametrize(("name", "load", "seconds"), MEASURED_ON_ONE_CORE)
def test_answers_on_a_core_take_what_was_measured(name, load, seconds):
    found = cpu_answers(SMOL, load, gflops=93.0, weights_s=11.4e9)
    for part, measured in seconds.items():
        assert found[part] == pytest.approx(measured, rel=0.12), (name, part)


def test_a_request_alone_on_a_card_waits_for_its_kernels_and_not_for_its_weights():
    lone = gpu_answers(SMOL, alone(LOAD), rates=default_rates())["writing"] / LOAD.answer_tokens
    many = gpu_answers(SMOL, changed(cases=32), rates=default_rates())["writing"] / LOAD.longest_answer
    assert 0.002 < lone < 0.006
    assert many < 1.5 * lone


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


BUSY = DEVICE.model_copy(
    update={
        "gflops": 12.0,
        "weights_s": 1.2e9,
        "core_share": 0.12,
        "core_gflops": 50.0,
        "core_weights_s": 11e9,
    }
)
FREE = BUSY.model_copy(update={"gflops": 100.0, "weights_s": 11e9, "core_share": 0.98})


def test_the_range_of_an_evaluation_on_a_busy_machine_reaches_to_that_of_the_free_one():
    busy, free = (estimate_stage("evaluate", facts(device=device)) for device in (BUSY, FREE))
    assert busy.value > 4 * free.value
    assert busy.low == pytest.approx(free.low)
    ranges = add_up({"evaluate": busy, "gate": Figure.exact(1.0, "s")})
    assert ranges.low * 60 < free.value < ranges.high * 60


def test_a_short_burst_on_an_idle_core_does_not_promise_more_than_all_cores_give():
    """The rate was measured between two bursts of others, the share over both."""
    burst = FREE.model_copy(update={"core_share": 0.1})
    assert burst.when_free.gflops == FREE.gflops
    assert estimate_stage("evaluate", facts(device=burst)).low == pytest.approx(
        estimate_stage("evaluate", facts(device=FREE)).low
    )


def test_a_run_planned_busy_and_done_free_does_not_shorten_the_next_plan():
    planned, actual = (estimate_stage("evaluate", facts(device=device)) for device in (BUSY, FREE))
    past = [Residual(name=residual_name("evaluate"), planned=planned, actual=actual.value)] * 3
    quiet, _ = pool_stage("evaluate", actual, past)
    assert quiet.value == pytest.approx(actual.value)
    assert quiet.value / 1.5 < actual.value < quiet.value * 1.5
    busy, _ = pool_stage("evaluate", planned, past)
    assert busy.value == pytest.approx(planned.value)
    assert busy.low <= actual.value


def test_a_run_that_was_slower_than_the_busy_machine_explains_still_corrects():
    planned = estimate_stage("evaluate", facts(device=BUSY))
    past = [Residual(name=residual_name("evaluate"), planned=planned, actual=2 * planned.value)] * 3
    assert pool_stage("evaluate", planned, past)[0].value == pytest.approx(2 * planned.value)


def test_runs_of_another_stage_say_nothing():
    prior = estimate_stage("audit", facts())
    assert pool_stage("audit", prior, off_by("evaluate", 8.0)) == (prior, 0)


def test_the_whole_run_is_the_sum_of_its_stages_in_minutes():
    whole = add_up({"a": Figure(value=60, low=30, high=90, unit="s"), "b": Figure.exact(30.0, "s")})
    assert (whole.low, whole.value, whole.high, whole.unit) == (1.0, 1.5, 2.0, "min")
