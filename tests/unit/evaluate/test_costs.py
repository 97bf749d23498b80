"""What answers cost: tokens, dollars per success, the slowest requests, and what a month of the log costs."""

from datetime import date, timedelta

import pytest
from gate_samples import new_answer, new_generation
from hypothesis import given
from hypothesis import strategies as st

from graftwork.evaluate.costs import (
    AnswerPrice,
    Volume,
    costs_of_answers,
    find_savings,
    measure_cost,
    measure_slowest,
    measure_tokens,
)
from graftwork.evaluate.gate.rules import Surroundings, judge_guardrail, judge_win
from graftwork.evaluate.gate.settings import GateRule, Win
from graftwork.grading.metrics import COST_PER_SUCCESS, LATENCY_P95, TOKENS_PER_TASK, show, show_dollars
from graftwork.records.base import Figure
from graftwork.records.interaction import Hosting, TokenPrice, UsageDay
from graftwork.records.report import Metric, Report, SubjectReport

MINI = TokenPrice(model="mini", usd_per_million_input=1.0, usd_per_million_output=4.0)


def generation(subject="base", seconds=()):
    return new_generation(
        subject, answers=10, seconds=10.0, single_latency_seconds=tuple(seconds), peak_memory_gib=0.0
    )


def answer(case, *, prompt=100, tokens=50, seconds=1.0):
    return new_answer(case, "x", tokens=tokens, prompt_tokens=prompt, seconds=seconds)


def hosting(dollars=100.0):
    return Hosting(
        machine="A4000",
        place="here",
        usd_per_month=Figure.exact(dollars),
        users=1,
        answer_seconds=Figure.exact(1.0),
        weights="16 bits",
        source="list",
        dated="2026-11-01",
        sentence="Hosting.",
    )


def test_cached_tokens_are_part_of_the_prompt_and_cost_their_own_price():
    price = MINI.model_copy(update={"usd_per_million_cached": 0.1})
    assert price.cost_of(1_000_000, 0, 400_000) == pytest.approx(0.6 + 0.04)
    assert MINI.cost_of(1_000_000, 0, 400_000) == pytest.approx(1.0)


def test_cost_per_success_is_all_dollars_over_the_successes():
    costs = {str(n): 0.01 for n in range(40)}
    found = measure_cost(
        costs, successes={str(n): float(n < 20) for n in range(40)}, confidence=0.95, sessions={}
    )
    assert found.value == pytest.approx(0.02)
    assert found.low < 0.02 < found.high


def test_cost_per_success_leaves_out_cases_without_a_cost_and_needs_a_success():
    known = {"a": 0.1, "b": None, "c": 0.3}
    found = measure_cost(known, successes=dict.fromkeys(known, 1.0), confidence=0.95, sessions={})
    assert (found.n, found.value) == (2, pytest.approx(0.2))
    assert measure_cost(known, successes=dict.fromkeys(known, 0.0), confidence=0.95, sessions={}) is None


def test_cost_per_success_with_hardly_a_success_has_a_finite_bound():
    costs = {str(n): 0.01 for n in range(10)}
    found = measure_cost(
        costs, successes={str(n): float(n == 0) for n in range(10)}, confidence=0.95, sessions={}
    )
    assert found.low <= 0.1 < found.high < 100


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), min_size=2, max_size=30))
def test_cost_per_success_lies_in_its_interval(rows):
    costs = {str(n): cost for n, (cost, _) in enumerate(rows)}
    right = {str(n): float(good) for n, (_, good) in enumerate(rows)}
    found = measure_cost(costs, successes=right, confidence=0.95, sessions={})
    assert found is None or 0 <= found.low <= found.value <= found.high < float("inf")


