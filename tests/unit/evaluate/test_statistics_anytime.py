"""Looking after every answer: false alarms stay rare, real differences are found, intervals hold."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, special, stats

from graftwork.evaluate.statistics.anytime import MeanTest, TwoArms, share_interval

RUNS, STEPS = 400, 250


def play_pairs(draw, *, win_rate, loss_rate, steps=STEPS):
    """A test that is looked at after every pair, and stopped when it is decided."""
    test = MeanTest()
    for step in range(steps):
        luck = draw.random()
        test.update((luck < win_rate) - (win_rate <= luck < win_rate + loss_rate))
        if test.decided:
            return test, step + 1
    return test, None


def play_counts(wins, losses, **options):
    test = MeanTest(**options)
    for difference in [1] * wins + [-1] * losses:
        test.update(difference)
    return test


def test_false_alarms_stay_under_alpha_however_often_it_is_checked():
    draw = random.Random(21)
    alarms = sum(play_pairs(draw, win_rate=0.3, loss_rate=0.3)[0].decided for _ in range(RUNS))
    assert alarms / RUNS <= 0.05


def test_a_real_difference_is_found_soon_and_the_right_way_round():
    draw = random.Random(23)
    runs = [play_pairs(draw, win_rate=0.3, loss_rate=0.1, steps=600) for _ in range(100)]
    assert sum(test.winner == "candidate" for test, _ in runs) >= 95
    taken = sorted(steps for _, steps in runs if steps)
    assert taken[len(taken) // 2] < 150
    worse = play_pairs(draw, win_rate=0.05, loss_rate=0.4, steps=600)[0]
    assert worse.winner == "baseline"


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_capital_is_the_mixture_of_all_bets(wins, losses):
    """Against numerical integration over bets q by Jeffreys' prior, in logs of its peak."""
    test = play_counts(wins, losses)
    if wins + losses == 0:
        assert test.e_value == pytest.approx(1.0)
        return
    # q = sin²(t) turns Jeffreys' prior into a flat one on (0, pi / 2).
    value, _ = integrate.quad(
        lambda t: (2 * math.sin(t) ** 2) ** wins * (2 * math.cos(t) ** 2) ** losses, 0, math.pi / 2
    )
    assert test.e_value == pytest.approx(value * 2 / math.pi, rel=1e-5)
    assert test.log_e_value == pytest.approx(
        special.betaln(wins + 0.5, losses + 0.5) - special.betaln(0.5, 0.5) + (wins + losses) * math.log(2)
    )


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_bet_on_the_next_pair_is_fair(count):
    """The mean capital after the next pair is the capital now, were wins and losses equally likely."""
    test, won, lost = play_counts(count, 1), play_counts(count + 1, 1), play_counts(count, 2)
    assert (won.e_value + lost.e_value) / 2 == pytest.approx(test.e_value)


def test_the_intervals_hold_at_all_times_at_once():
    draw = random.Random(24)
    runs, missed_share = 80, 0
    for _ in range(runs):
        wins = losses = 0
        share_holds = True
        for step in range(1, 161):
            luck = draw.random()
            wins, losses = wins + (luck < 0.3), losses + (0.3 <= luck < 0.4)
            if step % 8 == 0:
                low, high = share_interval(wins, losses)
                share_holds &= low <= 0.75 <= high
        missed_share += not share_holds
    assert missed_share / runs <= 0.05


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_intervals_hold_what_was_seen_and_agree_with_the_test(wins, losses):
    test = play_counts(wins, losses)
    low, high = share_interval(wins, losses)
    assert 0 <= low <= high <= 1
    if wins + losses:
        assert low - 1e-9 <= wins / (wins + losses) <= high + 1e-9
    if abs(test.e_value - 20) > 1e-3:
        assert (test.e_value >= 20) == (not low <= 0.5 <= high)


def test_a_decision_never_changes_back():
    test = play_counts(12, 0)
    assert test.decided
    p = test.p_value
    for _ in range(12):
        test.update(-1)
    assert test.decided
    assert test.winner == "candidate"
    assert test.p_value == p
    assert test.e_value < 1


def test_a_test_can_be_taken_up_where_it_was_left():
    test = play_counts(9, 2, alpha=0.01)
    again = MeanTest(**{**vars(test), "differences": list(test.differences)})
    assert again == test
    again.update(0.5)
    test.update(0.5)
    assert again == test


def play_arms(draw, *, base, new, steps=2 * STEPS):
    test = TwoArms()
    for _ in range(steps):
        arm = draw.choice(("baseline", "candidate"))
        success = draw.random() < (new if arm == "candidate" else base)
        test.update(arm, successes=int(success), failures=int(not success))
        if test.decided:
            break
    return test


