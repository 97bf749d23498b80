"""Costs of answers: tokens per task, dollars per success, the slowest requests; savings of a small model.

Input: cases, answers, what a token or a second costs; the usage of the log by day. Output: metrics with
intervals, clustered by session; Savings with an interval over days. What the log does not state is left out,
never taken for 0, but calls without tokens are estimated from their characters, with a range. Pure; does not
know where prices come from.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from typing import NamedTuple

from graftwork.evaluate.comparison import cluster_cases
from graftwork.evaluate.statistics.intervals import Interval, clopper_pearson, quantile_interval
from graftwork.evaluate.statistics.means import RESAMPLES, bootstrap_mean, score_mean, widened_tail
from graftwork.grading.metrics import COST_PER_SUCCESS, DOLLARS, LATENCY_P95, TOKENS_PER_TASK, show_dollars
from graftwork.records.base import Figure
from graftwork.records.interaction import Hosting, Savings, TokenPrice, UsageDay
from graftwork.records.report import Answer, Case, Generation, Metric

PERCENTILE = 0.95


class AnswerPrice(NamedTuple):
    """Price of an answer: tokens of a paid endpoint, or seconds of a paid machine."""

    tokens: TokenPrice | None = None
    usd_per_hour: float | None = None


def measure_tokens(
    tokens: Mapping[str, float | None], *, confidence: float, sessions: Mapping[str, str]
) -> Metric | None:
    """The mean over the cases whose tokens are known."""
    counts = {case: count for case, count in tokens.items() if count is not None}
    if not counts:
        return None
    values = list(counts.values())
    clusters = cluster_cases(list(counts), sessions=sessions)
    (low, high), method = score_mean(values, clusters=clusters, confidence=confidence)
    mean = math.fsum(values) / len(values)
    return Metric(
        name=TOKENS_PER_TASK,
        kind="number",
        value=mean,
        low=min(low, mean),
        high=max(high, mean),
        n=len(values),
        unit="tokens",
        confidence=confidence,
        scores=dict(tokens),
        clusters=len(set(clusters or ())),
        method=method if clusters is None else f"{method}, by session",
    )


def measure_slowest(seconds: Sequence[float], *, confidence: float) -> Metric | None:
    """Measure the 95th percentile. If too few requests give no upper bound, the interval ends at the
    slowest.
    """
    if not seconds:
        return None
    value = sorted(seconds)[math.ceil(PERCENTILE * len(seconds)) - 1]
    low, high = quantile_interval(seconds, quantile=PERCENTILE, confidence=confidence)
    bounded = math.isfinite(high) and math.isfinite(low)
    return Metric(
        name=LATENCY_P95,
        kind="number",
        value=value,
        low=min(low if math.isfinite(low) else min(seconds), value),
        high=max(high if math.isfinite(high) else max(seconds), value),
        n=len(seconds),
        unit="s",
        confidence=confidence,
        method="exact (order statistics)" if bounded else f"range of {len(seconds)}: too few to bound it",
    )


def measure_cost(
    costs: Mapping[str, float | None],
    *,
    successes: Mapping[str, float | None],
    confidence: float,
    sessions: Mapping[str, str],
) -> Metric | None:
    """All dollars over all successes, over the cases of which both are known; a ratio, by resampling."""
    priced = [case for case, cost in costs.items() if cost is not None and successes.get(case) is not None]
    if not priced:
        return None
    clusters = cluster_cases(priced, sessions=sessions) or priced
    # The dollars and the successes of each cluster.
    groups: dict[str, tuple[float, float]] = {}
    for case, cluster in zip(priced, clusters, strict=True):
        dollars, successful = groups.get(cluster, (0.0, 0.0))
        groups[cluster] = dollars + (costs[case] or 0.0), successful + (successes[case] or 0.0)
    right = math.fsum(successes[case] or 0.0 for case in priced)
    if right < 1 or len(set(clusters)) < 2:
        # Without a success there is no cost of one, and a single session bounds nothing.
        return None
    value = math.fsum(costs[case] or 0.0 for case in priced) / right
    low, high = _bound_ratio(list(groups.values()), cases=len(priced), right=right, confidence=confidence)
    return Metric(
        name=COST_PER_SUCCESS,
        kind="number",
        value=value,
        low=min(low, value),
        high=max(high, value),
        n=len(priced),
        unit=DOLLARS,
        confidence=confidence,
        clusters=len(set(clusters)) if len(set(clusters)) < len(priced) else 0,
        method="bootstrap of the ratio" + (", by session" if len(set(clusters)) < len(priced) else ""),
    )


def _bound_ratio(
    parts: Sequence[tuple[float, float]], *, cases: int, right: float, confidence: float
) -> Interval:
    """Clusters are drawn as a whole. A draw without a success has infinite cost."""
    draw = random.Random(0)
    ratios = []
    for _ in range(RESAMPLES):
        sample = draw.choices(parts, k=len(parts))
        successes = math.fsum(part[1] for part in sample)
        ratios.append(math.fsum(part[0] for part in sample) / successes if successes else math.inf)
    ratios.sort()
    tail, last = widened_tail((1 - confidence) / 2, n=len(parts)), len(ratios) - 1
    low, high = ratios[math.floor(tail * last)], ratios[math.ceil((1 - tail) * last)]
    if not math.isfinite(high):
        # So few successes that a draw may hold none: the most that a case costs over the fewest successes.
        fewest = clopper_pearson(round(right), n=cases, confidence=confidence).low
        most = bootstrap_mean([cost for cost, _ in parts], confidence=confidence).high
        high = most * len(parts) / cases / fewest
    return Interval(low, high)


def tokens_of_log(cases: Sequence[Case]) -> dict[str, float | None]:
    return {case.id: None if case.usage is None else case.usage.tokens for case in cases}


def costs_of_log(cases: Sequence[Case]) -> dict[str, float | None]:
    """The logged cost of each case; None if neither the log nor a price table knows it."""
    return {case.id: None if case.usage is None else case.usage.cost for case in cases}


def tokens_of_answers(by_case: Mapping[str, Sequence[Answer]]) -> dict[str, float | None]:
    """Mean over the repeats of a case; None for an endpoint that counts no tokens."""
    return {
        case: math.fsum(answer.prompt_tokens + answer.tokens for answer in answers) / len(answers)
        if any(answer.prompt_tokens + answer.tokens for answer in answers)
        else None
        for case, answers in by_case.items()
    }


def costs_of_answers(
    by_case: Mapping[str, Sequence[Answer]], *, generation: Generation, price: AnswerPrice | None
) -> dict[str, float | None]:
    """By tokens at an endpoint with a price, else by the seconds of the machine at full load."""
    if price is None:
        return {}
    if price.tokens is not None:
        token_price = price.tokens
        return {
            case: math.fsum(token_price.cost_of(a.prompt_tokens, a.tokens) for a in answers) / len(answers)
            for case, answers in by_case.items()
        }
    if price.usd_per_hour is None or not generation.answers:
        return {}
    # A batch is paid for as a whole: each of its answers has the same share of its seconds.
    return {
        case: price.usd_per_hour / 3600 * math.fsum(answer.seconds for answer in answers) / len(answers)
        for case, answers in by_case.items()
    }


DAYS_PER_MONTH = 365.25 / 12
CHARACTERS_PER_TOKEN = (5.0, 4.0, 3.0)
"""Characters per token, for the lowest, usual and highest number of tokens."""
USD = "USD"

FindPrice = Callable[[str], TokenPrice | None]


class Volume(NamedTuple):
    """Volume given by the user; None: taken from the log's own days."""

    requests_per_month: float | None = None
    logged_model: str | None = None
    confidence: float = 0.95


