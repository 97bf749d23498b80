"""Guardrails: not worse by more than a margin, or not proven."""

import pytest
from gate_samples import marks, report, simple, subject
from hypothesis import given
from hypothesis import strategies as st

from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.rules import Surroundings
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.statistics.means import paired_difference


def guard(margin=0.02, against="base", metric="json_valid"):
    return GateSettings(rules=(GateRule(metric=metric, against=against, margin=margin),))


def test_no_change_on_31_cases_proves_no_margin_of_two_points():
    verdict = decide(simple(marks(31, 31), marks(31, 31)), guard(0.02))
    rule = verdict.rules[0]
    assert verdict.decision == "not_enough_evidence"
    assert rule.low == pytest.approx(0.05 ** (1 / 31) - 1, abs=0.001)  # no loss in 31, one-sided 95 %
    assert rule.cases_to_decide > 31
    assert str(rule.cases_to_decide) in rule.sentence
    assert verdict.cases_needed == rule.cases_to_decide


def test_the_number_of_cases_that_is_promised_settles_it():
    needed = decide(simple(marks(31, 31), marks(31, 31)), guard(0.02)).cases_needed
    assert decide(simple(marks(needed, needed), marks(needed, needed)), guard(0.02)).decision == "deploy"
    fewer = needed - 1
    again = decide(simple(marks(fewer, fewer), marks(fewer, fewer)), guard(0.02))
    assert again.decision == "not_enough_evidence"


def test_a_loss_beyond_the_margin_is_a_failure():
    verdict = decide(simple(marks(300, 300), marks(296, 300)), guard(0.01))
    assert verdict.rules[0].outcome == "fail"
    assert verdict.decision == "iterate"
    assert "0 cases won and 4 lost against the base" in verdict.rules[0].sentence


def test_a_proven_loss_within_the_margin_was_allowed_beforehand():
    verdict = decide(simple(marks(2000, 2000), marks(1990, 2000)), guard(0.02))
    assert verdict.rules[0].p_value < 0.05
    assert verdict.decision == "deploy"


def test_a_proven_loss_beyond_the_margin_aborts():
    verdict = decide(simple(marks(300, 300), marks(280, 300)), guard(0.02))
    assert verdict.decision == "abort"
    assert [rule.kind for rule in verdict.rules] == ["guardrail", "loss"]


def test_all_guardrails_must_pass():
    grades = {"json_valid": marks(400, 400), "answer_match": marks(380, 400)}
    worse = {"json_valid": marks(400, 400), "answer_match": marks(377, 400)}
    settings = GateSettings(
        rules=(
            GateRule(metric="json_valid", against="base", margin=0.02),
            GateRule(metric="answer_match", against="base", margin=0.005),
        )
    )
    verdict = decide(report(subject("adapter", worse), subject("base", grades)), settings)
    assert [rule.outcome for rule in verdict.rules] == ["pass", "fail"]
    assert verdict.decision == "iterate"


def test_a_champion_that_was_not_asked_proves_nothing_and_the_verdict_says_how_to_ask_it():
    verdict = decide(
        simple(marks(900, 900), marks(900, 900)),
        guard(0.02, "champion"),
        around=Surroundings(champion="0123456789abcdef"),
    )
    assert verdict.decision == "not_enough_evidence"
    assert (
        "the champion (0123456789ab) was not asked these cases; `graft eval` asks it"
        in verdict.rules[0].sentence
    )


def test_the_champion_among_the_others_is_the_one_compared_with():
    better = subject("champion", {"json_valid": marks(400, 400)})
    seen = report(
        subject("adapter", {"json_valid": marks(360, 400)}),
        subject("base", {"json_valid": marks(100, 400)}),
        others=(better,),
        champion="champion",
    )
    verdict = decide(seen, guard(0.02, "champion"))
    assert verdict.decision == "abort"
    assert verdict.rules[0].against == "champion"
    assert "worse than the champion's" in verdict.reason
    assert decide(seen, guard(0.02, "base")).decision == "deploy"


def test_before_the_first_release_the_base_replaces_the_champion_and_a_note_says_so():
    verdict = decide(
        simple(marks(300, 400), marks(400, 400)),
        guard(0.02, "champion"),
        around=Surroundings(no_champion=True),
    )
    assert verdict.decision == "deploy"
    assert "Nothing is served yet" in verdict.notes[0]


