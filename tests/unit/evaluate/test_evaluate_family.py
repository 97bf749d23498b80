"""The verdict about a family: no route gets worse, the router holds, limits are kept."""

import pytest

from graftwork.evaluate.ask.served_endpoint import ServedAnswer
from graftwork.evaluate.gate.family import FamilyEvidence, RoutedAnswer, decide_family, judge_family
from graftwork.serve.settings import FamilyGateSettings


def answers(route, count, *, text="same", grade=0.8, by="router", member=None, **more):
    return [
        RoutedAnswer(
            case=f"{route}{n}", session=f"{route}{n}", expected=route, member=member or route, by=by,
            text=text, grade=grade, seconds=more.pop("seconds", 0.5), **more,
        )
        for n in range(count)
    ]  # fmt: skip


def chain_answers(problem):
    """Four answers and a request that failed."""
    return [ServedAnswer(str(n), 502 if n == 4 else 200, "", 0.5, {}, problem=problem) for n in range(5)]


def judge(limits=None, *, targets=(), router_accuracy=0.97, **seen):
    rules = judge_family(
        FamilyEvidence(**seen),
        FamilyGateSettings(margin=0.1, router_margin=0.05, **limits or {}),
        metric="chrf",
        targets=targets,
        router_accuracy=router_accuracy,
    )
    return {rule.rule: rule for rule in rules}, decide_family(rules)


def test_a_family_that_answers_as_before_is_deployed():
    both = [*answers("main", 30), *answers("people", 30)]
    rules, decision = judge(before=both, after=both, without=answers("people", 20, fallback=True))
    assert decision == "deploy"
    assert rules["the route people is not worse by 0.1"].sentence.startswith("people gives the same answers")


def test_a_route_that_gets_worse_aborts_even_if_the_mean_of_the_family_does_not():
    before = [*answers("main", 40, grade=0.2), *answers("people", 40, grade=0.9)]
    after = [*answers("main", 40, text="new", grade=1.0), *answers("people", 40, text="new", grade=0.4)]
    rules, decision = judge(before=before, after=after)
    assert decision == "abort"
    assert rules["the route people is not worse by 0.1"].outcome == "fail"
    assert rules["the route main is not worse by 0.1"].outcome == "pass"


@pytest.mark.parametrize(("before", "after"), [(0.5, 0.0), (0.0, 0.5)])
def test_a_grade_of_zero_is_a_grade(before, after):
    seen = {"before": answers("main", 9, grade=before), "after": answers("main", 9, grade=after, text="new")}
    rules, _ = judge(**seen)
    assert rules["the route main is not worse by 0.1"].value == pytest.approx(after - before)


def test_too_few_cases_are_not_enough_evidence():
    _, decision = judge(before=answers("main", 3), after=answers("main", 3, text="new"))
    assert decision == "not_enough_evidence"


def test_a_router_that_lost_its_accuracy_aborts():
    wrong = answers("people", 60, member="main")
    rules, decision = judge(before=wrong, after=wrong)
    assert decision == "abort"
    assert rules["the router is right in 92.0% where it is sure"].value == 0


def test_unsure_questions_do_not_count_as_wrong():
    unsure = answers("people", 30, member="main", by="unsure")
    sure = answers("main", 60)
    _, decision = judge(before=[*unsure, *sure], after=[*unsure, *sure])
    assert decision == "deploy"


def test_a_chosen_member_that_is_away_does_not_count_against_the_router():
    away = answers("people", 60, member="main", by="away")
    sure = answers("main", 60)
    rules, decision = judge(before=[*away, *sure], after=[*away, *sure])
    rule = rules["the router is right in 92.0% where it is sure"]
    assert (decision, rule.n, rule.value) == ("deploy", 60, 1)
    assert "60 not counted" in rule.sentence


def test_a_router_passes_only_if_its_lower_bound_reaches_the_limit():
    few = answers("main", 5)
    rules, decision = judge(before=few, after=few)
    assert decision == "not_enough_evidence"
    assert rules["the router is right in 92.0% where it is sure"].outcome == "unknown"


@pytest.mark.parametrize(
    ("seen", "limits"),
    [
        ({"after": answers("main", 5, answered=False)}, {}),
        ({"after": answers("main", 5), "without": answers("main", 5, answered=False)}, {}),
        ({"after": answers("main", 5), "chains": {"trio": chain_answers("step trio/b failed")}}, {}),
        ({"after": answers("main", 5), "memory_gib": 3.0}, {"max_memory_gib": 2.0}),
        ({"after": answers("main", 5)}, {"max_p95_seconds": 0.1}),
    ],
)
def test_a_missing_answer_or_a_limit_aborts(seen, limits):
    _, decision = judge(limits, router_accuracy=None, before=[], **seen)
    assert decision == "abort"


def test_a_rule_that_matches_everything_is_named_and_one_that_matches_nothing_is_said():
    seen = [*answers("main", 5, by="rule 1"), *answers("people", 5, by="rule 1")]
    rules, decision = judge(targets=("people", "storage"), router_accuracy=None, before=[], after=seen)
    assert decision == "abort"
    assert rules["rule 1 (to people) matches some requests and not all"].outcome == "fail"
    nothing = rules["rule 2 (to storage) matches some requests and not all"]
    assert nothing.outcome == "pass"
    assert "nothing here shows that it can match" in nothing.sentence