class DayCost(NamedTuple):
    """One day's calls: lowest, usual and highest cost, and how many of them have a price."""

    calls: int
    costs: tuple[float, float, float]
    priced: int
    estimated: int


def find_savings(
    usage: Sequence[UsageDay], *, find_price: FindPrice, hosting: Hosting | None, volume: Volume
) -> Savings | None:
    """None if there are no calls."""
    if not usage:
        return None
    prices: dict[str, TokenPrice] = {}

    def price_of(day: UsageDay) -> TokenPrice | None:
        price = next(
            (p for name in (day.model, volume.logged_model) if name and (p := find_price(name))), None
        )
        if price is not None:
            prices[price.model] = price
        return price

    costed = [(day, _cost(day, price_of(day))) for day in usage]
    calls = sum(cost.calls for _, cost in costed)
    dated = any(day.day is not None for day in usage)
    series = _by_day([(day.day, cost) for day, cost in costed if day.day is not None])
    if not series and volume.requests_per_month is not None:
        # Without days all calls are one: what a call costs is known, and how many there are is stated.
        series = _by_day([(date.min, cost) for _, cost in costed])
    stated = volume.requests_per_month
    per_month: Figure | None = None
    logged: Figure | None = None
    if stated is not None:
        per_month = Figure.exact(stated, "calls")
    elif series:
        per_day = [float(day.calls) for day in series]
        per_month = _figure([per_day] * 3, DAYS_PER_MONTH, "calls", volume.confidence)
    if series:
        scale = DAYS_PER_MONTH
        if stated is not None:
            # So many calls as are stated, at the cost that the log's own calls have.
            scale = stated * len(series) / sum(day.calls for day in series)
        bounds = [[day.costs[bound] for day in series] for bound in range(3)]
        logged = _figure(bounds, scale, USD, volume.confidence)
    priced = sum(cost.priced for _, cost in costed)
    saved = None
    if hosting is not None and logged is not None and priced:
        host = hosting.usd_per_month
        saved = Figure(
            value=logged.value - host.value, low=logged.low - host.high, high=logged.high - host.low, unit=USD
        )
    models = Counter[str]()
    for day in usage:
        models[day.model or volume.logged_model or "a model that the log does not name"] += day.calls
    savings = Savings(
        calls_per_month=per_month or Figure.exact(float(calls), "calls"),
        logged_usd_per_month=logged or Figure.exact(0.0, USD),
        hosting=hosting,
        saved_usd_per_month=saved if per_month is not None else None,
        confidence=volume.confidence,
        days=len(series) if dated else 0,
        models=tuple(name for name, _ in models.most_common()),
        prices=tuple(prices.values()),
        estimated=sum(cost.estimated for _, cost in costed) / calls,
        unpriced=1 - priced / calls,
        sentence="",
    )
    return savings.model_copy(
        update={"sentence": _say(savings, has_days=per_month is not None), "notes": tuple(_note(savings))}
    )