def test_the_log_is_compared_with_when_it_answered_the_cases():
    seen = report(
        subject("adapter", {"json_valid": marks(400, 400)}),
        subject("base", {"json_valid": marks(100, 400)}),
        others=(subject("log", {"json_valid": marks(398, 400)}),),
    )
    assert decide(seen, guard(0.02, "log")).decision == "deploy"
    assert "`graft eval` does that" in decide(simple([1], [1]), guard(0.02, "log")).rules[0].sentence


def test_more_truncated_answers_are_a_loss_though_the_figure_grows():
    verdict = decide(
        simple(marks(0, 200), marks(30, 200), metric="truncated"), guard(0.05, metric="truncated")
    )
    rule = verdict.rules[0]
    assert rule.outcome == "fail"
    assert rule.value == pytest.approx(0.15)
    assert rule.low <= rule.value <= rule.high
    assert verdict.decision == "abort"


def test_latency_has_a_margin_in_seconds():
    base = subject("base", {"json_valid": marks(9, 9)}, latency=[1.0, 1.1, 1.2, 1.0, 1.1, 1.2, 1.0, 1.1])
    slow = [second + 0.3 for second in base.generation.single_latency_seconds]
    seen = report(subject("adapter", {"json_valid": marks(9, 9)}, latency=slow), base)
    kept = GateSettings(rules=(GateRule(metric="latency_seconds", against="base", margin=0.5),))
    lost = GateSettings(rules=(GateRule(metric="latency_seconds", against="base", margin=0.2),))
    assert decide(seen, kept).decision == "deploy"
    failed = decide(seen, lost)
    assert failed.decision == "iterate"  # slower is no loss of quality
    assert "+0.3 s" in failed.rules[0].sentence


def test_cases_of_one_session_do_not_count_as_independent():
    sessions = {f"c{i}": f"s{i // 10}" for i in range(200)}
    before, after = marks(200, 200), [0 if i < 10 else 1 for i in range(200)]
    alone = decide(simple(before, after), guard(0.10))
    together = decide(
        report(
            subject("adapter", {"json_valid": after}, sessions=sessions),
            subject("base", {"json_valid": before}, sessions=sessions),
            sessions=sessions,
        ),
        guard(0.10),
    )
    assert alone.rules[0].outcome == "pass"
    assert together.rules[0].outcome == "unknown"
    assert together.decision == "not_enough_evidence"
    assert together.rules[0].cases_to_decide > 200


pairs = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=120)


@given(pairs, st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.3]))
def test_a_guardrail_passes_just_where_non_inferiority_is_proven(found, margin):
    before, after = zip(*found, strict=True)
    wins = sum(new > old for old, new in found)
    losses = sum(new < old for old, new in found)
    low = paired_difference(wins, losses=losses, n=len(found), sided="lower").low
    verdict = decide(simple(before, after), guard(margin))
    assert (verdict.rules[0].outcome == "pass") == (low > -margin)
    assert verdict.rules[0].low == pytest.approx(low, abs=1e-9)
    assert (verdict.decision == "deploy") == (low > -margin)


@pytest.mark.parametrize(
    ("metric", "margin"), [("peak_memory_gib", 0.5), ("tokens_per_second", 5), ("answer_match", 0.05)]
)
def test_no_other_figure_is_taken_for_the_one_that_a_rule_names(metric, margin):
    """First tokens are timed pair by pair; what has no pairs of its own may not borrow theirs."""
    grades = {"json_valid": marks(100, 100)}
    first = [1.0 + i / 100 for i in range(8)]
    found = report(
        subject("adapter", grades, latency=first, first_token=first, memory=9.0, speed=10.0),
        subject("base", grades, latency=first, first_token=first, memory=3.0, speed=40.0),
    )
    rules = GateSettings(rules=(GateRule(metric=metric, margin=margin, against="base"),))
    verdict = decide(found, rules)
    expected = "not_enough_evidence" if metric == "answer_match" else "iterate"
    assert verdict.decision == expected
    assert "first" not in verdict.rules[0].test
