"""Own metrics as they come: whatever a function says or does, what is ungraded never helps a deploy."""

import pytest
from gate_samples import marks, new_answer, new_case, new_generation, report, subject
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.report import make_report, score
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.grading.checks import GradeCheck, grade
from graftwork.grading.interface import GradeContext
from graftwork.records.report import Report

MINE = {"name": "mine", "metric": "own.py:mine"}


def cases(n, **more):
    return [new_case(f"c{i}", f"question {i}", "r", **more) for i in range(n)]


def good(_i, _r):
    return "good"


def evaluated(folder, source, *, answer, before=good, n=200, repeats=1, settings=None):
    """The report of an adapter that says `said(i, repeat)` to case i, by the metric of `source`."""
    (folder / "own.py").write_text(source)
    settings = settings or EvaluateSettings(
        metrics=("json_valid",), checks=(GradeCheck.model_validate(MINE),)
    )
    asked = cases(n)

    def of(name, speak):
        answers = [new_answer(f"c{i}", speak(i, r), repeat=r) for i in range(n) for r in range(repeats)]
        made = new_generation(name, answers=n)
        context = GradeContext(fields=settings.fields, folder=folder)
        return score(asked, answers=answers, generation=made, settings=settings, context=context)

    found = make_report(
        asked, baseline=of("base", before), candidate=of("adapter", answer), settings=settings
    )
    return Report.from_json(found.to_json())


OVER = GateSettings(rules=(GateRule(metric="mine", over=0.9),))
KEEPS = GateSettings(rules=(GateRule(metric="mine", margin=0.05, against="base"),))
BETTER = GateSettings(rules=(GateRule(metric="mine", over=0.1),), primary="mine")


GRADES = (
    "import sys\n"
    "def exit(): sys.exit(0)\n"
    "def raise_(e): raise e\n"
    "class Odd(Exception):\n"
    "    def __repr__(self): raise ValueError('no')\n"
    "    __str__ = __repr__\n"
    "def mine(case, text): return {} if text == 'bad' else text == 'good'\n"
)
BEFORE = {False: good, True: lambda i, _r: "good" if i % 2 else "wrong"}
"""What the base answers: all is good, or half of it where the adapter has to be better."""


def test_a_metric_that_grades_every_answer_lets_good_ones_deploy(tmp_path):
    for gate in (OVER, KEEPS, BETTER):
        before = BEFORE[gate is BETTER]
        fine = evaluated(tmp_path, GRADES.format("None"), answer=good, before=before, n=100)
        assert decide(fine, gate).decision == "deploy"


@pytest.mark.parametrize(
    "bad",
    [
        "None", "1 / 0", "float('nan')", "float('inf')", "'yes'", "1.2", "-0.1", "10**400", "exit()", "[]",
        "Odd()", "raise_(Odd())",
    ],
)  # fmt: skip
def test_a_metric_that_fails_on_bad_answers_never_helps_a_deploy(tmp_path, bad):
    for before, gates in ((BEFORE[False], (OVER, KEEPS)), (BEFORE[True], (BETTER,))):
        source = GRADES.format(bad)
        half = evaluated(
            tmp_path, source, answer=lambda i, _r: "bad" if i % 2 else "good", before=before, n=100
        )
        nothing = evaluated(tmp_path, source, answer=lambda i, _r: "bad", before=before, n=100)
        for gate in gates:
            verdict = decide(half, gate)
            assert verdict.decision != "deploy"
            sentences = " ".join(rule.sentence for rule in verdict.rules)
            assert "50 more could not be graded and count against it" in sentences
            assert decide(nothing, gate).decision == "not_enough_evidence"