def _cost(day: UsageDay, price: TokenPrice | None) -> DayCost:
    """A logged cost is used as is; otherwise the call is priced by its tokens or characters."""
    unpriced = day.counted and (day.unpriced_prompt_tokens or day.unpriced_reply_tokens)
    uncounted = day.uncounted_prompt_characters or day.uncounted_reply_characters
    without_tokens = max(day.calls - day.counted - day.costed, 0) if uncounted else 0
    if price is None:
        return DayCost(day.calls, (day.cost,) * 3, day.costed, 0)
    by_tokens = 0.0
    if unpriced:
        by_tokens = price.cost_of(
            day.unpriced_prompt_tokens, day.unpriced_reply_tokens, day.unpriced_cached_tokens
        )
    low, usual, high = (
        day.cost
        + by_tokens
        + price.cost_of(day.uncounted_prompt_characters / size, day.uncounted_reply_characters / size)
        for size in CHARACTERS_PER_TOKEN
    )
    return DayCost(day.calls, (low, usual, high), day.calls, without_tokens)


def _by_day(dated: Sequence[tuple[date, DayCost]]) -> list[DayCost]:
    """Every day from the first to the last, including days without a call; none if no day is known."""
    if not dated:
        return []
    first, last = min(day for day, _ in dated), max(day for day, _ in dated)
    days = [first + timedelta(days=number) for number in range((last - first).days + 1)]
    sums = dict.fromkeys(days, DayCost(0, (0.0, 0.0, 0.0), 0, 0))
    for day, cost in dated:
        so_far = sums[day]
        low, usual, high = (a + b for a, b in zip(so_far.costs, cost.costs, strict=True))
        sums[day] = DayCost(
            so_far.calls + cost.calls,
            (low, usual, high),
            so_far.priced + cost.priced,
            so_far.estimated + cost.estimated,
        )
    return list(sums.values())


