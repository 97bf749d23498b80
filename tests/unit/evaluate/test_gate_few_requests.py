"""A bound that so few measurements cannot give proves nothing; and how many would give it is reported."""

import math
import random
from statistics import median

import pytest
from gate_samples import marks, new_answer, number, report, subject

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.report import measure
from graftwork.evaluate.statistics.intervals import fewest_for_quantile, quantile_interval
from graftwork.records.report import Generation, Metric

QUALITY = {"json_valid": marks(100, 100)}
WELL = GateRule(metric="json_valid", over=0.9)


def timed(count, *, seconds=10.0, against=None, cases=100):
    times = [seconds + i / 100 for i in range(count)]
    grades = {"json_valid": marks(cases, cases)}
    base = [against + i / 100 for i in range(count)] if against is not None else ()
    return report(subject("adapter", grades, latency=times), subject("base", grades, latency=base))


@pytest.mark.parametrize(("at", "needed"), [(None, 6), ("median", 6), ("mean", 16)])
def test_a_limit_on_latency_needs_enough_requests_at_95_percent(at, needed):
    # A mean has to allow for a request that takes twice as long as the slowest.
    gate = GateSettings(rules=(GateRule(metric="latency_seconds", under=13 if at == "mean" else 12, at=at),))
    assert fewest_for_quantile(0.5, confidence=0.95) == 6
    for count in range(1, needed):
        verdict = decide(timed(count), gate)
        assert verdict.decision == "not_enough_evidence", count
        (rule,) = verdict.rules
        assert rule.cases_to_decide == needed
        assert (rule.low, rule.high) == (None, None)
        assert f"about {needed} timed requests would settle it (evaluate.latency_cases)" in rule.sentence
        assert f"{count} request{'s are' if count > 1 else ' is'} too few for a bound" in rule.sentence
        assert f"raise evaluate.latency_cases to {needed}" in verdict.advice[0]
        assert f"About {needed} timed requests would settle it." in verdict.reason
    assert decide(timed(needed), gate).decision == "deploy"


def test_more_confidence_asks_for_more_requests():
    sure = fewest_for_quantile(0.5, confidence=0.99)
    assert sure == 8

    def asked(count):
        made = timed(count).candidate.metrics["latency_seconds"].model_copy(update={"confidence": 0.99})
        found = timed(count)
        candidate = found.candidate.model_copy(update={"metrics": {"latency_seconds": made}})
        gate = GateSettings(rules=(GateRule(metric="latency_seconds", under=12),))
        return decide(found.model_copy(update={"candidate": candidate}), gate).decision

    assert asked(7) == "not_enough_evidence"
    assert asked(8) == "deploy"


def test_too_few_requests_that_are_all_too_slow_are_not_called_enough():
    gate = GateSettings(rules=(GateRule(metric="latency_seconds", under=5, severity="invariant"),))
    assert decide(timed(3), gate).decision == "iterate"  # seen to be slow, but not for sure: no abort
    slow = decide(timed(6), gate)
    assert slow.decision == "abort"
    assert "inf" not in slow.reason


def test_an_invariant_on_a_percentile_without_an_upper_bound_does_not_say_infinity():
    gate = GateSettings(rules=(GateRule(metric="latency_seconds", under=5, at="p95", severity="invariant"),))
    verdict = decide(timed(30), gate)
    assert verdict.decision == "abort"
    assert "inf" not in verdict.reason
    assert "10.25 s and more" in verdict.reason


def test_a_rule_on_the_value_alone_gets_it_with_the_note():
    gate = GateSettings(rules=(GateRule(metric="latency_seconds", under=12, bound="value"),))
    verdict = decide(timed(2), gate)
    assert verdict.decision == "deploy"
    assert "luck is not ruled out" in verdict.notes[0]


def test_more_requests_than_there_are_cases_are_not_promised_by_the_setting_alone():
    gate = GateSettings(rules=(GateRule(metric="latency_seconds", under=12, at="p95"),))
    advice = decide(timed(20, cases=31), gate).advice[0]
    assert "evaluate.latency_cases to 72" in advice
    assert "there are 31 cases: hold out more rows too" in advice


def test_a_guardrail_and_a_saving_in_seconds_need_five_pairs():
    guard = GateSettings(rules=(GateRule(metric="latency_seconds", margin=1, against="base"),))
    saving = GateSettings(rules=(WELL,), win="latency_seconds")
    for gate in (guard, saving):
        for count in (2, 3, 4):
            verdict = decide(timed(count, against=20.0), gate)
            assert verdict.decision == "not_enough_evidence", (gate, count)
            assert verdict.rules[-1].cases_to_decide == 5
            assert "evaluate.latency_cases" in verdict.rules[-1].sentence
        assert decide(timed(5, against=20.0), gate).decision == "deploy"


def test_unequal_numbers_of_requests_are_not_a_way_round():
    gate = GateSettings(rules=(GateRule(metric="latency_seconds", margin=1, against="base"),))
    found = report(
        subject("adapter", QUALITY, latency=[10.0, 10.1]),
        subject("base", QUALITY, latency=[20.0, 20.1, 20.2]),
    )
    assert decide(found, gate).decision == "not_enough_evidence"


