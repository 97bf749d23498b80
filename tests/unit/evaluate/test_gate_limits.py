"""Limits and invariants: by a bound, by a percentile, inclusive or not."""

import math

import pytest
from gate_samples import marks, report, simple, subject
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.figures import percentile, times_for_percentile
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.judge_statistics import add_judgment
from graftwork.evaluate.report import make_rate
from graftwork.records.report import JudgeTally


def timed(latency, rule, **more):
    found = report(
        subject("adapter", {"json_valid": marks(9, 9)}, latency=latency, **more),
        subject("base", {"json_valid": marks(9, 9)}),
    )
    return decide(found, GateSettings(rules=(rule,)))


def test_at_least_and_at_most_include_the_limit():
    memory = subject("adapter", {"json_valid": marks(9, 9)}, memory=10.0)
    found = report(memory, subject("base", {"json_valid": marks(9, 9)}))
    assert (
        decide(found, GateSettings(rules=(GateRule(metric="peak_memory_gib", at_most=10),))).decision
        == "deploy"
    )
    assert (
        decide(found, GateSettings(rules=(GateRule(metric="peak_memory_gib", under=10),))).decision
        == "iterate"
    )


def test_a_95th_percentile_needs_72_requests_before_anything_can_be_promised():
    assert times_for_percentile(0.95) == 72
    rule = GateRule(metric="latency_seconds", under=5, at="p95")
    few = timed([1.0 + i / 100 for i in range(30)], rule)
    assert few.decision == "not_enough_evidence"
    assert few.rules[0].high is None  # there is no bound, and JSON has no infinity
    assert "72 timed requests" in few.rules[0].sentence
    assert "About 72 timed requests would settle it." in few.reason
    assert "evaluate.latency_cases to 72" in few.advice[0]
    assert timed([1.0 + i / 100 for i in range(72)], rule).decision == "deploy"


def test_a_few_slow_requests_break_the_percentile_and_not_the_median():
    slow = [1.0 + i / 100 for i in range(180)] + [30.0] * 20
    assert timed(slow, GateRule(metric="latency_seconds", under=5)).decision == "deploy"
    assert timed(slow, GateRule(metric="latency_seconds", under=5, at="p95")).decision == "iterate"


def test_a_mean_is_not_a_median():
    skewed = [1.0] * 30 + [60.0] * 10
    assert timed(skewed, GateRule(metric="latency_seconds", under=12)).decision == "deploy"
    assert timed(skewed, GateRule(metric="latency_seconds", under=12, at="mean")).decision == "iterate"


def test_speed_is_a_limit_too():
    found = report(
        subject("adapter", {"json_valid": marks(9, 9)}, speed=40.0),
        subject("base", {"json_valid": marks(9, 9)}),
    )
    fast = GateSettings(rules=(GateRule(metric="tokens_per_second", over=30),))
    faster = GateSettings(rules=(GateRule(metric="tokens_per_second", over=50),))
    assert decide(found, fast).decision == "deploy"
    assert decide(found, faster).decision == "iterate"


