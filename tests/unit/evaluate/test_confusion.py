"""Which label is taken for which: counted, shown on the page, and given as advice before more cases are."""

import json

import pytest
from gate_samples import new_answer, new_case
from test_gate_vacuous import report_on

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateSettings
from graftwork.evaluate.report import OTHER, UNREADABLE, confuse
from graftwork.grading.checks import GradeCheck

DUE = ["billing"] * 30 + ["access"] * 20 + ["sales"] * 10
SAID = [*["billing"] * 18, *["access"] * 12, *["access"] * 20, *["sales"] * 7, *["lunch"] * 2, "no JSON"]
QUEUE = GradeCheck(name="queue", metric="exact", field="queue")


def make_cases():
    return [
        new_case(str(place), f"ticket {place}", json.dumps({"queue": queue}))
        for place, queue in enumerate(DUE)
    ]


def say(case):
    output = SAID[int(case.id)]
    return output if output == "no JSON" else json.dumps({"queue": output})


def answers(speak=say):
    return [new_answer(case.id, speak(case)) for case in make_cases()]


def test_every_case_is_counted_under_the_label_due_and_the_label_given():
    (found,) = confuse(make_cases(), {"adapter": answers()}, checks=[QUEUE])
    assert found.columns == ("billing", "access", "sales", OTHER, UNREADABLE)
    assert found.counts == ((18, 12, 0, 0, 0), (0, 20, 0, 0, 0), (0, 0, 7, 2, 1))
    assert sum(map(sum, found.counts)) == len(DUE)
    assert [shown.recall for shown in found.classes] == [0.6, 1.0, 0.7]
    assert [shown.precision for shown in found.classes] == [1.0, 20 / 32, 1.0]
    assert found.mistakes()[0] == (12, "billing", "access")


@pytest.mark.parametrize(
    "check",
    [
        GradeCheck(name="it", metric="exact", field="queue", value="billing"),
        GradeCheck(name="it", metric="exact", field="nothing"),
        GradeCheck(name="it", metric="token_f1", field="queue"),
    ],
)
def test_a_check_that_compares_no_labels_has_no_matrix(check):
    assert confuse(make_cases(), {"adapter": answers()}, checks=[check]) == ()


def test_plain_replies_have_a_matrix_too():
    check = GradeCheck(name="label", metric="exact", ignore_case=True)
    cases = [case.model_copy(update={"reference": DUE[int(case.id)].upper()}) for case in make_cases()]
    (found,) = confuse(cases, {"adapter": answers(lambda case: SAID[int(case.id)])}, checks=[check])
    assert found.counts[0][:2] == (18, 12)


def evaluated():
    cases = make_cases()
    checks = [QUEUE.model_dump(mode="json", exclude_defaults=True)]
    report = report_on(
        cases, base=lambda _case: "no JSON", adapter=say, metrics=["json_valid"], checks=checks
    )
    made = confuse(cases, {"base": answers(lambda _: "no"), "adapter": answers()}, checks=[QUEUE])
    return report.model_copy(update={"confusions": made})


def test_advice_names_confused_labels_before_it_asks_for_more_cases():
    gate = GateSettings.model_validate({"rules": [{"metric": "queue", "over": 0.7}], "primary": "queue"})
    verdict = decide(evaluated(), gate)
    assert verdict.decision == "not_enough_evidence"
    assert "12 of 30 cases of queue billing were answered access" in verdict.advice[0]
    assert any("Evaluate on about" in line for line in verdict.advice[1:])