def test_a_few_slow_requests_prove_no_loss():
    gate = GateSettings(
        rules=(WELL,), abort_when={"worse_on": ["latency_seconds"], "against": "base", "by": "interval"}
    )
    assert decide(timed(1, seconds=30, against=20.0), gate).decision == "deploy"
    assert decide(timed(4, seconds=30, against=20.0), gate).decision == "deploy"
    assert decide(timed(8, seconds=30, against=20.0), gate).decision == "abort"


def test_an_old_report_without_single_times_is_held_to_the_same_count():
    gate = GateSettings(rules=(GateRule(metric="latency_seconds", under=12),))

    def kept(n):
        one = subject("adapter", QUALITY).model_copy(
            update={"metrics": {"latency_seconds": number("latency_seconds", 9, 8, 10, n=n, unit="s")}}
        )
        return report(one, subject("base", QUALITY))

    assert decide(kept(5), gate).decision == "not_enough_evidence"
    assert decide(kept(6), gate).decision == "deploy"


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    chance = random.Random(5)
    for n in (6, 8, 21):
        held = 0
        for _ in range(2000):
            low, high = quantile_interval(
                [chance.expovariate(1) for _ in range(n)], quantile=0.5, confidence=0.95
            )
            held += low <= math.log(2) <= high
        assert held / 2000 >= 0.94, n


def generation(**more):
    fields = {
        "subject": "adapter",
        "answers": 1,
        "seconds": 1,
        "tokens_per_second": 0,
        "single_latency_seconds": (),
        "peak_memory_gib": 0,
        "settings": {},
    }
    return Generation(**{**fields, **more})


def sentence_on(losses):
    return {
        case: [new_answer(case, "", tokens=0, prompt_tokens=0, seconds=0, reference_loss=loss)]
        for case, loss in losses.items()
    }


SESSIONS = {f"c{i}": f"s{i // 10}" for i in range(60)}
LOSSES = {f"c{i}": 1.0 + 0.2 * (i // 10 % 2) for i in range(60)}
"""Six sessions of ten turns that say the same."""


def test_perplexity_of_turns_that_hang_together_is_bounded_by_their_sessions():
    alone = measure(sentence_on(LOSSES), generation=generation())["reference_perplexity"]
    together = measure(sentence_on(LOSSES), generation=generation(), sessions=SESSIONS)[
        "reference_perplexity"
    ]
    assert together.value == alone.value
    assert together.clusters == 6
    assert alone.clusters == 0
    assert together.method == "bootstrap of the mean loss, by session"
    assert together.high - together.low > 1.5 * (alone.high - alone.low)


def weighed(losses, sessions, *, old=False):
    metric = measure(sentence_on(losses), generation=generation(), sessions={} if old else sessions)
    candidate = subject("adapter", QUALITY)
    candidate = candidate.model_copy(update={"metrics": {**candidate.metrics, **metric}})
    return report(candidate, subject("base", QUALITY), sessions=sessions)


@pytest.mark.parametrize("old", [False, True], ids=["measured now", "kept from before"])
def test_a_limit_on_perplexity_goes_by_the_sessions(old):
    value = math.exp(1.1)
    gate = GateSettings(rules=(GateRule(metric="reference_perplexity", under=value * 1.05),))
    assert decide(weighed(LOSSES, {}), gate).decision == "deploy"
    verdict = decide(weighed(LOSSES, SESSIONS, old=old), gate)
    assert verdict.decision == "not_enough_evidence"
    (rule,) = verdict.rules
    assert rule.cases_to_decide > 60
    assert f"about {rule.cases_to_decide} fresh cases like these would settle it" in rule.sentence
    assert verdict.cases_needed is not None


def test_few_sessions_bound_no_perplexity():
    gate = GateSettings(rules=(GateRule(metric="reference_perplexity", under=100),))
    three = {case: f"s{i % 3}" for i, case in enumerate(LOSSES)}
    verdict = decide(weighed(LOSSES, three), gate)
    assert verdict.decision == "not_enough_evidence"
    assert "3 sessions are too few for a bound" in verdict.rules[0].sentence
    assert decide(weighed(LOSSES, SESSIONS), gate).decision == "deploy"


def test_a_loss_that_is_no_number_is_counted_and_proves_nothing():
    losses = {f"c{i}": 1.0 + i / 100 for i in range(30)} | {"c30": math.nan, "c31": math.inf, "c32": 800.0}
    metric = measure(sentence_on(losses), generation=generation())["reference_perplexity"]
    assert metric.failed == 3
    assert metric.n == 30
    assert math.isfinite(metric.high)
    assert Metric.from_json(metric.to_json()) == metric
    gate = GateSettings(rules=(GateRule(metric="reference_perplexity", under=100),))
    verdict = decide(weighed(losses, {}), gate)
    assert verdict.decision == "not_enough_evidence"
    assert "3 more could not be graded" in verdict.rules[0].sentence


def test_the_report_says_the_interval_of_the_gate():
    times = tuple(9.0 + i / 10 for i in range(8))
    metric = measure({}, generation=generation(single_latency_seconds=times))["latency_seconds"]
    assert (metric.value, metric.low, metric.high) == (median(times), 9.0, 9.7)
    assert metric.method == "exact (order statistics)"
