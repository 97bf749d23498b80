"""A threshold of log-probabilities: chosen on validation cases, shown on test cases, compared with live."""

import random
import re
from xml.etree import ElementTree

import pytest

from graftwork.evaluate.escalation import LiveRequest, PairedCase, compare_live, make_curve, mean_cost
from graftwork.records.live import EscalationForecast, EscalationOption, MeasuredShare
from graftwork.views.document import Table
from graftwork.views.endpoint import draw_by_cost, draw_curve, view_forecast
from graftwork.views.html import body


def draw_cases(count, *, seed, useful=True):
    """Right answers have higher log-probabilities where these are `useful`."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        right = chance.random() < 0.7
        logprob = min(chance.gauss(-0.3 if right and useful else -0.9, 0.2), -1e-6)
        large = float(chance.random() < 0.95)
        made.append(PairedCase(f"s{number}", logprob, float(right), large, 0.0001, 0.01))
    return made


def forecast_of(curve):
    share = MeasuredShare(value=0.7, low=0.6, high=0.8, n=100)
    alone = EscalationOption(checks=(), escalated=share, quality=share, cost_per_1000=0.1)
    large = alone.model_copy(update={"cost_per_1000": 10.0})
    return EscalationForecast(
        small="champion", large="log", metric="exact", cases=100, chosen=alone, options=(alone,),
        large_alone=large, gain_over_small=0, gain_low=0, gain_high=0, loss_to_large=0, loss_low=0,
        loss_high=0, curve=curve, made_at="2026-01-01T00:00:00Z",
    )  # fmt: skip


def test_the_threshold_is_chosen_on_validation_and_keeps_the_largest_rate():
    validation, test = draw_cases(150, seed=1), draw_cases(150, seed=2)
    curve = make_curve(validation, test, max_rate=0.3)
    assert curve.validation_escalated <= 0.3
    assert curve.chosen.quality.value > 0.8
    assert curve.auc > 0.9
    assert curve.chosen.quality.n == 150
    rates = [point.escalated.value for point in curve.points]
    assert rates == sorted(rates)
    assert rates[0] < 0.05
    assert rates[-1] > 0.95


def test_a_useless_log_probability_is_seen_by_its_auc():
    curve = make_curve(
        draw_cases(120, seed=1, useful=False), draw_cases(120, seed=2, useful=False), max_rate=0.2
    )
    assert abs(curve.auc - 0.5) < 0.15


@pytest.mark.parametrize(("seed", "max_rate"), [(1, 0.01), (2, 0.1), (3, 0.5), (4, 1.0)])
def test_the_rate_on_validation_never_exceeds_what_was_allowed(seed, max_rate):
    curve = make_curve(draw_cases(15, seed=seed), draw_cases(15, seed=seed + 1), max_rate=max_rate)
    assert curve.validation_escalated <= max_rate


def test_a_failing_check_escalates_whatever_the_threshold():
    cases = [case._replace(fails=True) for case in draw_cases(20, seed=3)]
    curve = make_curve(cases, cases, max_rate=0.2)
    assert all(point.escalated.value == 1 for point in curve.points)


def test_a_cost_that_is_not_known_is_not_guessed():
    assert mean_cost([0.1, None], ["a", "b"]) == (None, None, None)
    assert mean_cost([0.0, 0.0], ["a", "b"]) == (0.0, 0.0, 0.0)
    value, low, high = mean_cost([0.001] * 50 + [0.003] * 50, [str(n) for n in range(100)])
    assert low < value < high
    assert value == pytest.approx(2.0)


@pytest.mark.parametrize(("worse", "agrees"), [(False, True), (True, False)])
def test_live_figures_are_held_against_the_forecast(worse, agrees):
    curve = make_curve(draw_cases(120, seed=1), draw_cases(120, seed=2), max_rate=0.3)
    served = draw_cases(500, seed=9, useful=not worse)
    threshold = curve.chosen.threshold
    requests = [
        LiveRequest(
            case.session,
            case.escalates(threshold),
            case.large if case.escalates(threshold) else case.small,
            0.0001 + 0.01 * case.escalates(threshold),
        )
        for case in served
    ]
    live = compare_live(forecast_of(curve), requests)
    assert [figure.name for figure in live.figures] == ["escalated", "quality", "cost_per_1000"]
    assert live.figures[0].agrees is agrees
    assert live.agrees is agrees


def test_without_feedback_live_quality_is_not_known():
    curve = make_curve(draw_cases(20, seed=1), draw_cases(20, seed=2), max_rate=0.3)
    live = compare_live(forecast_of(curve), [LiveRequest("s", False)])
    assert live.figures[1].agrees is None
    assert "feedback" in live.remarks[0]


def test_the_curve_is_drawn_as_well_formed_svg():
    curve = make_curve(draw_cases(20, seed=1), draw_cases(20, seed=2), max_rate=0.3)
    root = ElementTree.fromstring(draw_curve(forecast_of(curve)))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_page_shows_each_model_alone_the_pair_and_both_curves():
    curve = make_curve(draw_cases(40, seed=1), draw_cases(40, seed=2), max_rate=0.3)
    viewed = view_forecast(forecast_of(curve))
    answers, thresholds = (part.rows for part in viewed.parts if isinstance(part, Table))
    names = [row[0] for row in answers]
    assert names[0].endswith("alone")
    assert names[-1].endswith("alone")
    assert ["chosen" in name for name in names].count(True) == 1
    assert ["chosen" in row[0] for row in thresholds].count(True) == 1
    figures = re.findall(r"<svg.*?</svg>", body(viewed))
    assert len(figures) == 2
    for figure in figures:
        assert "<circle" in figure


def test_the_curve_by_cost_is_not_drawn_where_a_cost_is_not_known():
    cases = [case._replace(large_cost=None) for case in draw_cases(40, seed=1)]
    assert draw_by_cost(forecast_of(make_curve(cases, cases, max_rate=0.3))) is None