def test_a_rule_bound_to_the_value_says_that_luck_is_not_ruled_out():
    rule = GateRule(metric="json_valid", at_least=0.98, bound="value")
    verdict = decide(simple(marks(20, 31), marks(31, 31)), GateSettings(rules=(rule,)))
    assert verdict.decision == "deploy"
    assert "luck" in verdict.notes[0]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"metric": "json_valid", "margin": 2}, "for 95 % write 0.95"),
        ({"metric": "json_valid", "over": 0.9, "against": "champion"}, "give it a `margin`"),
        ({"metric": "json_valid", "over": 0.9, "at": "p95"}, "is for latency_seconds"),
        ({"metric": "json_valid", "margin": 0.02, "severity": "invariant"}, "a proven loss aborts anyway"),
        ({"metric": "json_vald", "over": 0.9}, "did you mean json_valid"),
        ({"metric": "json_valid", "over": 0.9, "margin": 0.02}, "not both"),
        ({"metric": "json_valid", "at_least": 0}, "is always true"),
        ({"metric": "json_valid", "at_most": 1}, "is always true"),
        ({"metric": "tokens_per_second", "at_least": 0}, "is always true"),
        ({"metric": "latency_seconds", "under": math.inf}, "needs a number"),
        ({"metric": "latency_seconds", "margin": math.inf}, "needs a number"),
        ({"metric": "peak_memory_gib", "at_most": math.nan}, "needs a number"),
        ({"metric": "json_valid", "over": math.nan}, "needs a number"),
        ({"metric": "judge_preference", "over": 0.5}, "has no value for a single answer"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused_with_the_fix(rule, message):
    with pytest.raises(ValueError, match=message):
        GateRule(**rule)


def test_a_check_of_the_projects_own_can_be_a_rule():
    chosen = GateSettings(rules=(GateRule(metric="totals_add_up", over=0.9),))
    measured = simple(marks(5, 99), marks(99, 99), metric="totals_add_up")
    assert decide(measured, chosen).decision == "deploy"
    assert decide(simple(marks(5, 99), marks(99, 99)), chosen).decision == "not_enough_evidence"


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=300))
@settings(max_examples=60)
def test_the_interval_of_a_percentile_holds_it(values):
    value, (low, high) = percentile(values, confidence=0.95)
    assert low <= value <= high
    assert math.isinf(high) == (len(values) < 72)


def test_the_upper_bound_of_the_percentile_covers_the_true_one_as_often_as_it_says():
    import random

    chance = random.Random(3)
    true = -math.log(0.05)  # of an exponential distribution
    covered = sum(
        percentile([chance.expovariate(1) for _ in range(100)], confidence=0.95)[1].high >= true
        for _ in range(1000)
    )
    assert covered >= 960  # one-sided 97.5 %


def test_a_saving_needs_a_rule_on_quality_and_not_being_cut_off_is_none():
    with pytest.raises(ValueError, match="a cost win needs a rule on the quality"):
        GateSettings(rules=(GateRule(metric="truncated", at_most=0.1),), win="latency_seconds")


def test_a_limit_that_no_number_of_cases_proves_is_reported():
    verdict = decide(
        simple(marks(31, 31), marks(31, 31)), GateSettings(rules=(GateRule(metric="json_valid", at_least=1),))
    )
    assert verdict.decision == "not_enough_evidence"
    assert (
        "no number of cases proves 100 %: ask for less, or write `bound: value`" in verdict.rules[0].sentence
    )
    assert verdict.cases_needed is None


def test_preferences_of_a_judge_are_counted_by_session():
    grades = {f"c{i}": 1.0 for i in range(40)}
    tally = JudgeTally(
        model="m", baseline="base", candidate="adapter", pairs=40, wins=40, losses=0, ties=0, inconsistent=0,
        agreement=1, agreement_low=0.9, agreement_high=1, first_place_share=0.5, position_bias_p=1,
        grades=grades,
    )  # fmt: skip
    gate = GateSettings(rules=(GateRule(metric="json_valid", over=0.5),), primary="judge_preference")

    def judged(sessions):
        found = simple(marks(40, 40), marks(40, 40), sessions=sessions)
        return decide(add_judgment(found, tally), gate)

    assert judged({}).decision == "deploy"
    # Two long sessions are two judgements, not forty.
    together = judged({f"c{i}": f"s{i % 2}" for i in range(40)})
    assert together.decision == "not_enough_evidence"
    assert "by session" in together.rules[-1].sentence


def test_a_lower_confidence_is_noted_next_to_what_it_lets_through():
    gate = GateSettings(rules=(GateRule(metric="json_valid", over=0.95),))
    found = simple(marks(40, 40), marks(40, 40))
    assert decide(found, gate).decision == "not_enough_evidence"
    unsure = make_rate("json_valid", scores=found.candidate.metrics["json_valid"].scores, confidence=0.6)
    candidate = found.candidate.model_copy(update={"metrics": {"json_valid": unsure}})
    verdict = decide(found.model_copy(update={"candidate": candidate}), gate)
    assert verdict.decision == "deploy"
    assert "Every bound holds at 60 % only" in verdict.notes[0]