def _figure(kinds: Sequence[Sequence[float]], scale: float, unit: str, confidence: float) -> Figure:
    """The mean of a day, times `scale`; the bounds are those of the mean over days like these."""
    low_days, days, high_days = kinds
    value, low, high = (math.fsum(kind) / len(kind) for kind in (days, low_days, high_days))
    if len(days) > 1:
        low = bootstrap_mean(low_days, confidence=confidence).low
        high = bootstrap_mean(high_days, confidence=confidence).high
    return Figure(
        value=scale * value, low=scale * max(min(low, value), 0), high=scale * max(high, value), unit=unit
    )


def _say(savings: Savings, *, has_days: bool) -> str:
    logged, hosting, saved = savings.logged_usd_per_month, savings.hosting, savings.saved_usd_per_month
    # Calls of models without a price were priced as another model.
    model_name = savings.prices[0].model if savings.prices else savings.models[0]
    calls = f"{savings.calls_per_month.value:,.0f} calls"
    if savings.unpriced >= 1:
        return (
            f"What {model_name} costs is not known: the log states no cost, and the price table has no such "
            "model. Name one under evaluate.costs.logged_model, or add its price to your own api_prices.csv."
        )
    if not has_days:
        return (
            "The log does not state when its calls were made: set evaluate.costs.requests_per_month for "
            "what a month costs."
        )
    spent = f"{model_name} costs {_range(logged)} a month at the logged volume of {calls}"
    if hosting is None or saved is None:
        return f"{spent}; what hosting the small model costs is not known."
    verb = "saves" if saved.value >= 0 else "costs"
    suffix = "" if saved.value >= 0 else " more"
    amount = saved if saved.value >= 0 else Figure(value=-saved.value, low=-saved.high, high=-saved.low)
    return (
        f"The small model {verb} {_range(amount)} a month{suffix}: {spent}, hosting it "
        f"{show_dollars(hosting.usd_per_month.value)} ({hosting.machine} at {hosting.place})."
    )


def _range(figure: Figure) -> str:
    if figure.low == figure.high:
        return show_dollars(figure.value)
    return f"{show_dollars(figure.value)} ({show_dollars(figure.low)} to {show_dollars(figure.high)})"


def _note(savings: Savings) -> list[str]:
    notes = []
    if savings.days == 1:
        notes.append("The log covers one day: how much days differ is not known, and not in the range.")
    elif savings.days > 1:
        notes.append(
            f"The range is the {100 * savings.confidence:g} % interval of the mean over {savings.days} days."
        )
    if savings.estimated:
        notes.append(
            f"Tokens of {100 * savings.estimated:.0f} % of the calls are estimated from their characters "
            "(3 to 5 a token): the log does not state them."
        )
    if 0 < savings.unpriced < 1:
        notes.append(f"{100 * savings.unpriced:.0f} % of the calls have no price and are not counted.")
    notes += [
        f"Price of {price.model}: ${price.usd_per_million_input:g} per million input tokens and "
        f"${price.usd_per_million_output:g} per million output tokens ({price.source}, {price.dated})."
        for price in savings.prices
    ]
    if savings.hosting is not None:
        notes.append(savings.hosting.sentence)
    return notes
