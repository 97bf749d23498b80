"""What hosting the small model costs: the cheapest offer of the catalog on which `graft plan serve` says yes.

In: the base of a project, its rows, the calls of a month. Out: a Hosting, or None where no offer fits.
"""

import math
from datetime import date
from pathlib import Path

from graftwork.pipeline.open_project import OpenProject
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.models import find_model
from graftwork.plan.catalog.prices import is_stale, list_offers
from graftwork.plan.serving.answer import make_question, serve
from graftwork.plan.serving.question import ServeAnswer, ServeLoad, say_seconds
from graftwork.records.base import Figure
from graftwork.records.costs import Hosting
from graftwork.records.dataset import Dataset
from graftwork.records.errors import GraftError
from graftwork.records.hardware import Machine, Offer

HOURS_PER_MONTH = 730.5
SECONDS_PER_MONTH = 3600 * HOURS_PER_MONTH
PEAK = 10.0
"""How much more than the mean load is expected at the busiest time, an assumption."""
MOST_USERS = 256
RAM_GIB = 64.0
USUAL_CONTEXT = 0.95
"""The share of rows that the context holds."""


def find_hosting(
    work: OpenProject, dataset: Dataset, *, calls_per_month: float, today: date
) -> Hosting | None:
    """The first offer by price that holds the model and answers the load."""
    try:
        model = find_model(Path(work.base.folder))
    except GraftError:
        return None
    prompt, answer = _lengths(dataset, work.settings.evaluate.max_new_tokens)
    wanted = work.settings.evaluate.costs.gpu
    named = find_gpu(wanted).name if wanted is not None else None
    for offer, price in _by_price():
        try:
            gpu = find_gpu(offer.gpu)
        except GraftError:
            continue
        if named is not None and gpu.name != named:
            continue
        machine = Machine(gpu=gpu, gpus=1, ram_gib=offer.memory_gib or RAM_GIB)

        def ask(users: int, machine: Machine = machine) -> ServeAnswer:
            context = prompt + answer
            load = ServeLoad(adapters=1, users=users, context=context, answer=answer)
            return serve(make_question(model, load, machine=machine))

        try:
            users = _users(ask(1), calls_per_month)
            answered = ask(users)
        except GraftError:
            continue
        if users <= MOST_USERS and answered.fits:
            return _make(offer, price, answered, users=users, calls=calls_per_month, today=today)
    return None


def _by_price() -> list[tuple[Offer, float]]:
    """Machines with one card, the cheapest first. Free sessions are no hosting: they end by themselves."""
    offers = [
        (offer, offer.usd_per_hour * HOURS_PER_MONTH)
        for offer in list_offers()
        if offer.gpus == 1 and offer.usd_per_hour
    ]
    return sorted(offers, key=lambda pair: (pair[1], pair[0].place))


def _users(alone: ServeAnswer, calls_per_month: float) -> int:
    """Requests at the same time at the busiest time, by Little's law."""
    return max(1, math.ceil(PEAK * calls_per_month / SECONDS_PER_MONTH * alone.answer_seconds.value))


def _lengths(dataset: Dataset, max_new_tokens: int) -> tuple[int, int]:
    """Tokens that are read and written for a long row of the dataset."""
    summaries = list(dataset.splits.values())
    lengths = sorted(length for summary in summaries for length in summary.spread_lengths())
    rows = max(sum(summary.rows for summary in summaries), 1)
    trained = sum(summary.trained_tokens for summary in summaries) / rows
    longest = lengths[math.ceil(USUAL_CONTEXT * len(lengths)) - 1] if lengths else 2048
    answer = max(1, min(round(trained), max_new_tokens))
    return max(longest - answer, 1), answer


def _make(
    offer: Offer, price: float, answered: ServeAnswer, *, users: int, calls: float, today: date
) -> Hosting:
    stale = is_stale(offer.dated, today=today)
    old = "; the price is old, look it up" if stale else ""
    return Hosting(
        machine=answered.question.machine.name,
        place=offer.place,
        usd_per_month=Figure.exact(price, "USD"),
        users=users,
        answer_seconds=answered.answer_seconds,
        weights=answered.weights,
        source=offer.source,
        dated=offer.dated,
        stale=stale,
        sentence=(
            f"Hosting by `graft plan serve`: {answered.question.machine.name} at {offer.place} for "
            f"${offer.usd_per_hour:g} an hour all month; {calls:,.0f} calls a month with peaks of "
            f"{PEAK:g} times the mean are {users} at a time, an answer takes "
            f"{say_seconds(answered.answer_seconds.value)} ({offer.source}, {offer.dated}{old})."
        ),
    )
