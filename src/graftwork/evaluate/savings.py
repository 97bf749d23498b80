"""What the logged model costs a month, and what a small one saves.

In: the usage of the log by day, prices of tokens, what hosting costs. Out: Savings with an interval over
days. Calls whose tokens the log does not state are estimated from their characters, with a range. Pure.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from typing import NamedTuple

from graftwork.evaluate.statistics.means import bootstrap_mean
from graftwork.grading.metrics import show_dollars
from graftwork.records.base import Figure
from graftwork.records.interaction import Hosting, Savings, TokenPrice, UsageDay

DAYS_PER_MONTH = 365.25 / 12
CHARACTERS_PER_TOKEN = (5.0, 4.0, 3.0)
"""At least, usually and at most as many tokens as characters over these."""
USD = "USD"

FindPrice = Callable[[str], TokenPrice | None]


class Volume(NamedTuple):
    """What is stated besides the log. None: what the log's own days say."""

    requests_per_month: float | None = None
    logged_model: str | None = None
    confidence: float = 0.95


class _Costed(NamedTuple):
    """One day's calls: their cost at least, usually and at most, and how many of them have a price."""

    calls: int
    costs: tuple[float, float, float]
    priced: int
    estimated: int


def find_savings(
    usage: Sequence[UsageDay], *, find_price: FindPrice, hosting: Hosting | None, volume: Volume
) -> Savings | None:
    """None where there is no call at all."""
    if not usage:
        return None
    prices: dict[str, TokenPrice] = {}

    def price_of(day: UsageDay) -> TokenPrice | None:
        found = next(
            (p for name in (day.model, volume.logged_model) if name and (p := find_price(name))), None
        )
        if found is not None:
            prices[found.model] = found
        return found

    costed = [(day, _cost(day, price_of(day))) for day in usage]
    calls = sum(cost.calls for _, cost in costed)
    known = any(day.day is not None for day in usage)
    series = _by_day([(day.day, cost) for day, cost in costed if day.day is not None])
    if not series and volume.requests_per_month is not None:
        # Without days all calls are one: what a call costs is known, and how many there are is stated.
        series = _by_day([(date.min, cost) for _, cost in costed])
    per_month = _calls_per_month(series, volume)
    logged = _logged_per_month(series, volume)
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
        days=len(series) if known else 0,
        models=tuple(name for name, _ in models.most_common()),
        prices=tuple(prices.values()),
        estimated=sum(cost.estimated for _, cost in costed) / calls,
        unpriced=1 - priced / calls,
        sentence="",
    )
    return savings.model_copy(
        update={"sentence": _say(savings, known=per_month is not None), "notes": tuple(_note(savings))}
    )


def _cost(day: UsageDay, price: TokenPrice | None) -> _Costed:
    """A logged cost counts as it is; what has none is priced by its tokens, or by its characters."""
    unpriced = day.counted and (day.unpriced_prompt_tokens or day.unpriced_reply_tokens)
    uncounted = day.uncounted_prompt_characters or day.uncounted_reply_characters
    without_tokens = max(day.calls - day.counted - day.costed, 0) if uncounted else 0
    if price is None:
        return _Costed(day.calls, (day.cost,) * 3, day.costed, 0)
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
    return _Costed(day.calls, (low, usual, high), day.calls, without_tokens)


def _by_day(dated: Sequence[tuple[date, _Costed]]) -> list[_Costed]:
    """Every day from the first to the last, days without a call included; none where no day is known."""
    if not dated:
        return []
    first, last = min(day for day, _ in dated), max(day for day, _ in dated)
    days = [first + timedelta(days=number) for number in range((last - first).days + 1)]
    sums = dict.fromkeys(days, _Costed(0, (0.0, 0.0, 0.0), 0, 0))
    for day, cost in dated:
        so_far = sums[day]
        low, usual, high = (a + b for a, b in zip(so_far.costs, cost.costs, strict=True))
        sums[day] = _Costed(
            so_far.calls + cost.calls,
            (low, usual, high),
            so_far.priced + cost.priced,
            so_far.estimated + cost.estimated,
        )
    return list(sums.values())


def _calls_per_month(series: Sequence[_Costed], volume: Volume) -> Figure | None:
    if volume.requests_per_month is not None:
        return Figure.exact(volume.requests_per_month, "calls")
    if not series:
        return None
    return _figure([[float(day.calls) for day in series]] * 3, DAYS_PER_MONTH, "calls", volume.confidence)


def _logged_per_month(series: Sequence[_Costed], volume: Volume) -> Figure | None:
    if not series:
        return None
    scale = DAYS_PER_MONTH
    if volume.requests_per_month is not None:
        # So many calls as are stated, at the cost that the log's own calls have.
        scale = volume.requests_per_month * len(series) / sum(day.calls for day in series)
    kinds = [[day.costs[kind] for day in series] for kind in range(3)]
    return _figure(kinds, scale, USD, volume.confidence)


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


def _say(savings: Savings, *, known: bool) -> str:
    logged, hosting, saved = savings.logged_usd_per_month, savings.hosting, savings.saved_usd_per_month
    # Calls of models without a price were priced as another model.
    who = savings.prices[0].model if savings.prices else savings.models[0]
    calls = f"{savings.calls_per_month.value:,.0f} calls"
    if savings.unpriced >= 1:
        return (
            f"What {who} costs is not known: the log states no cost, and the price table has no such model. "
            "Name one under evaluate.costs.logged_model, or add its price to your own api_prices.csv."
        )
    if not known:
        return (
            "The log does not state when its calls were made: set evaluate.costs.requests_per_month for "
            "what a month costs."
        )
    spent = f"{who} costs {_range(logged)} a month at the logged volume of {calls}"
    if hosting is None or saved is None:
        return f"{spent}; what hosting the small model costs is not known."
    verb = "saves" if saved.value >= 0 else "costs"
    more = "" if saved.value >= 0 else " more"
    shown = saved if saved.value >= 0 else Figure(value=-saved.value, low=-saved.high, high=-saved.low)
    return (
        f"The small model {verb} {_range(shown)} a month{more}: {spent}, hosting it "
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
