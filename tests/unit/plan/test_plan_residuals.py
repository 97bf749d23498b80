"""What finished runs teach the next plan: drift, bias, and ranges."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_plans import make_outcome, make_plan
from test_plan_estimate import plan

from graftwork.plan.estimate import (
    COMPUTED,
    ENOUGH_RUNS,
    compare,
    compare_parts,
    correct_memory,
    find_biases,
    find_drifts,
    learned_memory,
    pool_runs,
    split_memory,
)
from graftwork.records.base import Figure
from graftwork.records.plan import Residual, RunParts


def about(value, unit="GiB"):
    return Figure.about(value, down=0.9, up=1.1, unit=unit)


def memory(actual, planned=10.0, name="peak_memory_gib"):
    return Residual(name=name, planned=about(planned), actual=actual)


PARTS = {
    "minutes.load": about(0.2, "min"),
    "minutes.compute": about(6.0, "min"),
    "minutes.validation": about(0.6, "min"),
    "minutes.checkpoints": about(0.1, "min"),
    "peak_memory_gib.weights": about(1.0),
    "peak_memory_gib.runtime": about(0.5),
    "peak_memory_gib.activations": about(1.5),
    "peak_memory_gib.logits": about(0.5),
}


def drifts_of(*, minutes=7.0, peak=3.5, speed=100.0, parts):
    plan = make_plan(
        parts=PARTS,
        minutes=about(6.9, "min"),
        peak_memory_gib=about(3.5),
        tokens_per_second=about(100, "tokens/s"),
    )
    outcome = make_outcome(peak_memory_gib=peak, tokens_per_second=speed)
    found = compare(plan, outcome, minutes=minutes)
    return {
        drift.figure: drift
        for drift in find_drifts(found, compare_parts(plan, outcome, parts))
        if drift.figure in ("minutes", "peak_memory_gib", "tokens_per_second")
    }


def test_a_run_within_its_ranges_drifts_nowhere():
    assert drifts_of(parts=RunParts(seconds={"load": 12, "compute": 360})) == {}


def test_time_beyond_its_range_names_the_part_that_took_it():
    seconds = {"load": 12, "compute": 366, "validation": 200, "checkpoints": 7, "waiting for data": 3}
    drift = drifts_of(minutes=9.8, parts=RunParts(seconds=seconds))["minutes"]
    assert drift.component == "validation"
    assert drift.component_actual == pytest.approx(200 / 60)
    assert "mostly validation" in drift.says


def test_waiting_for_data_is_found_behind_a_low_speed():
    seconds = {"load": 12, "compute": 370, "waiting for data": 250}
    drift = drifts_of(speed=60, parts=RunParts(seconds=seconds))["tokens_per_second"]
    assert drift.component == "waiting for data"


def test_a_speed_above_its_range_is_due_to_computing():
    drift = drifts_of(speed=150, parts=RunParts(seconds={"compute": 240}))["tokens_per_second"]
    assert drift.component == "compute"


@pytest.mark.parametrize(
    ("loaded", "peak", "component"),
    [(1.5, 5.0, "what a step needs"), (3.4, 5.4, "what is loaded"), (1.5, 2.0, "what a step needs")],
)
def test_memory_beyond_its_range_names_what_is_loaded_or_what_a_step_needs(loaded, peak, component):
    parts = RunParts(memory_gib=dict(split_memory(loaded=loaded, peak=peak)))
    assert drifts_of(peak=peak, parts=parts)["peak_memory_gib"].component == component


def test_without_parts_the_drift_is_reported_and_no_cause_is_invented():
    drift = drifts_of(peak=9.0, parts=RunParts())["peak_memory_gib"]
    assert drift.component is None
    assert "9" in drift.says
    assert "mostly" not in drift.says


def test_a_plan_that_names_no_parts_still_sets_its_steps_next_to_the_run():
    plan = make_plan()
    found = compare_parts(plan, make_outcome(), RunParts(seconds={"compute": 60.0, "load": 5.0}))
    assert {item.name for item in found} == {"minutes.compute", "minutes.load"}
    estimated = plan.tokens.value / plan.tokens_per_second.value / 60
    assert next(item for item in found if item.name == "minutes.compute").planned.value == estimated


def test_memory_is_not_split_without_a_reading_before_the_peak():
    assert split_memory(loaded=None, peak=3.0) == {}
    assert split_memory(loaded=4.0, peak=3.0) == {}


@given(st.lists(st.floats(0.7, 1.5), min_size=1, max_size=12))
def test_the_learned_range_contains_every_run_it_came_from(ratios):
    learned = learned_memory([memory(10 * ratio) for ratio in ratios], most=12)
    assert learned.low <= min(ratios) + 1e-9
    assert learned.high >= max(ratios) - 1e-9
    corrected = correct_memory(about(20.0), learned)
    assert corrected.low <= corrected.value <= corrected.high
    assert corrected.value == pytest.approx(20 * learned.value)


def test_a_corrected_plan_that_came_true_does_not_unlearn_its_correction():
    """The second run was planned with what the first had taught: 12 GiB, and 12 came."""
    residuals = [
        memory(12.0, planned=12.0),
        memory(12.0, planned=10.0, name=COMPUTED),
        memory(12.0, planned=10.0),
        memory(12.0, planned=10.0, name=COMPUTED),
    ]
    assert learned_memory(residuals).value == pytest.approx(1.2)


def test_runs_of_another_kind_teach_nothing():
    assert learned_memory([memory(90.0), memory(0.1)]) is None
    assert learned_memory([]) is None
    assert correct_memory(about(3.0), None) == about(3.0)


def test_the_bias_is_the_median_over_runs_and_says_how_often_the_range_held():
    runs = [[memory(10.5), memory(9.0, name="minutes")], [memory(13.0)], [memory(11.0)]]
    biases = {bias.figure: bias for bias in find_biases(runs)}
    found = biases["peak_memory_gib"]
    assert (found.runs, found.off.value) == (3, pytest.approx(0.1))
    assert (found.off.low, found.off.high) == (pytest.approx(0.05), pytest.approx(0.3))
    assert found.inside.value == pytest.approx(2 / 3)
    assert biases["minutes"].runs == 1


PRIOR = Figure.about(100.0, down=0.55, up=1.6, unit="tokens/s")
speeds = st.lists(st.floats(1.0, 10_000.0), max_size=10)


def test_one_slow_run_does_not_make_the_plan_overconfident():
    """The case of issue 15: one run four times slower than planned, and the next one as planned at first."""
    first = plan()
    slow = first.tokens_per_second.value / 4
    second = plan(learned=(slow,))
    assert second.minutes.holds(first.minutes.value)
    assert second.tokens_per_second.holds(slow)
    assert second.tokens_per_second.low <= first.tokens_per_second.low
    assert second.tokens_per_second.high >= first.tokens_per_second.high
    assert second.certainty == first.certainty == "probed"


@given(seen=speeds)
def test_pooled_range_holds_every_speed_that_was_seen(seen):
    pooled = pool_runs(PRIOR, seen)
    assert all(pooled.low <= speed <= pooled.high for speed in seen)
    assert pooled.low <= pooled.value <= pooled.high
    assert pooled.unit == "tokens/s"


@given(seen=st.lists(st.floats(1.0, 10_000.0), max_size=ENOUGH_RUNS - 1))
def test_fewer_than_three_runs_never_narrow_the_prior_range(seen):
    pooled = pool_runs(PRIOR, seen)
    assert pooled.low <= PRIOR.low
    assert pooled.high >= PRIOR.high


def test_without_runs_the_estimate_is_the_prior():
    assert pool_runs(PRIOR, ()) == PRIOR


def test_runs_that_agree_narrow_the_range_slowly():
    def width(count):
        pooled = pool_runs(PRIOR, (90.0, 100.0, 110.0, 95.0, 105.0)[:count])
        return math.log(pooled.high / pooled.low)

    assert width(0) == width(1) == width(2)
    assert width(2) > width(3) > width(5)
    assert width(5) > math.log(110 / 90)


def test_few_runs_move_the_value_part_of_the_way():
    moved = pool_runs(PRIOR, (25.0,)).value
    assert 25.0 < moved < 100.0
    assert pool_runs(PRIOR, (25.0, 25.0)).value < moved
    assert pool_runs(PRIOR, (25.0, 25.0, 26.0)).value == pytest.approx(25.0)


def test_a_wide_prior_gives_way_sooner_than_a_narrow_one():
    wide = Figure.about(100.0, down=0.25, up=4.0)
    assert pool_runs(wide, (25.0,)).value < pool_runs(PRIOR, (25.0,)).value
