"""Task success: graded where something says when an answer is right, and nowhere else."""

import pytest
from gate_samples import new_answer, new_case, new_generation

from graftwork.evaluate.report import make_report, score
from graftwork.evaluate.settings import EvaluateSettings, require_evaluated
from graftwork.grading.interface import GradeContext
from graftwork.grading.metrics import METRICS
from graftwork.project.settings import ProjectSettings

BY_RULE = {"name": "says_six", "contains": "six"}


def case(i, **more):
    fields = {"reference": "six", **more}
    return new_case(f"c{i}", "how many?", **fields)


def scored(cases, settings, text="six"):
    answers = [new_answer(c.id, text) for c in cases]
    made = new_generation("adapter", answers=len(cases))
    context = GradeContext(fields=settings.fields)
    return score(cases, answers=answers, generation=made, settings=settings, context=context)


def test_cases_that_bring_checks_are_graded_by_them_whether_it_is_named_or_not():
    cases = [case(0, checks=({"contains": "six"},)), case(1, checks=({"contains": "seven"},))]
    found = scored(cases, EvaluateSettings())
    assert next(iter(found.metrics)) == "task_success"
    assert found.metrics["task_success"].scores == {"c0": 1.0, "c1": 0.0}
    named = scored(cases, EvaluateSettings(metrics=("json_valid",)))
    assert list(named.metrics)[:2] == ["json_valid", "task_success"]


def test_cases_without_checks_are_not_given_a_task_that_nobody_set():
    found = scored([case(0)], EvaluateSettings())
    assert "task_success" not in found.metrics
    assert set(METRICS) <= set(found.metrics)
    # A reference alone is no rule: asked for by name, the figure stays empty and says so.
    asked = scored([case(0)], EvaluateSettings(metrics=("task_success",)))
    assert asked.metrics["task_success"].n == 0


def test_a_rule_of_graft_yaml_is_the_task_of_cases_that_bring_none():
    settings = EvaluateSettings(metrics=("task_success",), checks=(BY_RULE,))
    cases = [case(0), case(1, checks=({"contains": "seven"},))]
    assert scored(cases, settings).metrics["task_success"].scores == {"c0": 1.0, "c1": 0.0}
    assert scored(cases, settings, text="nine").metrics["task_success"].scores == {"c0": 0.0, "c1": 0.0}


def test_an_expected_answer_is_held_to_by_a_rule_without_a_value():
    settings = EvaluateSettings(metrics=("task_success",), checks=({"name": "right", "metric": "exact"},))
    cases = [case(0), case(1, reference="seven")]
    assert scored(cases, settings).metrics["task_success"].scores == {"c0": 1.0, "c1": 0.0}


def test_a_rule_that_is_about_other_cases_sets_no_task():
    rule = {**BY_RULE, "where": {"role": "counter"}}
    settings = EvaluateSettings(metrics=("task_success",), checks=(rule,))
    found = scored([case(0, group="counter"), case(1, group="writer")], settings)
    assert found.metrics["task_success"].scores == {"c0": 1.0, "c1": None}


def test_nearness_without_a_mark_to_reach_is_no_task():
    near = {"name": "near", "metric": "chrf"}
    settings = EvaluateSettings(metrics=("task_success",), checks=(near,))
    assert scored([case(0)], settings).metrics["task_success"].n == 0
    reached = EvaluateSettings(metrics=("task_success",), checks=({**near, "at_least": 0.5},))
    assert scored([case(0)], reached).metrics["task_success"].value == 1.0


def test_a_rule_of_the_gate_on_a_task_that_nobody_set_is_refused_with_the_fix():
    unset = EvaluateSettings(metrics=("task_success",))
    with pytest.raises(ValueError, match="write a rule under evaluate"):
        require_evaluated("task_success", unset)
    require_evaluated("task_success", EvaluateSettings(metrics=("task_success",), checks=(BY_RULE,)))
    project = {
        "project": "p",
        "data": {"logs": ["l.jsonl"]},
        "evaluate": {"metrics": ["task_success"]},
        "gate": {"rules": [{"metric": "task_success", "at_least": 0.98}]},
    }
    with pytest.raises(ValueError, match="nothing says when an answer is correct"):
        ProjectSettings.model_validate(project)
    project["evaluate"]["checks"] = [BY_RULE]
    assert ProjectSettings.model_validate(project)


def test_the_power_of_the_cases_is_reported_for_task_success_if_it_is_first():
    cases = [case(i, checks=({"contains": "six"},)) for i in range(20)]
    settings = EvaluateSettings()
    before, after = scored(cases, settings, text="no"), scored(cases, settings)
    before = before.model_copy(update={"subject": "base"})
    found = make_report(cases, baseline=before, candidate=after, settings=settings)
    assert found.comparisons[0].metric == "task_success"
    assert found.power is not None
