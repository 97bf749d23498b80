"""The gate: what it lets through, what it stops, and what it leaves open."""

import json

import pytest
from gate_samples import new_answer, new_case, new_generation
from hypothesis import example, given
from hypothesis import strategies as st

from graftwork.evaluate.comparison import compare
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.report import make_rate, make_report, score
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.grading.metrics import METRICS
from graftwork.records.report import Report, SubjectReport

JSON_RULE = GateSettings(rules=(GateRule(metric="json_valid", over=0.9),))


def make_generation(subject, latency=(1.0, 1.1, 0.9), memory=1.0):
    return new_generation(subject, single_latency_seconds=latency, peak_memory_gib=memory)


def subject_of(name, marks, metric="json_valid"):
    scores = {f"c{i}": None if mark is None else float(mark) for i, mark in enumerate(marks)}
    return SubjectReport(
        subject=name, metrics={metric: make_rate(metric, scores=scores)}, generation=make_generation(name)
    )


def report_of(before, after, metric="json_valid", groups=None):
    base, candidate = subject_of("base", before, metric), subject_of("adapter", after, metric)
    return Report(
        cases_hash="0",
        cases=len(after),
        baseline=base,
        candidate=candidate,
        comparisons=compare(base, candidate=candidate),
        groups=groups or {},
    )


def rates(successes, n):
    return [1] * successes + [0] * (n - successes)


def test_all_rules_kept_means_deploy():
    verdict = decide(report_of(rates(40, 120), rates(120, 120)), JSON_RULE)
    assert verdict.decision == "deploy"
    assert verdict.exit_code == 0
    assert verdict.advice == ()
    assert verdict.rules[0].sentence == (
        "JSON-valid rate: 120 of 120 (100 %); the lower bound 97 % is over 90 %."
    )


def test_too_few_cases_are_not_a_failure():
    verdict = decide(report_of(rates(5, 20), rates(20, 20)), JSON_RULE)
    assert verdict.decision == "not_enough_evidence"
    assert verdict.exit_code == 12
    assert verdict.rules[0].outcome == "unknown"
    assert verdict.rules[0].cases_to_decide == 36
    assert "36" in verdict.advice[0]


def test_a_rate_under_the_limit_asks_for_another_try():
    verdict = decide(report_of(rates(5, 100), rates(85, 100)), JSON_RULE)
    assert verdict.decision == "iterate"
    assert verdict.exit_code == 10


def test_a_proven_loss_against_the_base_aborts():
    verdict = decide(report_of(rates(100, 100), rates(93, 100)), JSON_RULE)
    assert verdict.decision == "abort"
    assert verdict.exit_code == 11
    assert "7 cases lost, 0 won" in verdict.reason


def test_a_loss_on_a_metric_without_a_rule_does_not_abort():
    settings = GateSettings(rules=(GateRule(metric="peak_memory_gib", under=2.0),))
    report = report_of(rates(100, 100), rates(50, 100))
    verdict = decide(report, settings)
    assert verdict.decision == "not_enough_evidence"  # memory was not measured in this report
    assert "not measured" in verdict.rules[0].sentence


def test_an_invariant_aborts_only_when_it_is_broken_for_sure():
    settings = GateSettings(rules=(GateRule(metric="json_valid", over=0.9, severity="invariant"),))
    assert decide(report_of(rates(0, 100), rates(85, 100)), settings).decision == "iterate"
    assert decide(report_of(rates(0, 100), rates(50, 100)), settings).decision == "abort"


def test_the_primary_metric_must_beat_the_base():
    settings = GateSettings(rules=(GateRule(metric="json_valid", over=0.5),), primary="json_valid")
    assert decide(report_of(rates(94, 100), rates(100, 100)), settings).decision == "deploy"
    chance = decide(report_of(rates(95, 100), rates(100, 100)), settings)
    assert chance.decision == "not_enough_evidence"
    assert chance.rules[-1].cases_to_decide
    assert decide(report_of(rates(100, 100), rates(100, 100)), settings).decision == "iterate"


def test_failures_that_cluster_in_a_group_are_named():
    groups = {f"c{i}": "recipes" if i >= 70 else "hours" for i in range(100)}
    verdict = decide(report_of(rates(0, 100), rates(75, 100), groups=groups), JSON_RULE)
    assert any("group recipes (25 of 30 cases against 0 of 70" in line for line in verdict.advice)


marks = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=150)
limits = st.integers(1, 99).map(lambda p: p / 100)


