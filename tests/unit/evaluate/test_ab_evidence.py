"""Two releases compared as answers come in: stopped when decided, rarely wrong, however often one looks."""

import random

import pytest
from gate_samples import new_case
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.live.ab import (
    ArmTally,
    LiveAnswer,
    LiveTest,
    check_voices,
    judge_unit,
    run_replay,
    survives_silence,
    units_of,
)
from graftwork.evaluate.statistics.anytime import TwoArms


def run_live(exchanges, *, alpha):
    live = LiveTest(alpha)
    for exchange in exchanges:
        live.take(exchange)
    return live


def case(number, session=None, question=None):
    return new_case(f"c{number}", question or f"question {number}", "", session=session)


def graders(rate_a, rate_b, seed):
    chance = random.Random(seed)
    asked = []

    def grade_block(cases):
        asked.extend(case.id for case in cases)
        return (
            {case.id: float(chance.random() < rate_a) for case in cases},
            {case.id: float(chance.random() < rate_b) for case in cases},
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
        return (LiveAnswer(chance.choice("AB"), None, float(chance.random() < 0.7)) for _ in range(300))

    assert sum(run_live(traffic(seed), alpha=0.05).test.decided for seed in range(200)) <= 20


def test_live_a_clear_difference_is_decided_and_later_traffic_changes_nothing():
    chance = random.Random(3)
    traffic = [
        LiveAnswer(arm, None, float(chance.random() < (0.9 if arm == "B" else 0.3)))
        for arm in (chance.choice("AB") for _ in range(500))
    ]
    found = run_live(traffic, alpha=0.05)
    assert found.test.winner == "candidate"
    again = run_live(traffic[: found.used] + [LiveAnswer("A", None, 1.0)] * 500, alpha=0.05)
    assert again.test == found.test


def test_a_session_counts_once_however_long_it_is():
    found = run_live([LiveAnswer("A", "s", 1.0)] * 50 + [LiveAnswer("B", "s", 0.0)] * 50, alpha=0.05)
    assert (found.used, found.test.baseline, found.test.candidate) == (1, (1, 0), (0, 0))
    units = units_of([case(n, session="one") for n in range(100)])
    assert len(units) == 1
    found = run_replay(
        units, lambda cases: ({c.id: 0.0 for c in cases}, {c.id: 1.0 for c in cases}), alpha=0.05
    )
    assert (found.used, found.test.wins, found.test.decided) == (1, 1, False)


def test_an_ungraded_answer_counts_for_neither_side():
    units = units_of([case(n) for n in range(40)])
    found = run_replay(
        units, lambda cases: ({c.id: 1.0 for c in cases}, {c.id: None for c in cases}), alpha=0.05
    )
    assert (found.used, found.ungraded, found.test.decided) == (0, 40, False)
    lived = run_live([LiveAnswer("A", None, None)] * 40, alpha=0.05)
    assert (lived.used, lived.ungraded) == (0, 40)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), max_size=60))
def test_the_order_of_the_releases_does_not_matter(pairs):
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
    found = [case for unit in units_of(cases) for case in unit]
    assert sorted(item.id for item in found) == sorted(case.id for case in cases)


def test_a_session_with_as_many_wins_as_losses_is_tied():
    unit = units_of([case(1, "s"), case(2, "s")])[0]
    of_a, of_b = {"c1": 1.0, "c2": 0.0}, {"c1": 0.0, "c2": 1.0}
    assert judge_unit(unit, of_a, of_b, lower_is_better=False) == 0.0


