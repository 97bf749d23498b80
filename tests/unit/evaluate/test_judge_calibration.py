"""A judge compared with people: agreement, kappa, their intervals, and what the gate makes of it."""

import pytest
from gate_samples import marks, new_case, report, subject
from hypothesis import given
from hypothesis import strategies as st

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.rules import Surroundings
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.judge_statistics import (
    JudgeOpinion,
    LabeledAnswer,
    LabeledPair,
    PairVerdict,
    calibrate,
    kappa_of,
    opinions_of_marks,
    opinions_of_pairs,
)
from graftwork.evaluate.project import judge_identity
from graftwork.evaluate.settings import JudgeSettings


def terms(mode="pointwise", confidence=0.95, min_kappa=0.2, min_labels=30):
    settings = JudgeSettings(
        url="http://localhost/v1", model="judge", min_kappa=min_kappa, min_labels=min_labels
    )
    return {"settings": settings, "identity": "x", "mode": mode, "confidence": confidence}


def opinions(both=0, judge_only=0, people_only=0, neither=0, *, per_cluster=1):
    said = (
        [(True, True)] * both
        + [(False, True)] * judge_only
        + [(True, False)] * people_only
        + [(False, False)] * neither
    )
    return [JudgeOpinion(person, judge, f"s{n // per_cluster}") for n, (person, judge) in enumerate(said)]


def case(name, group=None):
    return new_case(name, "q", "", group=group)


def verdicts_of(said):
    return [PairVerdict(str(place), *choices) for place, choices in enumerate(said)]


def judged_by_length(preferred_longer, preferred_shorter):
    """People's choices, and a judge that takes the longer answer in both orders."""
    longer = [("a long answer", "short")] * preferred_longer + [
        ("short", "a long answer")
    ] * preferred_shorter
    pairs = [LabeledPair(case(str(n)), *texts, str(n)) for n, texts in enumerate(longer)]
    said = [
        ("second", "first") if len(preferred) > len(other) else ("first", "second")
        for preferred, other in longer
    ]
    return calibrate(opinions_of_pairs(pairs, verdicts_of(said))[0], **terms("pairwise"))


@pytest.mark.parametrize(("longer", "shorter"), [(60, 0), (57, 3), (48, 12)])
def test_a_judge_that_prefers_the_longer_answer_does_not_count_where_people_mostly_did_too(longer, shorter):
    found = judged_by_length(longer, shorter)
    assert found.kappa.low > 0.2
    assert not found.sufficient
    assert found.length.kappa.low <= 0
    assert f"0 of {shorter} pairs whose better answer is the shorter one" in found.why_not


def test_a_judge_that_agrees_on_short_and_long_answers_counts():
    texts = [("a long answer", "short")] * 50 + [("short", "a long answer")] * 10
    pairs = [LabeledPair(case(str(n)), *pair, str(n)) for n, pair in enumerate(texts)]
    found, _ = opinions_of_pairs(pairs, verdicts_of([("second", "first")] * 60))
    calibration = calibrate(found, **terms("pairwise"))
    assert calibration.sufficient
    assert (calibration.length.longer, calibration.length.shorter) == (50, 10)
    assert calibration.length.kappa.value == 1.0


def test_marks_that_follow_the_length_of_the_answer_do_not_count():
    answers = [
        LabeledAnswer(case(str(n)), "x" * (100 + n if n < 30 else n), n < 30, str(n)) for n in range(60)
    ]
    by_length = {answer.case.id: float(len(answer.text) >= 100) for answer in answers}
    found = calibrate(opinions_of_marks(answers, by_length)[0], **terms())
    assert found.kappa.value == 1.0
    assert "length may explain its agreement" in found.why_not
    # The same marks of answers whose lengths say nothing.
    varied = [answer._replace(text="x" * (1 + 7 * place % 60)) for place, answer in enumerate(answers)]
    assert calibrate(opinions_of_marks(varied, by_length)[0], **terms()).sufficient


def test_the_place_that_a_judge_chooses_in_both_orders_is_measured():
    pairs = [LabeledPair(case(str(n)), "one", "two", str(n)) for n in range(40)]
    said = [("second", "first")] * 28 + [("first", "first")] * 10 + [("second", "second")] * 2
    found = calibrate(opinions_of_pairs(pairs, verdicts_of(said))[0], **terms("pairwise"))
    assert (found.position.always_first, found.position.always_second) == (10, 2)
    assert found.position.p_value < 0.05
    assert found.agreement.value == 28 / 40


