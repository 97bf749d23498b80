"""Prices for an evaluation: of logged calls, of endpoints, of the machine that evaluates; and the savings.

In: an open project with its cases, subjects, audit and dataset. Out: cases with their cost, the price of a
subject's answers, Savings. Prices come from the catalog; the evaluation itself knows none.
"""

from collections.abc import Mapping
from datetime import date

from graftwork.evaluate.costs import AnswerPrice
from graftwork.evaluate.savings import DAYS_PER_MONTH, Volume, find_savings
from graftwork.evaluate.subjects import Subject
from graftwork.pipeline.open_project import OpenProject
from graftwork.plan.catalog.api_prices import find_token_price, index_prices, list_token_prices
from graftwork.records.costs import CallUsage, Savings, TokenPrice, UsageDay
from graftwork.records.dataset import Audit, Dataset
from graftwork.records.report import Case


def price_cases(work: OpenProject, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases with the cost of their logged reply, where its tokens and a price are known."""
    if not any(case.usage is not None for case in cases):
        return cases
    known = index_prices(list_token_prices())
    named = work.settings.evaluate.costs.logged_model
    return tuple(
        case if case.usage is None else case.model_copy(update={"usage": _priced(case.usage, known, named)})
        for case in cases
    )


def _priced(usage: CallUsage, known: Mapping[str, TokenPrice], named: str | None) -> CallUsage:
    if usage.cost is not None or usage.prompt_tokens is None or usage.reply_tokens is None:
        return usage
    found = (find_token_price(name, known) for name in (usage.model, named) if name)
    price = next((price for price in found if price is not None), None)
    if price is None:
        return usage
    cost = price.cost_of(usage.prompt_tokens, usage.reply_tokens, usage.cached_tokens or 0)
    return usage.model_copy(update={"cost": cost})


def price_of_subject(work: OpenProject, subject: Subject) -> AnswerPrice | None:
    """Tokens at an endpoint with a known price; seconds of this machine for models of our own."""
    if subject.job is None:
        return None
    if subject.job.endpoint is not None:
        known = index_prices(list_token_prices())
        return AnswerPrice(tokens=find_token_price(subject.job.endpoint.model, known))
    return AnswerPrice(usd_per_hour=work.settings.evaluate.costs.usd_per_hour)


def savings_of(work: OpenProject, audit: Audit, dataset: Dataset) -> Savings | None:
    """What the model of this project would save on the calls that it is trained to take over."""
    usage = tuple(day for day in audit.usage if _is_own(work, day))
    if not usage:
        return None
    settings = work.settings.evaluate.costs
    known = index_prices(list_token_prices())
    volume = Volume(settings.requests_per_month, settings.logged_model, work.settings.evaluate.confidence)
    dated = [day.day for day in usage if day.day is not None]
    calls = settings.requests_per_month
    if calls is None and dated:
        days = (max(dated) - min(dated)).days + 1
        calls = sum(day.calls for day in usage if day.day is not None) / days * DAYS_PER_MONTH
    hosting = None
    if calls is not None:
        from graftwork.pipeline.hosting import find_hosting

        hosting = find_hosting(work, dataset, calls_per_month=calls, today=date.today())
    return find_savings(
        usage, find_price=lambda name: find_token_price(name, known), hosting=hosting, volume=volume
    )


def _is_own(work: OpenProject, day: UsageDay) -> bool:
    roles = work.settings.all_models[work.model].keep.role
    return not roles or day.group in roles