def test_a_file_sorted_by_topic_is_asked_in_an_order_that_says_nothing():
    """A wins half of the topics, B the other half: in the order of the file, A is found better every time."""
    cases = [case(n) for n in range(400)]
    asked = [int(case.id[1:]) for unit in units_of(cases) for case in unit]
    assert sorted(asked) == list(range(400))
    assert asked != sorted(asked)
    decided = 0
    for seed in range(200):
        chance = random.Random(seed)
        # Other ids in every run: the order is drawn from them.
        units = units_of([case(f"{seed}-{n}") for n in range(400)])

        def block(asked, chance=chance):
            ahead = {case.id: int(case.id.split("-")[1]) < 200 for case in asked}
            return (
                {case.id: float(chance.random() < (0.8 if ahead[case.id] else 0.4)) for case in asked},
                {case.id: float(chance.random() < (0.4 if ahead[case.id] else 0.8)) for case in asked},
            )

        decided += run_replay(units, block, alpha=0.05).test.decided
    assert decided <= 20


def test_many_sessions_won_by_a_little_do_not_outweigh_a_few_that_are_lost_as_a_whole():
    """B is a little better in nine sessions of ten and fails the tenth: on average both are alike."""
    decided = 0
    for seed in range(200):
        chance = random.Random(seed)
        units = units_of([case(f"{seed}-{n}", session=f"{seed}-{n // 8}") for n in range(8 * 100)])

        def block(asked, chance=chance):
            fails = {case.session: chance.random() < 0.1 for case in asked}
            return (
                {case.id: float(chance.random() < 0.9) for case in asked},
                {case.id: float(not fails[case.session]) for case in asked},
            )

        decided += run_replay(units, block, alpha=0.05).test.decided
    assert decided <= 20


def test_a_question_under_other_ids_counts_once():
    units = units_of([case(n, question=f"What is {n % 5}?") for n in range(20)])
    assert sorted(len(unit) for unit in units) == [4] * 5


def test_sessions_that_share_only_a_greeting_stay_apart_and_repeated_ones_do_not():
    cases = [case(n, session=f"s{n // 2}", question="hello" if n % 2 else f"q{n}") for n in range(6)]
    assert len(units_of(cases)) == 3
    again = [case(f"x{n}", session=f"t{n // 2}", question="Hello!" if n % 2 else f"Q{n}") for n in range(6)]
    assert len(units_of([*cases, *again])) == 3


def speak(seed, *, happy_b, good=0.7, sessions=600):
    """Both releases are as good; users of A speak in half of their sessions, happy users of B less often."""
    chance, live, counts = random.Random(seed), LiveTest(0.05, goes_on=True), {"A": 0, "B": 0}
    for _ in range(sessions):
        arm, happy = chance.choice("AB"), chance.random() < good
        counts[arm] += 1
        if chance.random() < (happy_b if arm == "B" and happy else 0.5):
            live.take(LiveAnswer(arm, None, float(happy)))
    return live.test, (counts["A"], counts["B"])


def test_users_of_one_arm_who_keep_silent_do_not_decide_it():
    found = [speak(seed, happy_b=0.3) for seed in range(60)]
    # Of those who speak, B's users are unhappier: without a correction that is taken for the truth.
    assert sum(test.winner == "baseline" for test, _ in found) > 8
    assert sum(survives_silence(test, assigned=counts) for test, counts in found) <= 8


def test_a_clear_winner_survives_unequal_silence():
    test = TwoArms(0.05)
    for _ in range(150):
        test.update("baseline", successes=0.3, failures=0.7)
        test.update("candidate", successes=0.9, failures=0.1)
    assert test.winner == "candidate"
    assert survives_silence(test, assigned=(300, 310))
    assert not survives_silence(test, assigned=(300, 3000))
    assert not survives_silence(TwoArms(0.05), assigned=(0, 0))


def test_unequal_feedback_rates_are_reported_and_equal_ones_are_not():
    a, b = ArmTally("a", alone=400), ArmTally("b", alone=400)
    assert check_voices(a, b, spoken=(100, 110)) == []
    (output,) = check_voices(a, b, spoken=(200, 40))
    assert "users of A spoke in 50.0% of the sessions, those of B in 10.0%" in output
    assert check_voices(a, ArmTally("b"), spoken=(1, 0)) == []
