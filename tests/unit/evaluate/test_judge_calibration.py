"""A judge compared with people: agreement, kappa, their intervals, and what the gate makes of it."""

import pytest
from gate_samples import marks, report, subject
from hypothesis import given
from hypothesis import strategies as st

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.pairs import Surroundings
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.judge.calibration import (
    CalibrationTerms,
    JudgeOpinion,
    LabelledAnswer,
    LabelledPair,
    calibrate,
    kappa_of,
    opinions_of_marks,
    opinions_of_pairs,
)
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case


def terms(mode="pointwise", **changes):
    usual = {"confidence": 0.95, "min_kappa": 0.2, "min_labels": 30}
    return CalibrationTerms(model="judge", identity="x", mode=mode, **{**usual, **changes})


def opinions(both=0, judge_only=0, people_only=0, neither=0, *, per_cluster=1):
    said = (
        [(True, True)] * both
        + [(False, True)] * judge_only
        + [(True, False)] * people_only
        + [(False, False)] * neither
    )
    return [JudgeOpinion(person, judge, f"s{n // per_cluster}") for n, (person, judge) in enumerate(said)]


def case(name, group=None):
    return Case(
        id=name,
        origin=Origin(file="log", line=1),
        messages=(Message(role="user", content="q"),),
        reference="",
        group=group,
    )


def test_kappa_is_agreement_beyond_chance():
    # Cohen 1960: 20 + 15 of 50 agree, chance agrees in half.
    assert kappa_of(opinions(20, 10, 5, 15), mode="pointwise") == pytest.approx(0.4)
    assert kappa_of(opinions(25, 0, 0, 25), mode="pointwise") == 1.0


def test_a_judge_that_calls_everything_good_has_no_kappa_however_often_people_agree():
    always = calibrate(opinions(both=90, judge_only=10), terms=terms())
    assert always.agreement.value == pytest.approx(0.9)
    assert always.kappa.value == pytest.approx(0.0)
    assert not always.sufficient


def test_labels_that_do_not_differ_prove_nothing():
    found = calibrate(opinions(both=50), terms=terms())
    assert found.kappa is None
    assert "same label" in found.why_not


def test_a_judge_that_agrees_with_people_counts():
    found = calibrate(opinions(30, 3, 2, 25), terms=terms())
    assert found.sufficient
    assert found.kappa.low > 0.2
    assert (found.both_good, found.judge_only, found.people_only, found.both_bad) == (30, 3, 2, 25)


def test_few_labels_are_not_enough():
    found = calibrate(opinions(10, 0, 0, 10), terms=terms())
    assert "20 labels" in found.why_not


def test_labels_of_few_sessions_widen_the_interval():
    alone = calibrate(opinions(30, 6, 6, 30), terms=terms())
    together = calibrate(opinions(30, 6, 6, 30, per_cluster=12), terms=terms())
    assert together.clusters == 6
    assert together.kappa.high - together.kappa.low > alone.kappa.high - alone.kappa.low
    assert together.agreement.low < alone.agreement.low


def test_perfect_agreement_is_not_taken_for_certain():
    found = calibrate(opinions(20, 0, 0, 20), terms=terms())
    assert found.kappa.value == 1.0
    assert found.kappa.low < 0.95


def test_a_pair_that_the_judge_leaves_open_is_a_disagreement():
    pairs = [LabelledPair(case(str(n)), "good", "bad", str(n)) for n in range(4)]
    found, unjudged = opinions_of_pairs(pairs, {"0": 1.0, "1": 0.0, "2": 0.5, "3": None})
    assert [opinion.judge for opinion in found] == [True, False, False]
    assert unjudged == 1
    assert kappa_of(found, mode="pairwise") == pytest.approx(2 / 3 - 1)


def test_marks_from_four_of_five_call_an_answer_good():
    answers = [LabelledAnswer(case(str(n), "coder"), "text", True, str(n)) for n in range(3)]
    found, unjudged = opinions_of_marks(answers, {"0": 1.0, "1": 0.75, "2": 0.5})
    assert [opinion.judge for opinion in found] == [True, True, False]
    assert calibrate(found, terms=terms(), unjudged=unjudged).groups == {"coder": "2 of 3"}


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), max_size=60))
def test_agreement_and_kappa_lie_in_their_intervals(rows):
    said = [JudgeOpinion(person, judge, str(cluster)) for person, judge, cluster in rows]
    for mode in ("pointwise", "pairwise"):
        found = calibrate(said, terms=terms(mode))
        assert 0 <= found.agreement.low <= found.agreement.value <= found.agreement.high <= 1
        if found.kappa is not None:
            assert -1 <= found.kappa.low <= found.kappa.value <= found.kappa.high <= 1


def judged_report():
    return report(
        subject("adapter", {"judge_score": marks(98, 100)}), subject("base", {"judge_score": marks(99, 100)})
    )


@pytest.mark.parametrize("severity", ["must", "invariant"])
def test_a_judge_that_nobody_calibrated_decides_nothing_in_the_gate(severity):
    settings = GateSettings(
        rules=(GateRule(metric="judge_score", over=0.8, severity=severity),), primary="none"
    )
    assert decide(judged_report(), settings).decision == "deploy"
    doubted = decide(
        judged_report(), settings, around=Surroundings(doubts={"judge_score": "run the calibration"})
    )
    assert doubted.decision == "not_enough_evidence"
    assert "not calibrated; run the calibration" in doubted.rules[0].sentence


def test_an_uncalibrated_judge_does_not_abort_either():
    settings = GateSettings(rules=(GateRule(metric="judge_score", over=0.999),), primary="none")
    around = Surroundings(doubts={"judge_score": "run the calibration"})
    assert decide(judged_report(), settings, around=around).decision == "not_enough_evidence"
