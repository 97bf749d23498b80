"""Rules that no case is about pass nothing, and a deploy needs a better answer, not only a better form."""

import json

import pytest
from gate_samples import new_answer, new_case, new_generation

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.report import make_report, score
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.project.settings import ProjectSettings

ANSWERED = {"answer": "By the pond.", "citations": [1], "refused": False}
REFUSED = {"answer": "", "citations": [], "refused": True}


def make_cases(*references):
    return [
        new_case(
            str(place),
            f"[1] By the pond.\n\nWhere is it, {place}?",
            reference if isinstance(reference, str) else json.dumps(reference),
        )
        for place, reference in enumerate(references)
    ]


def report_on(cases, *, base, adapter, **settings):
    evaluate = EvaluateSettings.model_validate(settings)
    reports = []
    for subject, say in (("base", base), ("adapter", adapter)):
        answers = [new_answer(case.id, say(case)) for case in cases]
        generation = new_generation(subject, answers=len(cases))
        reports.append(score(cases, answers=answers, generation=generation, settings=evaluate))
    return make_report(cases, baseline=reports[0], candidate=reports[1], settings=evaluate)


def decide_by(report, *rules, **gate):
    return decide(report, GateSettings.model_validate({"rules": list(rules), **gate}))


def never(_case):
    return json.dumps(ANSWERED)


@pytest.mark.parametrize(
    ("references", "output"), [([ANSWERED] * 91, "no reference refuses"), ([REFUSED] * 91, "every reference")]
)
def test_refusal_correctness_passes_nothing_where_no_case_is_of_its_kind(references, output):
    cases = make_cases(*references)
    report = report_on(cases, base=never, adapter=lambda case: case.reference)
    verdict = decide_by(report, {"metric": "refusal_correct", "over": 0.8})
    assert verdict.decision == "not_enough_evidence"
    assert verdict.rules[0].outcome == "unknown"
    assert output in verdict.reason
    assert output in verdict.rules[0].sentence


def test_refusal_correctness_passes_where_both_kinds_of_case_are_there():
    cases = make_cases(*[ANSWERED] * 60, *[REFUSED] * 31)
    report = report_on(cases, base=never, adapter=lambda case: case.reference)
    assert decide_by(report, {"metric": "refusal_correct", "over": 0.8}).decision == "deploy"


def test_a_vacuous_rule_that_fails_has_failed():
    report = report_on(make_cases(*[ANSWERED] * 91), base=never, adapter=lambda _case: json.dumps(REFUSED))
    assert decide_by(report, {"metric": "refusal_correct", "over": 0.8}).rules[0].outcome == "fail"


@pytest.mark.parametrize(
    ("metric", "settings", "reference", "why"),
    [
        ("answer_match", {}, {"queue": "billing"}, "no reference has an answer in words"),
        ("answer_match", {}, "plain words", "no reference can be read as JSON"),
        ("citation_correct", {}, {"answer": "x"}, "no reference cites a source"),
        ("refused_where_due", {"metrics": ["refused_where_due"]}, ANSWERED, "no reference refuses"),
        ("q", {"checks": [{"name": "q", "metric": "exact", "field": "queue"}]}, ANSWERED, "the field queue"),
        ("q", {"checks": [{"name": "q", "all_fields": ["queue"]}]}, "words", "no reference is a JSON object"),
        (
            "q",
            {"checks": [{"name": "q", "contains": "x", "where": {"role": "planner"}}]},
            ANSWERED,
            "no case fits its `where`",
        ),
    ],
)
def test_a_metric_without_a_case_says_why_in_the_verdict(metric, settings, reference, why):
    report = report_on(make_cases(*[reference] * 40), base=never, adapter=never, **settings)
    assert report.candidate.metrics[metric].n == 0
    limit = decide_by(report, {"metric": metric, "over": 0.5})
    assert limit.decision == "not_enough_evidence"
    assert why in limit.reason
    primary = decide_by(report, {"metric": "truncated", "under": 0.5}, primary=metric)
    assert primary.decision == "not_enough_evidence"
    assert why in primary.rules[-1].sentence


def project(**sections):
    return ProjectSettings.model_validate({"project": "p", "data": {"logs": ["l"]}, **sections})


@pytest.mark.parametrize(
    ("evaluate", "chosen"),
    [
        ({}, "answer_match"),
        ({"metrics": ["json_valid"]}, "task_success"),
        ({"metrics": ["json_valid", "chrf"]}, "chrf"),
        ({"checks": [{"name": "short", "metric": "format", "max_words": 9}]}, "answer_match"),
        (
            {
                "checks": [
                    {"name": "queue", "metric": "exact", "field": "queue"},
                    {"name": "all_right", "all_fields": ["queue", "priority"]},
                ]
            },
            "all_right",
        ),
        ({"checks": [{"name": "mine", "metric": "own.py:mine"}], "metrics": ["json_valid"]}, "mine"),
    ],
)
def test_a_project_without_a_primary_metric_must_beat_the_base_on_the_first_metric_of_correctness(
    evaluate, chosen
):
    assert project(evaluate=evaluate).gate.primary == chosen
    assert project(evaluate=evaluate, gate={"rules": [{"metric": "truncated", "under": 0.5}]}).gate.primary


def test_a_project_can_do_without_a_gain_only_by_saying_so():
    rules = [{"metric": "json_valid", "over": 0.5}]
    assert project(gate={"rules": rules, "primary": "none"}).gate.primary_rule is None
    assert project(gate={"rules": rules, "win": "latency_seconds"}).gate.primary_rule is None


def test_well_formed_nonsense_is_not_deployed_by_rules_of_form_alone():
    cases = make_cases(*[{"answer": f"Number {n} of {n + 7}", "citations": [1]} for n in range(91)])
    report = report_on(cases, base=lambda _case: "no JSON", adapter=never)
    gate = project(gate={"rules": [{"metric": "json_valid", "over": 0.9}]}).gate
    assert decide(report, gate).decision != "deploy"
