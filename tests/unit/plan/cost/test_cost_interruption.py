"""Interruptions: the formula against a simulation that knows nothing of it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.plan.cost import Hazard, best_interval, choose_saves, expect, young_interval


def live_through(hazard: Hazard, *, work: float, saves: int, dice: random.Random) -> tuple[float, int, float]:
    """One run, event by event: hours of machine, interruptions, hours on the clock."""
    machine, clock, interruptions = 0.0, 0.0, 0
    until_next = dice.expovariate(hazard.rate)
    todo = [hazard.restart] + [work / saves + hazard.save] * saves
    ready = False
    while todo:
        piece = todo[0] if ready or len(todo) == saves + 1 else hazard.restart
        if until_next >= piece:
            machine, clock, until_next = machine + piece, clock + piece, until_next - piece
            if ready or len(todo) == saves + 1:
                todo.pop(0)
            ready = True
        else:
            machine, clock = machine + until_next, clock + until_next + hazard.wait
            interruptions += 1
            until_next, ready = dice.expovariate(hazard.rate), False
    return machine, interruptions, clock


@pytest.mark.parametrize(
    ("rate", "save", "restart", "wait", "work", "saves"),
    [
        (0.05, 0.01, 0.15, 0.25, 8.0, 6),
        (0.5, 0.02, 0.1, 0.5, 4.0, 8),
        (1.5, 0.05, 0.2, 0.0, 3.0, 3),
        (0.02, 0.002, 0.1, 1.0, 40.0, 1),
    ],
)
def test_expected_hours_are_those_of_a_simulated_run(rate, save, restart, wait, work, saves):
    hazard = Hazard(rate=rate, save=save, restart=restart, wait=wait)
    dice = random.Random(20261115)
    lives = [live_through(hazard, work=work, saves=saves, dice=dice) for _ in range(6000)]
    expected = expect(hazard, work=work, saves=saves)
    for index, estimated in enumerate((expected.machine, expected.interruptions, expected.clock)):
        values = [life[index] for life in lives]
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        # Four standard errors: a wrong formula is off by far more.
        assert abs(mean - estimated) < 4 * deviation / math.sqrt(len(values))


def test_a_run_without_interruptions_takes_what_it_takes():
    calm = Hazard(rate=0.0, save=0.01, restart=0.2)
    assert expect(calm, work=5.0, saves=3).machine == pytest.approx(5.0 + 0.2 + 0.03)
    assert expect(calm, work=5.0, saves=3).lost == 0.0
    assert best_interval(calm) == math.inf
    assert choose_saves(calm, work=5.0) == 1


@given(rate=st.floats(0.001, 3.0), save=st.floats(0.0005, 0.2), work=st.floats(0.5, 50.0))
def test_no_other_number_of_saves_is_better_than_the_chosen(rate, save, work):
    hazard = Hazard(rate=rate, save=save, restart=0.1)
    chosen = choose_saves(hazard, work=work)
    best = expect(hazard, work=work, saves=chosen).machine
    for other in {max(1, chosen - 1), chosen + 1, max(1, chosen // 2), 2 * chosen}:
        assert best <= expect(hazard, work=work, saves=other).machine * (1 + 1e-9)


@given(rate=st.floats(0.001, 1.0), save=st.floats(0.0005, 0.1))
def test_the_exact_interval_is_below_youngs_and_meets_it_where_interruptions_are_rare(rate, save):
    hazard = Hazard(rate=rate, save=save, restart=0.1)
    exact, young = best_interval(hazard), young_interval(hazard)
    assert exact <= young
    assert exact >= young * (1 - math.sqrt(rate * save))


@given(
    rate=st.floats(0.0, 2.0), more=st.floats(0.01, 1.0), work=st.floats(0.1, 20.0), saves=st.integers(1, 30)
)
def test_more_interruptions_never_make_a_run_shorter(rate, more, work, saves):
    calm = expect(Hazard(rate=rate, save=0.01, restart=0.1), work=work, saves=saves)
    wild = expect(Hazard(rate=rate + more, save=0.01, restart=0.1), work=work, saves=saves)
    assert wild.machine >= calm.machine
    assert wild.lost >= calm.lost >= 0
    assert calm.clock >= calm.machine


def test_a_flat_tenth_is_wrong_in_both_directions():
    """Two hours at 0.05 interruptions an hour lose 2 %; thirty hours saved once at the end lose far more."""
    short = Hazard(rate=0.05, save=0.003, restart=0.1)
    little = expect(short, work=2.0, saves=choose_saves(short, work=2.0))
    assert little.lost / 2.0 < 0.03
    never_saved = expect(short, work=30.0, saves=1)
    assert never_saved.lost / 30.0 > 1.0


def test_a_save_that_costs_nothing_is_asked_about():
    with pytest.raises(ValueError, match="state what it costs"):
        choose_saves(Hazard(rate=0.1, save=0.0, restart=0.1), work=2.0)
