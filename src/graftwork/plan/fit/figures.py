"""Figures of a candidate with their ranges. Pure."""

from graftwork.plan.fit.candidate import TIME_SPREAD, Candidate, fits, reserved_figure
from graftwork.plan.fit.describe import strategy_of
from graftwork.plan.fit.roofline import most_tokens_per_second
from graftwork.plan.fit.room import card_room
from graftwork.records.base import Figure
from graftwork.records.fit import Considered, FitQuestion, Level


def speed_figure(candidate: Candidate, question: FitQuestion, level: Level) -> Figure:
    """Tokens a second over all cards; no end of the range passes the roof."""
    spread, value = TIME_SPREAD[level], candidate.tokens_per_second
    tuning = candidate.tuning
    eight = tuning is not None and "eight" in (tuning.form, tuning.head)
    roof = most_tokens_per_second(question, eight=eight)
    high = value * spread if roof is None else max(value, min(value * spread, roof))
    return Figure(value=value, low=value / spread, high=high, unit="tokens/s")


def consider(candidate: Candidate, question: FitQuestion, *, name: str, level: Level) -> Considered:
    return Considered(
        name=name,
        fits=fits(candidate, question, level),
        peak_reserved_gib=reserved_figure(candidate, question, level),
        card_gib=card_room(question, cards=candidate.way.shared.cards),
        host_gib=candidate.host,
        tokens_per_second=speed_figure(candidate, question, level),
        strategy=strategy_of(candidate, question),
    )