def test_cases_of_one_session_widen_the_interval_of_the_cost():
    costs = {str(n): 0.01 * (1 + n // 10) for n in range(40)}
    right = dict.fromkeys(costs, 1.0)
    alone = measure_cost(costs, successes=right, confidence=0.95, sessions={})
    together = measure_cost(
        costs, successes=right, confidence=0.95, sessions={str(n): str(n // 10) for n in range(40)}
    )
    assert together.clusters == 4
    assert together.high - together.low > alone.high - alone.low


def test_own_models_cost_the_seconds_of_the_machine_and_endpoints_their_tokens():
    said = {"a": [answer("a", seconds=3.6)]}
    own = costs_of_answers(said, generation=generation(), price=AnswerPrice(usd_per_hour=1.0))
    paid = costs_of_answers(said, generation=generation(), price=AnswerPrice(tokens=MINI))
    assert own == {"a": pytest.approx(0.001)}
    assert paid == {"a": pytest.approx((100 + 200) / 1e6)}
    assert costs_of_answers(said, generation=generation(), price=AnswerPrice()) == {}


def test_tokens_per_task_is_the_mean_over_cases_whose_tokens_are_known():
    found = measure_tokens({"a": 100.0, "b": None, "c": 300.0}, confidence=0.95, sessions={})
    assert (found.value, found.n) == (200.0, 2)
    assert measure_tokens({"a": None}, confidence=0.95, sessions={}) is None


def test_the_95th_percentile_of_few_requests_is_measured_and_bounds_nothing():
    few = measure_slowest([0.1 * n for n in range(1, 9)], confidence=0.95)
    assert few.value == pytest.approx(0.8)
    assert "too few" in few.method
    many = measure_slowest([0.01 * n for n in range(1, 201)], confidence=0.95)
    assert many.value == pytest.approx(1.9)
    assert many.low < many.value < many.high


def metric(name, value, low, high, n=200, scores=None):
    return Metric(name=name, kind="number", value=value, low=low, high=high, n=n, scores=scores or {})


def report(candidate, log):
    def subject(name, metrics):
        return SubjectReport(subject=name, metrics={m.name: m for m in metrics}, generation=generation(name))

    return Report(
        cases_hash="c",
        cases=200,
        baseline=subject("base", candidate),
        candidate=subject("adapter", candidate),
        comparisons=(),
        others=(subject("log", log),),
    )


def test_a_proven_saving_of_cost_per_success_against_the_log_is_a_win():
    cheap = [metric(COST_PER_SUCCESS, 0.001, 0.0008, 0.0012)]
    dear = [metric(COST_PER_SUCCESS, 0.01, 0.009, 0.011)]
    win = Win(metric=COST_PER_SUCCESS, against="log", by=0.5)
    found = judge_win(win, report=report(cheap, dear), around=Surroundings())
    assert found.outcome == "pass"
    assert "$0.0078" in found.sentence
    assert judge_win(win, report=report(dear, cheap), around=Surroundings()).outcome == "fail"
    nearly = [metric(COST_PER_SUCCESS, 0.004, 0.001, 0.009)]
    assert judge_win(win, report=report(nearly, dear), around=Surroundings()).outcome == "unknown"


def test_tokens_are_compared_with_the_log_case_by_case():
    less = {str(n): 100.0 + n % 7 for n in range(40)}
    more = {str(n): 150.0 + n % 5 for n in range(40)}
    win = Win(metric=TOKENS_PER_TASK, against="log", by=0.2)
    found = judge_win(
        win,
        report=report(
            [measure_tokens(less, confidence=0.95, sessions={})],
            [measure_tokens(more, confidence=0.95, sessions={})],
        ),
        around=Surroundings(),
    )
    assert (found.outcome, found.n) == ("pass", 40)


def test_a_guardrail_on_the_slowest_requests_asks_for_enough_of_them():
    rule = GateRule(metric=LATENCY_P95, margin=0.5, against="log")
    few = [metric(LATENCY_P95, 0.2, 0.1, 0.3, n=8)]
    enough = [metric(LATENCY_P95, 0.2, 0.1, 0.3)]
    log = [metric(LATENCY_P95, 2.0, 1.5, 2.5)]
    unknown = judge_guardrail(rule, report=report(few, log), around=Surroundings())
    assert unknown.outcome == "unknown"
    assert "evaluate.latency_cases" in unknown.sentence
    assert judge_guardrail(rule, report=report(enough, log), around=Surroundings()).outcome == "pass"


def test_dollars_are_shown_with_the_digits_that_matter():
    assert [show_dollars(x) for x in (1234.5, 12.3, 0.00042, 0)] == ["$1,234", "$12.30", "$0.00042", "$0.00"]
    assert show(COST_PER_SUCCESS, 0.0123) == "$0.012"


def days(count, *, calls=1000, **fields):
    first = date(2026, 10, 1)
    usual = {"model": "mini", "prompt_characters": 0, "reply_characters": 0}
    return [
        UsageDay(day=first + timedelta(days=n), calls=calls + 10 * (n % 3), **usual | fields)
        for n in range(count)
    ]


def savings(usage, *, host=None, **volume):
    return find_savings(
        usage, find_price=lambda name: MINI if name == "mini" else None, hosting=host, volume=Volume(**volume)
    )


def test_a_month_of_the_log_costs_its_mean_day_times_the_days_of_a_month():
    found = savings(days(30, costed=1000, cost=10.0), host=hosting(100.0))
    assert found.logged_usd_per_month.value == pytest.approx(304.4, rel=1e-3)
    assert found.saved_usd_per_month.value == pytest.approx(204.4, rel=1e-3)
    assert "saves $204" in found.sentence
    assert found.unpriced == pytest.approx(0.01, abs=0.01)


def test_days_without_a_call_count():
    sparse = [*days(1, costed=1000, cost=10.0), *days(10, costed=1000, cost=10.0)[-1:]]
    assert savings(sparse).logged_usd_per_month.value == pytest.approx(2 * 10 / 10 * 30.4375)


def test_days_that_differ_widen_the_range():
    same = savings(days(20, costed=1000, cost=10.0)).logged_usd_per_month
    mixed = [day.model_copy(update={"cost": 20.0 * (n % 2)}) for n, day in enumerate(days(20, costed=1000))]
    found = savings(mixed).logged_usd_per_month
    assert found.high - found.low > same.high - same.low
    assert found.low < found.value < found.high


def test_tokens_without_a_cost_are_priced_and_the_price_is_named():
    found = savings(days(10, counted=1000, unpriced_prompt_tokens=1_000_000, unpriced_reply_tokens=1_000_000))
    assert found.logged_usd_per_month.value == pytest.approx(5.0 * 30.4375)
    assert any("Price of mini" in note for note in found.notes)


def test_characters_stand_for_tokens_with_a_range():
    found = savings(days(10, uncounted_prompt_characters=4_000_000), logged_model="mini")
    assert found.logged_usd_per_month.value == pytest.approx(1.0 * 30.4375)
    assert found.logged_usd_per_month.low == pytest.approx(0.8 * 30.4375)
    assert found.logged_usd_per_month.high == pytest.approx(4 / 3 * 30.4375)
    assert found.estimated == 1.0
    assert any("estimated" in note for note in found.notes)


def test_a_model_without_a_price_says_what_to_set():
    found = savings(days(3, model="tongyi", uncounted_prompt_characters=100), host=hosting())
    assert found.unpriced == 1.0
    assert found.saved_usd_per_month is None
    assert "evaluate.costs.logged_model" in found.sentence


def test_a_log_without_times_needs_the_volume():
    undated = [day.model_copy(update={"day": None}) for day in days(1, costed=1000, cost=10.0)]
    found = savings(undated, host=hosting())
    assert found.saved_usd_per_month is None
    assert "requests_per_month" in found.sentence
    stated = savings(undated, host=hosting(), requests_per_month=100_000)
    assert stated.logged_usd_per_month.value == pytest.approx(1000.0)
    assert stated.saved_usd_per_month.value == pytest.approx(900.0)