def test_kappa_is_agreement_beyond_chance():
    # Cohen 1960: 20 + 15 of 50 agree, chance agrees in half.
    assert kappa_of(opinions(20, 10, 5, 15), mode="pointwise") == pytest.approx(0.4)
    assert kappa_of(opinions(25, 0, 0, 25), mode="pointwise") == 1.0


def test_a_judge_that_calls_everything_good_has_no_kappa_however_often_people_agree():
    always = calibrate(opinions(both=90, judge_only=10), **terms())
    assert always.agreement.value == pytest.approx(0.9)
    assert always.kappa.value == pytest.approx(0.0)
    assert not always.sufficient


def test_labels_that_do_not_differ_prove_nothing():
    found = calibrate(opinions(both=50), **terms())
    assert found.kappa is None
    assert "same label" in found.why_not


def test_a_judge_that_agrees_with_people_counts():
    found = calibrate(opinions(30, 3, 2, 25), **terms())
    assert found.sufficient
    assert found.kappa.low > 0.2
    assert (found.both_good, found.judge_only, found.people_only, found.both_bad) == (30, 3, 2, 25)


def test_few_labels_are_not_enough():
    found = calibrate(opinions(10, 0, 0, 10), **terms())
    assert "20 labels" in found.why_not


def test_labels_of_few_sessions_widen_the_interval():
    alone = calibrate(opinions(30, 6, 6, 30), **terms())
    together = calibrate(opinions(30, 6, 6, 30, per_cluster=12), **terms())
    assert together.clusters == 6
    assert together.kappa.high - together.kappa.low > alone.kappa.high - alone.kappa.low
    assert together.agreement.low < alone.agreement.low


def test_perfect_agreement_is_not_taken_for_certain():
    found = calibrate(opinions(20, 0, 0, 20), **terms())
    assert found.kappa.value == 1.0
    assert found.kappa.low < 0.95


def test_a_pair_that_the_judge_leaves_open_is_a_disagreement():
    pairs = [LabeledPair(case(str(n)), "good", "bad", str(n)) for n in range(4)]
    said = [("second", "first"), ("first", "second"), ("first", "first"), (None, "first")]
    found, unjudged = opinions_of_pairs(pairs, verdicts_of(said))
    assert [opinion.judge for opinion in found] == [True, False, False]
    assert unjudged == 1
    assert kappa_of(found, mode="pairwise") == pytest.approx(2 / 3 - 1)


def test_marks_from_four_of_five_call_an_answer_good():
    answers = [LabeledAnswer(case(str(n), "coder"), "text", True, str(n)) for n in range(3)]
    found, unjudged = opinions_of_marks(answers, {"0": 1.0, "1": 0.75, "2": 0.5})
    assert [opinion.judge for opinion in found] == [True, True, False]
    assert calibrate(found, **terms(), unjudged=unjudged).groups == {"coder": "2 of 3"}


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), max_size=60))
def test_agreement_and_kappa_lie_in_their_intervals(rows):
    said = [JudgeOpinion(person, judge, str(cluster)) for person, judge, cluster in rows]
    for mode in ("pointwise", "pairwise"):
        found = calibrate(said, **terms(mode))
        assert 0 <= found.agreement.low <= found.agreement.value <= found.agreement.high <= 1
        if found.kappa is not None:
            assert -1 <= found.kappa.low <= found.kappa.value <= found.kappa.high <= 1


def judged_report():
    return report(
        subject("adapter", {"judge_score": marks(98, 100)}), subject("base", {"judge_score": marks(99, 100)})
    )


def test_a_calibration_of_the_usual_judge_still_counts():
    """Its identity has the usual criteria in it: other words would ask people for their labels again."""
    judge = JudgeSettings(url="http://127.0.0.1:1/v1", model="judge")
    assert judge_identity(judge, "pairwise").startswith("f8538be06b5f6f47")
    assert judge_identity(judge, "pointwise").startswith("a0ae2afbe6b924c8")


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
