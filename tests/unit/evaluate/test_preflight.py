"""Metrics and rules tried out before training: what would be found only afterwards is found now."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
from gate_samples import new_case

from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.preflight import spoil, try_out
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.grading.interface import GradeContext

QUEUES = ("billing", "access", "sales")
QUEUE = {"name": "queue", "metric": "exact", "field": "queue"}


def make_cases(count=90, reply=None):
    made = []
    for place in range(count):
        text = json.dumps({"queue": QUEUES[place % 3], "priority": "low"}) if reply is None else reply
        made.append(new_case(str(place), f"ticket {place}", text))
    return made


def trial(*rules, cases=None, folder=None, primary="queue", **evaluate):
    settings = EvaluateSettings.model_validate({"metrics": ["json_valid"], "checks": [QUEUE], **evaluate})
    gate = {"rules": list(rules) or [{"metric": "queue", "over": 0.5}], "primary": primary}
    metrics, problems = try_out(
        make_cases() if cases is None else cases,
        evaluate=settings,
        gate=GateSettings.model_validate(gate),
        context=GradeContext(fields=settings.fields, folder=folder),
    )
    return SimpleNamespace(metrics=metrics, problems=problems)


def problems(found, severity="error"):
    return [problem.what for problem in found.problems if problem.severity == severity]


def test_sound_metrics_and_rules_have_no_problems():
    found = trial()
    assert found.problems == []
    (queue,) = [metric for metric in found.metrics if metric.name == "queue"]
    assert (queue.own, queue.cases) == (1.0, 90)
    assert queue.spoiled < 0.5
    assert queue.constant == pytest.approx(1 / 3)


def test_ten_spoiled_copies_are_made_and_none_is_the_reply_itself():
    cases = make_cases(3)
    copies = spoil(0, cases)
    assert len(copies) == 10
    assert cases[0].reference not in copies


@pytest.mark.parametrize(
    ("rule", "evaluate"),
    [
        ({"metric": "json_valid", "over": 0.99}, {}),
        ({"metric": "queue", "at_least": 1.0}, {}),
        ({"metric": "latency_seconds", "under": 9, "at": "p95"}, {"latency_cases": 8}),
        ({"metric": "latency_seconds", "under": 9}, {"latency_cases": 4}),
        ({"metric": "latency_seconds", "under": 9, "at": "mean"}, {"latency_cases": 12}),
    ],
)
def test_a_rule_that_so_many_cases_cannot_prove_is_an_error(rule, evaluate):
    (what,) = problems(trial(rule, **evaluate))
    assert "cannot pass with 90 cases" in what


def test_the_same_rules_pass_the_trial_with_enough_cases():
    rules = ({"metric": "json_valid", "over": 0.95}, {"metric": "latency_seconds", "under": 9, "at": "p95"})
    assert problems(trial(*rules, latency_cases=80)) == []


def test_few_cases_cannot_show_a_gain_however_large():
    found = trial({"metric": "truncated", "under": 0.9}, cases=make_cases(5))
    assert any(
        "better than the base" in what and "cannot pass with 5 cases" in what for what in problems(found)
    )


@pytest.mark.parametrize(
    ("evaluate", "primary", "why"),
    [
        ({"checks": [QUEUE, {"name": "tag", "metric": "exact", "field": "tag"}]}, "queue", "the field tag"),
        ({"metrics": ["answer_match"]}, "answer_match", "no reference has an answer in words"),
        ({"metrics": ["refused_where_due"]}, "queue", "no reference refuses"),
    ],
)
def test_a_named_metric_that_grades_no_case_is_an_error_that_says_why(evaluate, primary, why):
    found = trial({"metric": "truncated", "under": 0.9}, primary=primary, **evaluate)
    assert any("grades none of the held-out cases" in what for what in problems(found))
    assert any(why in problem.why for problem in found.problems)


def test_a_rule_that_holds_vacuously_is_an_error():
    found = trial({"metric": "refusal_correct", "over": 0.8}, metrics=["refusal_correct"])
    assert problems(found) == ["the rule on refusal_correct proves nothing on this log"]
    assert found.problems[0].why == "no reference refuses"


def test_a_metric_that_calls_everything_right_is_named_and_cannot_be_the_primary_one():
    check = {"name": "anything", "contains": "impossible", "need": "none"}
    rule = {"metric": "anything", "over": 0.5}
    found = trial(rule, checks=[QUEUE, check])
    assert "anything calls every answer right, spoiled ones too" in problems(found, "warning")
    assert problems(found) == []
    assert problems(trial(rule, checks=[QUEUE, check], primary="anything"))


def test_a_metric_that_calls_none_of_the_logs_replies_right_is_named():
    check = {"name": "never", "contains": "impossible"}
    found = trial({"metric": "never", "over": 0.5}, checks=[QUEUE, check])
    assert "never calls not one of the log's own replies right" in problems(found, "warning")


def test_a_rule_that_one_answer_to_everything_keeps_is_named():
    found = trial({"metric": "queue", "over": 0.2})
    (what,) = problems(found, "warning")
    assert "one answer to everything reaches 33.3 % on queue" in what


@pytest.mark.parametrize(("limit", "advice"), [(0.2, "ask for more than 33.3 % of queue"), (0.9, "")])
def test_advice_on_a_limit_can_be_followed(limit, advice):
    found = trial({"metric": "queue", "over": limit})
    assert [problem.fix for problem in found.problems] == [advice] * bool(advice)
    check = {"name": "short", "regex": "^.{2,60}$"}
    always = trial({"metric": "short", "over": 0.8}, checks=[QUEUE, check])
    (problem,) = [problem for problem in always.problems if "one answer to everything" in problem.what]
    assert problem.fix.startswith("take the rule out: no limit on short")


def test_nothing_that_separates_right_from_wrong_is_an_error():
    found = trial({"metric": "json_valid", "over": 0.9}, checks=[], primary="task_success")
    assert problems(found) == ["nothing says when an answer is right, so no adapter could be deployed"]


def test_an_own_metric_that_raises_is_an_error_with_its_line(tmp_path):
    (tmp_path / "own.py").write_text("def mine(case, text):\n    return case.nothing\n")
    check = {"name": "mine", "metric": "own.py:mine"}
    found = trial({"metric": "mine", "over": 0.5}, checks=[QUEUE, check], folder=tmp_path)
    assert problems(found)[0] == "mine failed on 90 of the log's own replies"
    assert "own.py:2" in found.problems[0].why


def test_a_slow_own_metric_is_not_waited_for(tmp_path):
    from graftwork.evaluate.preflight import try_metric
    from graftwork.grading.checks import GradeCheck

    (tmp_path / "own.py").write_text("def mine(case, text):\n    return True\n")
    check = GradeCheck(name="mine", metric="own.py:mine")
    ticks = iter(range(10_000))
    context = GradeContext(checks={"mine": check}, folder=tmp_path)
    found = try_metric("mine", make_cases(), context=context, clock=lambda: next(ticks))
    assert 0 < found.cases < 10


def test_a_constant_answer_counts_only_where_every_case_was_graded():
    from graftwork.evaluate.preflight import SECONDS, try_metric

    cases = make_cases(12)
    full = try_metric("chrf", cases, context=GradeContext(), clock=lambda: 0.0)
    calls = 0

    def tick() -> float:
        nonlocal calls
        calls += 1
        return 0.0

    try_metric("chrf", cases, context=GradeContext(), clock=tick)
    for graded in range(1, calls, 7):
        clock = partial(next, iter([0.0] * graded), 2 * SECONDS)
        cut = try_metric("chrf", cases, context=GradeContext(), clock=clock)
        assert cut.constant is None or cut.constant <= full.constant


def test_long_replies_make_the_sample_smaller_and_not_the_floor_higher():
    from graftwork.evaluate.preflight import try_metric

    cases = [case.model_copy(update={"reference": f"{case.reference} " * 200}) for case in make_cases()]
    calls = 0

    def tick() -> float:
        nonlocal calls
        calls += 1
        return 0.0

    found = try_metric("json_valid", cases, context=GradeContext(), clock=tick)
    assert found.constant is not None
    assert calls < len(cases) * 10


def test_a_margin_that_equals_cannot_prove_is_a_warning():
    found = trial({"metric": "queue", "against": "base", "margin": 0.01})
    assert any("margin of 1 points" in what for what in problems(found, "warning"))
    assert problems(found) == []