def test_two_arms_that_differ_are_distinguished():
    draw = random.Random(26)
    runs = [play_arms(draw, base=0.6, new=0.85, steps=700) for _ in range(40)]
    assert sum(test.winner == "candidate" for test in runs) >= 38
    asked = sorted(sum(test.baseline) + sum(test.candidate) for test in runs)
    assert asked[20] < 160
    assert play_arms(draw, base=0.95, new=0.5, steps=700).winner == "baseline"


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 3), (4, 4)])
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.8])
def test_a_bet_on_two_arms_is_fair_or_worse_whatever_rate_they_share(sizes, rate):
    """The mean capital over every outcome of the next answers is at most the capital now."""
    mean = 0.0
    for base, new in itertools.product(range(sizes[0] + 1), range(sizes[1] + 1)):
        test = TwoArms()
        test.update("baseline", successes=3, failures=5)
        test.update("candidate", successes=9, failures=2)
        before = test.e_value
        test.update("baseline", successes=base, failures=sizes[0] - base)
        test.update("candidate", successes=new, failures=sizes[1] - new)
        mean += stats.binom.pmf(base, sizes[0], rate) * stats.binom.pmf(new, sizes[1], rate) * test.e_value
    assert mean <= before * (1 + 1e-9)


def test_answers_of_one_arm_wait_for_the_other():
    test = TwoArms()
    test.update("baseline", successes=10, failures=10)
    test.update("candidate", successes=10, failures=10)
    for _ in range(5):
        test.update("candidate", successes=1)
    assert test.log_capital == 0.0
    assert test.candidate == (15, 10)
    test.update("baseline", failures=1)
    assert test.candidate_waiting == (0, 0)


@given(*(st.integers(0, 60) for _ in range(4)))
def test_the_interval_of_two_arms_holds_what_was_seen(a, b, c, d):
    test = TwoArms()
    test.update("baseline", successes=a, failures=b)
    test.update("candidate", successes=c, failures=d)
    low, high = test.interval()
    assert -1 <= low <= test.difference + 1e-9
    assert test.difference - 1e-9 <= high <= 1


def test_the_interval_of_two_arms_holds_at_all_times_at_once():
    draw = random.Random(27)
    runs, missed = 40, 0
    for _ in range(runs):
        test, holds = TwoArms(), True
        for step in range(1, 97):
            arm = "candidate" if step % 2 else "baseline"
            success = draw.random() < (0.8 if arm == "candidate" else 0.6)
            test.update(arm, successes=int(success), failures=int(not success))
            if step % 12 == 0:
                low, high = test.interval()
                holds &= low <= 0.2 <= high
        missed += not holds
    assert missed / runs <= 0.05


def test_the_interval_of_two_arms_ends_where_the_likelihood_ratio_does():
    """At the bound the mixture is 20 times as likely as the best pair of rates (scipy's optimizer)."""
    test = TwoArms()
    test.update("baseline", successes=30, failures=10)
    test.update("candidate", successes=20, failures=40)
    mixed = special.betaln(30.5, 10.5) + special.betaln(20.5, 40.5) - 2 * special.betaln(0.5, 0.5)
    for bound in test.interval():
        best = optimize.minimize_scalar(
            lambda p, d=bound: (
                -(stats.bernoulli.logpmf(1, p) * 30 + stats.bernoulli.logpmf(0, p) * 10)
                - (stats.bernoulli.logpmf(1, p + d) * 20 + stats.bernoulli.logpmf(0, p + d) * 40)
            ),
            bounds=(max(0.0, -bound) + 1e-9, min(1.0, 1.0 - bound) - 1e-9),
            method="bounded",
        )
        assert mixed + best.fun == pytest.approx(math.log(20), abs=1e-3)


def test_nothing_seen_is_nothing_known():
    assert share_interval(0, 0) == (0.0, 1.0)
    assert MeanTest().e_value == pytest.approx(1.0)
    assert not MeanTest().decided
    low, high = TwoArms().interval()
    assert (low, high) == pytest.approx((-1.0, 1.0))


def test_counts_and_levels_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="between -1 and 1"):
        MeanTest().update(1.5)
    with pytest.raises(ValueError, match="negative"):
        TwoArms().update("baseline", failures=-1)
    with pytest.raises(ValueError, match="alpha"):
        MeanTest(alpha=5)


def play_dealt_arms(rng, *, share, rate_a, rate_b, runs, steps, alpha, marks):
    """Many `TwoArms` at once, each looked at after every answer: who was decided, and the capital at the end.

    `marks` makes marks between 0 and 1 of chances.
    """
    import numpy as np

    of = {"base": np.zeros((runs, 2)), "new": np.zeros((runs, 2))}
    waiting = {"base": np.zeros((runs, 2)), "new": np.zeros((runs, 2))}
    capital, winner = np.zeros(runs), np.zeros(runs, dtype=int)
    path = []
    for _ in range(steps):
        is_new = rng.random(runs) < share
        mark = marks(rng, np.where(is_new, rate_b, rate_a))
        path.append((is_new[0], mark[0]))
        came = np.stack([mark, 1 - mark], axis=1)
        for name, chosen in (("base", ~is_new), ("new", is_new)):
            of[name][chosen] += came[chosen]
            waiting[name][chosen] += came[chosen]
        both = (waiting["base"].sum(1) > 0) & (waiting["new"].sum(1) > 0)
        settle_all(of, waiting, capital, both)
        with np.errstate(divide="ignore", invalid="ignore"):
            ahead = np.nan_to_num(of["new"][:, 0] / of["new"].sum(1) - of["base"][:, 0] / of["base"].sum(1))
        fresh = (winner == 0) & (capital >= -math.log(alpha)) & (ahead != 0)
        winner[fresh] = np.sign(ahead[fresh]).astype(int)
    return winner, capital, path