@given(marks, limits, st.sampled_from(["must", "invariant"]))
@example(pairs=[(False, False)] * 5 + [(False, True)] * 2, limit=0.09, severity="must")
def test_the_decision_follows_from_the_rules(pairs, limit, severity):
    before, after = zip(*pairs, strict=True)
    settings = GateSettings(rules=(GateRule(metric="json_valid", over=limit, severity=severity),))
    report = report_of(before, after)
    verdict = decide(report, settings)
    rule = verdict.rules[0]
    metric = report.candidate.metrics["json_valid"]
    seen = report.comparisons[0]
    # An invariant may abort too: of two reasons to abort, each has to be clearer (Holm).
    level = 0.05 if severity == "must" else 0.025
    worse = seen.losses > seen.wins and seen.p_value < level
    assert (rule.outcome == "pass") == (metric.low > limit)
    assert (rule.outcome == "fail") == (metric.value <= limit)
    assert (verdict.decision == "deploy") == (rule.outcome == "pass" and not worse)
    if worse:
        assert verdict.decision == "abort"
    if verdict.decision == "not_enough_evidence":
        assert rule.cases_to_decide is not None
        assert rule.cases_to_decide > metric.n
    if verdict.decision != "deploy":
        assert verdict.advice
    assert rule.sentence.endswith(".")
    assert verdict == decide(report, settings)


@given(marks, limits)
def test_one_more_right_answer_never_makes_the_outcome_worse(pairs, limit):
    before, after = zip(*pairs, strict=True)
    settings = GateSettings(rules=(GateRule(metric="json_valid", over=limit),))
    rank = {"fail": 0, "unknown": 1, "pass": 2}
    first = decide(report_of(before, after), settings)
    if False in after:
        fixed = list(after)
        fixed[after.index(False)] = True
        second = decide(report_of(before, fixed), settings)
        assert rank[second.rules[0].outcome] >= rank[first.rules[0].outcome]
        if first.decision == "deploy":
            assert second.decision == "deploy"


@given(marks, limits)
def test_under_mirrors_over(pairs, limit):
    before, after = zip(*pairs, strict=True)
    over = decide(report_of(before, after), GateSettings(rules=(GateRule(metric="json_valid", over=limit),)))
    turned = report_of([not b for b in before], [not a for a in after], metric="truncated")
    under = decide(turned, GateSettings(rules=(GateRule(metric="truncated", under=1 - limit),)))
    assert under.decision == over.decision
    assert under.rules[0].outcome == over.rules[0].outcome


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"metric": "json_valid"}, "needs `over` or `under`"),
        ({"metric": "json_valid", "over": 0.5, "under": 0.9}, "not both"),
        ({"metric": "json_valid", "over": 95}, "for 95 % write 0.95"),
        ({"metric": "latency", "under": 2}, "did you mean latency_seconds"),
    ],
)
def test_a_rule_that_says_nothing_sensible_is_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        GateRule(**rule)


def make_cases(n):
    return tuple(
        new_case(
            f"c{i}",
            "[1] It rains.\nWeather?",
            json.dumps({"answer": "rain", "citations": [1], "refused": i % 2 == 1}),
        )
        for i in range(n)
    )


def answer(case_id, text, finish="stop"):
    return new_answer(case_id, text, tokens=3, prompt_tokens=9, finish_reason=finish, seconds=0.1)


def test_a_report_counts_what_was_answered():
    cases, settings = make_cases(10), EvaluateSettings()
    good = [answer(case.id, case.reference) for case in cases]
    poor = [answer(case.id, '{"answer": "ra', "length") for case in cases]
    before = score(cases, answers=poor, generation=make_generation("base"), settings=settings)
    after = score(
        cases, answers=good, generation=make_generation("adapter", (2.0, 2.2, 1.7)), settings=settings
    )
    report = make_report(cases, baseline=before, candidate=after, settings=settings)
    assert list(after.metrics) == [
        *METRICS,
        "truncated",
        "latency_seconds",
        "tokens_per_second",
        "peak_memory_gib",
        "latency_p95_seconds",
        "tokens_per_task",
    ]
    assert after.metrics["citation_coverage"].n == 5
    assert (before.metrics["truncated"].successes, after.metrics["truncated"].successes) == (10, 0)
    by_name = {c.metric: c for c in report.comparisons}
    assert (by_name["json_valid"].wins, by_name["json_valid"].losses) == (10, 0)
    assert (by_name["truncated"].wins, by_name["truncated"].difference) == (10, -1.0)
    assert by_name["latency_seconds"].difference == pytest.approx(1.0)
    assert Report.from_json(report.to_json()) == report
    verdict = decide(report, GateSettings(rules=(GateRule(metric="latency_seconds", under=2.0),)))
    assert verdict.decision == "iterate"  # three slower answers of three are no loss of quality


def test_cut_off_answers_are_blamed_on_the_token_limit():
    cases, settings = make_cases(40), EvaluateSettings(max_new_tokens=64)
    cut = [answer(c.id, '{"answer', "length") if i < 30 else answer(c.id, "{}") for i, c in enumerate(cases)]
    subject = score(cases, answers=cut, generation=make_generation("adapter"), settings=settings)
    report = make_report(cases, baseline=subject, candidate=subject, settings=settings)
    verdict = decide(report, JSON_RULE)
    assert "30 of 30 invalid answers were cut off at 64 tokens" in verdict.advice[0]