def test_ctrl_c_in_a_metric_ends_the_evaluation(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        evaluated(tmp_path, GRADES.format("raise_(KeyboardInterrupt)"), answer=lambda i, _r: "bad", n=3)


def test_not_applicable_by_the_case_alone_is_no_failure(tmp_path):
    source = "def mine(case, text): return None if int(case.id[1:]) % 2 else text == 'good'\n"
    found = evaluated(tmp_path, source, answer=lambda i, _r: "good")
    metric = found.candidate.metrics["mine"]
    assert (metric.n, metric.failed) == (100, 0)
    verdict = decide(found, OVER)
    assert verdict.decision == "deploy"
    assert "graded" not in verdict.rules[0].sentence


def test_none_for_one_answer_and_a_grade_for_another_to_the_same_case_is_a_failure(tmp_path):
    source = "def mine(case, text): return None if text == 'bad' else True\n"
    sampled = EvaluateSettings(
        metrics=("json_valid",),
        checks=(GradeCheck.model_validate(MINE),),
        repeats=2,
        sampling={"temperature": 1.0},
    )
    found = evaluated(
        tmp_path, source, answer=lambda i, r: "bad" if r else "good", repeats=2, settings=sampled
    )
    metric = found.candidate.metrics["mine"]
    assert (metric.n, metric.failed) == (0, 200)
    assert "must depend on the case alone" in metric.why_failed
    assert decide(found, OVER).decision == "not_enough_evidence"


def test_an_exception_of_a_metric_is_reported_on_one_short_line(tmp_path):
    source = "def mine(case, text): raise ValueError('a\\nb ' + 'x' * 10_000)\n"
    metric = evaluated(tmp_path, source, answer=lambda i, _r: "good", n=3).candidate.metrics["mine"]
    assert "own.py:1: ValueError: a b xxx" in metric.why_failed
    assert len(metric.why_failed) < 400
    assert metric.failed == 3
    assert metric.failed_cases == ("c0", "c1", "c2")


@pytest.mark.parametrize("given", ["numpy.float32(0.5)", "numpy.float64(0.5)", "numpy.array(0.5)"])
def test_a_number_of_numpy_is_a_number(tmp_path, given):
    source = f"import numpy\ndef mine(case, text): return {given}\n"
    metric = evaluated(tmp_path, source, answer=lambda i, _r: "good", n=2).candidate.metrics["mine"]
    assert (metric.value, metric.failed) == (0.5, 0)


def test_true_of_numpy_is_true(tmp_path):
    source = "import numpy\ndef mine(case, text): return numpy.bool_(True)\n"
    metric = evaluated(tmp_path, source, answer=lambda i, _r: "good", n=2).candidate.metrics["mine"]
    assert (metric.value, metric.failed) == (1.0, 0)


def test_a_case_cannot_name_a_function_that_graft_yaml_does_not(tmp_path):
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        f"def mine(case, text):\n    Path({str(tmp_path / 'ran')!r}).touch()\n    return True\n"
    )
    (case,) = cases(1, checks=({"function": "own.py:mine"},))
    context = GradeContext(folder=tmp_path)
    assert grade("task_success", case, "x", context=context) is None
    assert "graft.yaml does not name it" in context.failed[0].reason
    assert not (tmp_path / "ran").exists()
    named = GradeContext(folder=tmp_path, checks={"mine": GradeCheck.model_validate(MINE)})
    assert grade("task_success", case, "x", context=named) == 1.0
    assert (tmp_path / "ran").exists()


def test_marks_that_reviewers_gave_to_the_logs_texts_prove_nothing_about_other_texts():
    known = [1.0 if i < 10 else None for i in range(100)]
    found = report(
        subject("adapter", {"reviewer_score": known}),
        subject("base", {"reviewer_score": [None] * 100}),
        others=(subject("log", {"reviewer_score": marks(60, 100)}),),
    )
    over = decide(found, GateSettings(rules=(GateRule(metric="reviewer_score", over=0.5),)))
    assert over.decision == "not_enough_evidence"
    assert "90 more could not be graded" in over.rules[0].sentence
    assert "reviewer_score grades another subject's answer to 90 cases and not this one's" in over.advice[0]
    kept = decide(found, GateSettings(rules=(GateRule(metric="reviewer_score", margin=0.4, against="log"),)))
    assert kept.decision == "not_enough_evidence"


GATES = {
    "limit": GateSettings(rules=(GateRule(metric="mine", over=0.6),)),
    "upper": GateSettings(rules=(GateRule(metric="mine", under=0.6),)),
    "guardrail": GateSettings(rules=(GateRule(metric="mine", margin=0.3, against="base"),)),
    "primary": GateSettings(rules=(GateRule(metric="mine", over=0.01),), primary="mine"),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
@hypothesis_settings(max_examples=80)
@given(data=st.data())
def test_to_leave_an_answer_ungraded_never_turns_a_verdict_into_deploy(gate, data):
    """However the grades lie: what a grader drops could have been dropped because it was wrong."""
    n = data.draw(st.integers(4, 40))
    before = data.draw(st.lists(st.sampled_from([0, 1]), min_size=n, max_size=n))
    after = data.draw(st.lists(st.sampled_from([0, 1, 1, 1]), min_size=n, max_size=n))
    together = data.draw(st.booleans())
    sessions = {f"c{i}": f"s{i // 3}" for i in range(n)} if together else {}
    wrong = 1 if gate is GATES["upper"] else 0
    bad = [i for i in range(n) if after[i] == wrong]
    dropped = set(data.draw(st.lists(st.sampled_from(bad), unique=True))) if bad else set()

    def verdict(marks_of_adapter):
        return decide(
            report(
                subject("adapter", {"mine": marks_of_adapter}, sessions=sessions),
                subject("base", {"mine": before}, sessions=sessions),
                sessions=sessions,
            ),
            gate,
        ).decision

    if verdict(after) != "deploy":
        assert verdict([None if i in dropped else mark for i, mark in enumerate(after)]) != "deploy"
