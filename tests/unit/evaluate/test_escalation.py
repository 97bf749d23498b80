"""Escalation predicted: shares, quality and cost of the pair follow from the answers of both models."""

import pytest
from gate_samples import new_generation
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.escalation import Answered, forecast
from graftwork.evaluate.report import make_rate
from graftwork.records.report import SubjectReport

NOTHING = new_generation("", answers=0)


def answered(name, *, costs=1.0, is_reference=False, **metrics):
    scores = {
        metric: make_rate(
            metric, scores={f"c{i}": None if v is None else float(v) for i, v in enumerate(values)}
        )
        for metric, values in metrics.items()
    }
    count = len(next(iter(metrics.values())))
    known = {f"c{i}": costs for i in range(count)}
    report = SubjectReport(subject=name, metrics=scores, generation=NOTHING)
    return Answered(report, known, is_reference)


def predict_pair(small, large, checks):
    """The forecast where a check escalates the cases that it grades below 1."""
    failing = {
        check: {
            case
            for case, grade in small.report.metrics[check].scores.items()
            if grade is not None and grade < 1
        }
        for check in checks
    }
    return forecast(small, large, metric="right", failing=failing, sessions={})


SMALL = {"right": [1, 1, 0, 0, 0, 1], "json_valid": [1, 1, 0, 0, 1, 0], "short": [1, 1, 1, 1, 0, 1]}


def predict(checks=("json_valid",), **options):
    small = answered("small", costs=0.001, **SMALL)
    large = answered("large", costs=0.02, right=[1, 1, 1, 0, 1, 1], **options)
    return predict_pair(small, large, checks)


def test_the_large_model_answers_where_a_check_fails():
    found = predict()
    assert found.chosen.escalated.value == 3 / 6
    assert found.chosen.quality.value == 4 / 6
    assert found.gain_over_small == pytest.approx(1 / 6)
    assert found.loss_to_large == pytest.approx(1 / 6)
    assert found.gain_low <= found.gain_over_small <= found.gain_high


def test_both_models_are_paid_for_where_it_escalates():
    assert predict().chosen.cost_per_1000 == pytest.approx(1000 * (6 * 0.001 + 3 * 0.02) / 6)
    assert predict().large_alone.cost_per_1000 == pytest.approx(20)
    assert predict().options[0].cost_per_1000 == pytest.approx(1)


def test_an_unknown_cost_is_not_taken_for_zero():
    small, large = answered("small", **SMALL), answered("large", costs=None, right=[1] * 6)
    found = predict_pair(small, large, ["json_valid"])
    assert found.chosen.cost_per_1000 is None
    assert found.options[0].cost_per_1000 is not None
    [remark] = found.remarks
    assert "the price of large" in remark
    assert "small" not in remark


def test_the_remark_about_an_unknown_cost_names_whose_it_is():
    small = answered("small", costs=None, **SMALL)
    [remark] = predict_pair(small, answered("large", right=[1] * 6), ["json_valid"]).remarks
    assert "small costs (set evaluate.costs.usd_per_hour)" in remark
    assert "the log" not in remark
    log = answered("log", costs=None, is_reference=True, right=[1] * 6)
    assert "it states neither costs nor tokens" in predict_pair(small, log, ["json_valid"]).remarks[1]


def test_checks_are_added_in_the_order_of_their_gain():
    found = predict(checks=("json_valid", "short"))
    assert [option.checks for option in found.options] == [(), ("short",), ("short", "json_valid")]


def test_a_check_that_does_not_apply_decides_nothing():
    small = answered("small", right=[0, 0], json_valid=[None, 0])
    found = predict_pair(small, answered("large", right=[1, 1]), ["json_valid"])
    assert found.chosen.escalated.value == 0.5


def test_the_log_counts_as_right_and_says_so():
    small = answered("small", right=[0, 1], json_valid=[0, 1])
    log = answered("log", is_reference=True, json_valid=[1, 1])
    found = predict_pair(small, log, ["json_valid"])
    assert found.large_alone.quality.value == 1.0
    assert any("counts as right everywhere" in remark for remark in found.remarks)


grades = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())


@given(st.lists(grades, min_size=1, max_size=40))
@settings(max_examples=30)
def test_more_checks_never_escalate_less_and_the_pair_is_a_mix(rows):
    right, first, second, large = (list(column) for column in zip(*rows, strict=True))
    small = answered("small", right=right, a=first, b=second)
    found = predict_pair(small, answered("large", right=large), ["a", "b"])
    shares = [option.escalated.value for option in found.options]
    assert shares == sorted(shares)
    for option in found.options:
        assert option.quality.low <= option.quality.value <= option.quality.high
    assert found.options[0].quality.value == pytest.approx(sum(right) / len(right))
    if all(not (a and b) for a, b in zip(first, second, strict=True)):
        assert found.chosen.quality.value == pytest.approx(sum(large) / len(large))