def settle_all(of, waiting, capital, both):
    import numpy as np

    rate, size = {}, {}
    for name in of:
        before = of[name][both] - waiting[name][both]
        rate[name] = (before[:, 0] + 1) / (before.sum(1) + 2)
        size[name] = waiting[name][both].sum(1)
    common = sum(size[name] * rate[name] for name in of) / sum(size.values())
    for name in of:
        new = waiting[name][both]
        capital[both] += new[:, 0] * np.log(rate[name] / common)
        capital[both] += new[:, 1] * np.log((1 - rate[name]) / (1 - common))
        waiting[name][both] = 0


def right_or_wrong(rng, chance):
    return (rng.random(chance.shape) < chance).astype(float)


def stars(rng, chance):
    """Marks of 0 to 5 stars with that mean, as a part of 5."""
    return rng.binomial(5, chance) / 5


@pytest.mark.parametrize(
    ("share", "rate", "marks"),
    [(0.1, 0.9, stars), (0.5, 0.5, right_or_wrong), (0.5, 0.03, right_or_wrong), (0.02, 0.7, stars)],
)
def test_assigned_traffic_without_a_difference_is_rarely_decided_when_checked_after_every_answer(
    share, rate, marks
):
    import numpy as np

    runs = 2000
    winner, _, _ = play_dealt_arms(
        np.random.default_rng(8),
        share=share,
        rate_a=rate,
        rate_b=rate,
        runs=runs,
        steps=600,
        alpha=0.05,
        marks=marks,
    )
    assert np.count_nonzero(winner) / runs <= 0.05


@pytest.mark.parametrize("marks", [right_or_wrong, stars])
def test_a_better_challenger_with_a_tenth_of_the_traffic_is_found(marks):
    import numpy as np

    winner, _, _ = play_dealt_arms(
        np.random.default_rng(9),
        share=0.1,
        rate_a=0.5,
        rate_b=0.8,
        runs=200,
        steps=2500,
        alpha=0.05,
        marks=marks,
    )
    assert np.count_nonzero(winner == 1) >= 190
    assert np.count_nonzero(winner == -1) <= 4


@pytest.mark.parametrize("marks", [right_or_wrong, stars])
def test_the_simulation_plays_the_test_that_ships(marks):
    import numpy as np

    for seed in range(20):
        winner, capital, path = play_dealt_arms(
            np.random.default_rng(seed),
            share=0.3,
            rate_a=0.4,
            rate_b=0.8,
            runs=1,
            steps=150,
            alpha=0.05,
            marks=marks,
        )
        test = TwoArms(0.05)
        for is_new, mark in path:
            test.update("candidate" if is_new else "baseline", successes=mark, failures=1 - mark)
        assert test.log_capital == pytest.approx(capital[0], abs=1e-9)
        assert {1: "candidate", -1: "baseline", 0: None}[winner[0]] == test.winner


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_marks_move_the_interval_as_parts_of_a_success(base, new):
    test = TwoArms()
    for mark in base:
        test.update("baseline", successes=mark, failures=1 - mark)
    for mark in new:
        test.update("candidate", successes=mark, failures=1 - mark)
    found = test.interval()
    assert -1 <= found.low <= test.difference <= found.high <= 1


@given(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), max_size=120))
@settings(max_examples=40, deadline=None)
def test_a_mean_test_of_wins_losses_and_ties_has_a_closed_form(steps):
    test = MeanTest()
    for step in steps:
        test.update(step)
    wins, losses = steps.count(1.0), steps.count(-1.0)
    # Jeffreys' prior over 64 nodes, which is exact up to 127 pairs that differ.
    whole = special.betaln(wins + 0.5, losses + 0.5) - special.betaln(0.5, 0.5)
    assert test.log_e_value == pytest.approx(whole + (wins + losses) * math.log(2), abs=1e-6)


def test_the_interval_of_a_mean_test_excludes_0_when_it_is_decided_and_holds_the_mean():
    test = MeanTest()
    for _ in range(60):
        test.update(0.3)
        test.update(0.1)
    low, high = test.interval()
    assert test.winner == "candidate"
    assert 0 < low < 0.2 < high
    with pytest.raises(ValueError, match="between -1 and 1"):
        test.update(1.5)
