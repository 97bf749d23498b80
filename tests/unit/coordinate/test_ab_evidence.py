"""Two releases compared as answers come in: stopped when decided, rarely wrong, however often one looks."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.coordinate.ab_evidence import Exchange, LiveTest, judge_unit, run_replay, units_of
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case


def run_live(exchanges, *, alpha):
    live = LiveTest(alpha)
    for exchange in exchanges:
        live.take(exchange)
    return live


def case(number, session=None):
    return Case(
        id=f"c{number}",
        origin=Origin(file="x", line=1),
        messages=(Message(role="user", content="?"),),
        reference="",
        session=session,
    )


def graders(rate_a, rate_b, seed):
    chance = random.Random(seed)
    asked = []

    def grade_block(cases):
        asked.extend(one.id for one in cases)
        return (
            {one.id: float(chance.random() < rate_a) for one in cases},
            {one.id: float(chance.random() < rate_b) for one in cases},
        )

    return grade_block, asked


def test_a_clear_difference_is_decided_early_and_the_rest_is_not_asked():
    cases = [case(n) for n in range(1000)]
    grade_block, asked = graders(0.3, 0.9, 1)
    found = run_replay(units_of(cases), grade_block, alpha=0.05)
    assert found.test.winner == "candidate"
    assert found.used < 60
    assert found.used <= found.asked == len(asked) < 200
    assert len(set(asked)) == len(asked)


def test_the_worse_one_loses_and_lower_can_be_better():
    cases = [case(n) for n in range(300)]
    for lower, winner in ((False, "baseline"), (True, "candidate")):
        grade_block, _ = graders(0.9, 0.3, 2)
        found = run_replay(units_of(cases), grade_block, alpha=0.05, lower_is_better=lower)
        assert found.test.winner == winner


def test_without_a_difference_it_is_hardly_ever_decided_though_it_looks_after_every_case():
    units = units_of([case(n) for n in range(300)])
    decided = sum(
        run_replay(units, graders(0.6, 0.6, seed)[0], alpha=0.05).test.decided for seed in range(200)
    )
    # At 5 % ten are expected at the most; so many more would come about once in a thousand times.
    assert decided <= 20


def test_live_without_a_difference_it_is_hardly_ever_decided():
    def traffic(seed):
        chance = random.Random(seed)
        return (Exchange(chance.choice("AB"), None, float(chance.random() < 0.7)) for _ in range(300))

    assert sum(run_live(traffic(seed), alpha=0.05).test.decided for seed in range(200)) <= 20


def test_live_a_clear_difference_is_decided_and_later_traffic_changes_nothing():
    chance = random.Random(3)
    traffic = [
        Exchange(arm, None, float(chance.random() < (0.9 if arm == "B" else 0.3)))
        for arm in (chance.choice("AB") for _ in range(500))
    ]
    found = run_live(traffic, alpha=0.05)
    assert found.test.winner == "candidate"
    again = run_live(traffic[: found.used] + [Exchange("A", None, 1.0)] * 500, alpha=0.05)
    assert again.test == found.test


def test_a_session_counts_once_however_long_it_is():
    found = run_live([Exchange("A", "s", 1.0)] * 50 + [Exchange("B", "s", 0.0)] * 50, alpha=0.05)
    assert (found.used, found.test.baseline, found.test.candidate) == (1, (1, 0), (0, 0))
    units = units_of([case(n, session="one") for n in range(100)])
    assert len(units) == 1
    found = run_replay(
        units, lambda cases: ({c.id: 0.0 for c in cases}, {c.id: 1.0 for c in cases}), alpha=0.05
    )
    assert (found.used, found.test.wins, found.test.decided) == (1, 1, False)


def test_what_cannot_be_graded_counts_for_nobody():
    units = units_of([case(n) for n in range(40)])
    found = run_replay(
        units, lambda cases: ({c.id: 1.0 for c in cases}, {c.id: None for c in cases}), alpha=0.05
    )
    assert (found.used, found.ungraded, found.test.decided) == (0, 40, False)
    lived = run_live([Exchange("A", None, None)] * 40, alpha=0.05)
    assert (lived.used, lived.ungraded) == (0, 40)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), max_size=60))
def test_who_stands_first_does_not_matter(pairs):
    units = units_of([case(n) for n in range(len(pairs))])

    def block(cases, swap=False):
        both = [{c.id: pairs[int(c.id[1:])][side] for c in cases} for side in (0, 1)]
        return (both[1], both[0]) if swap else (both[0], both[1])

    one = run_replay(units, block, alpha=0.05)
    other = run_replay(units, lambda cases: block(cases, swap=True), alpha=0.05)
    assert (one.used, one.test.wins, one.test.losses) == (other.used, other.test.losses, other.test.wins)
    assert one.test.e_value == pytest.approx(other.test.e_value)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([None, "s", "t"]), max_size=30))
def test_every_case_is_in_exactly_one_unit(sessions):
    cases = [case(n, session) for n, session in enumerate(sessions)]
    found = [one for unit in units_of(cases) for one in unit.cases]
    assert sorted(one.id for one in found) == sorted(one.id for one in cases)


def test_a_session_with_as_many_wins_as_losses_is_tied():
    unit = units_of([case(1, "s"), case(2, "s")])[0]
    of_a, of_b = {"c1": 1.0, "c2": 0.0}, {"c1": 0.0, "c2": 1.0}
    assert judge_unit(unit, of_a, of_b, lower_is_better=False) == "tie"
