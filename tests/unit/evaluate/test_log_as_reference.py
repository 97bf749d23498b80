"""The log's answers are the references: nobody is compared with it by what holds answers against them."""

from dataclasses import replace

import pytest
from gate_samples import new_case

from graftwork.evaluate.comparison import compare
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.report import make_report, score, slice_report
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.evaluate.subjects import answers_of_log, generation_of_log
from graftwork.grading.checks import GradeCheck, grade
from graftwork.grading.interface import GradeContext
from graftwork.grading.metrics import AGAINST_REFERENCE, GRADERS

REFERENCE = '{"answer": "The ship came in 1901 [1].", "citations": [1], "refused": false}'
REFUSAL = '{"answer": "", "citations": [], "refused": true}'


def make_case(n, **more):
    values = {"reference": REFERENCE, **more}
    return new_case(f"c{n}", f"[1] Ship {n} came in 1901.\nWhen?", **values)


def log_report(cases, settings):
    generation = generation_of_log(cases, latency_cases=0)
    return score(cases, answers=answers_of_log(cases), generation=generation, settings=settings)


def model_report(cases, settings, text=REFERENCE):
    answers = [answer.model_copy(update={"text": text}) for answer in answers_of_log(cases)]
    generation = generation_of_log(cases, latency_cases=0).model_copy(update={"subject": "base"})
    return score(cases, answers=answers, generation=generation, settings=settings)


@pytest.mark.parametrize("name", sorted(AGAINST_REFERENCE))
def test_metrics_against_the_reference_are_not_computed_for_the_log(name):
    settings = EvaluateSettings(metrics=(name, "json_valid"))
    cases = [make_case(0, rejected="no"), make_case(1, reference=REFUSAL, rejected="no")]
    log, base = log_report(cases, settings), model_report(cases, settings)
    assert name in base.metrics
    assert name not in log.metrics
    compared = {comparison.metric for comparison in compare(log, candidate=base)}
    assert "json_valid" in compared
    assert name not in compared


def test_the_table_of_such_metrics_is_whole():
    """One text, several references: whatever grades it now so, now so, compares it with them."""
    fields = EvaluateSettings().fields
    other = '{"answer": "Nobody counted 17 boats [2].", "citations": [2], "refused": false}'
    texts = (REFERENCE, other, REFUSAL)
    cases = [make_case(n, reference=reference, rejected=REFERENCE) for n, reference in enumerate(texts)]
    seen = set()
    for name, grader in GRADERS.items():
        for text in texts:
            grades = {grader(case, text, fields) for case in cases} - {None}
            seen |= {name} if len(grades) > 1 else set()
    # Asked only where the reference refuses, answers or calls tools, these still depend on it.
    asked_sometimes = {"refused_where_due", "answered_where_due", "tool_calls", "tool_call_f1"}
    asked_sometimes |= {"no_call_where_due"}
    assert seen | asked_sometimes == AGAINST_REFERENCE


@pytest.mark.parametrize(
    ("check", "asked"),
    [
        ({"name": "same", "metric": "exact"}, False),
        ({"name": "same", "metric": "numeric"}, False),
        ({"name": "same", "metric": "chrf", "at_least": 0.5}, False),
        ({"name": "same", "metric": "exact", "value": "x"}, True),
        ({"name": "same", "metric": "numeric", "value": 1901}, True),
        ({"name": "same", "metric": "contains", "value": "ship"}, True),
    ],
)
def test_a_rule_without_a_value_is_one_of_them(check, asked):
    settings = EvaluateSettings(metrics=("task_success",), checks=(check,))
    log = log_report([make_case(0)], settings)
    assert ("same" in log.metrics, "task_success" in log.metrics) == (asked, asked)


def test_the_task_of_a_case_is_graded_where_no_rule_of_it_compares():
    cases = [
        make_case(0, checks=({"exact": None}, {"contains": "ship"})),
        make_case(1, checks=({"contains": "ship"},)),
    ]
    log = log_report(cases, EvaluateSettings(metrics=("task_success",)))
    assert log.metrics["task_success"].scores == {"c0": None, "c1": 1.0}


def test_slices_against_the_log_leave_them_out():
    settings = EvaluateSettings(metrics=("answer_match", "json_valid"), slices=("domain",))
    cases = [make_case(n, domain="ab"[n % 2]) for n in range(4)]
    log, base = log_report(cases, settings), model_report(cases, settings)
    report = make_report(cases, baseline=log, candidate=base, settings=settings)
    sliced = slice_report(report, cases, by=settings.slices)
    assert {figure.metric for figure in sliced.slices} >= {"json_valid"}
    assert "answer_match" not in {figure.metric for figure in sliced.slices}


def test_a_gate_rule_against_the_log_on_such_a_metric_proves_nothing_and_says_what_is_known_of_the_log():
    settings = EvaluateSettings(metrics=("answer_match", "json_valid"))
    cases = [make_case(n) for n in range(3)]
    log, base = log_report(cases, settings), model_report(cases, settings)
    report = make_report(cases, baseline=base, candidate=base, others=(log,), settings=settings)
    reported = report.model_copy(update={"remarks": ("The log is a flatterer.",)})

    def gate(against):
        rule = {"metric": "answer_match", "against": against, "margin": 0.1}
        return decide(reported, GateSettings.model_validate({"rules": [rule]}))

    held = gate("log")
    assert held.rules[0].outcome == "unknown"
    assert "was not compared on any case" in held.rules[0].sentence
    assert "The log is a flatterer." in held.notes
    assert "The log is a flatterer." not in gate("base").notes


OWN = """
import json

def reads_reference(case, text):
    return json.loads(case.reference)["queue"] in text

def dumps_case(case, text):
    return case.model_dump()["reference"] == text

def reads_prompt(case, text):
    return case.messages[0].content != text and case.group is None
"""


def test_an_own_metric_that_reads_the_reference_says_nothing_of_the_log(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    case = new_case("1", "a ticket", '{"queue": "billing"}')
    names = ("reads_reference", "dumps_case", "reads_prompt")
    checks = {name: GradeCheck(name=name, metric=f"own.py:{name}") for name in names}
    model = GradeContext(checks=checks, folder=tmp_path)
    log = replace(model, is_reference=True)
    assert [grade(name, case, case.reference, context=model) for name in names] == [1.0, 1.0, 1.0]
    assert [grade(name, case, case.reference, context=log) for name in names] == [None, None, 1.0]
    assert not log.failed
