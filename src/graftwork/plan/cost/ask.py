"""The comparison as it is asked for: a question of fit in, a Comparison out. Reads the catalog, asks the fit.

In: what is trained how (the machine that the question names does not matter), the terms. Out: the table. Does
not know where the words came from, a command line or a project.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.prices import list_offers, list_places
from graftwork.plan.cost.brief import Brief, fit_in_brief
from graftwork.plan.cost.candidates import OwnCards, list_candidates
from graftwork.plan.cost.compare import compare
from graftwork.plan.cost.disk import DiskNeed, need_disk
from graftwork.plan.cost.nouns import CardRun, Comparison, Terms
from graftwork.plan.cost.runs import Fit, Measured, Reckoner, describe_run
from graftwork.records.errors import UserMistake
from graftwork.records.fit import FitQuestion
from graftwork.records.hardware import Gpu, Machine, Offer

DEFAULT_CARDS = {"full": 8}
"""More cards than the smallest machine has pay for adapters only where time is short: then ask for them."""


def asker(question: FitQuestion) -> Fit:
    """The fit of this training on any machine."""

    def ask(machine: Machine) -> Brief:
        return fit_in_brief(question.model_copy(update={"machine": machine}))

    return ask


def finder(overlay: Path | None) -> Callable[[str], Gpu]:
    """Cards by name; the catalog is read once for each name."""

    @cache
    def find(name: str) -> Gpu:
        return find_gpu(name, overlay=overlay)

    return find


def compare_places(
    question: FitQuestion,
    *,
    terms: Terms,
    overlay: Path | None = None,
    gpu: str | None = None,
    cards: int | None = None,
    places: Sequence[str] = (),
    own: Sequence[tuple[str, int]] = (),
    measured: Measured | None = None,
    with_sensitivity: bool = True,
) -> Comparison:
    """The question on every offer of the catalog, or of one card or some places, and on own cards."""
    find = finder(overlay)
    known = list_places(overlay=overlay)
    _require_places(places, [place.name for place in known])
    wanted = find(gpu).name if gpu else None
    offers = [
        offer
        for offer in list_offers(overlay=overlay)
        if (not places or offer.place in places) and (wanted is None or find(offer.gpu).name == wanted)
    ]
    offers = of_size(offers, cards=cards if cards is not None else DEFAULT_CARDS.get(question.method, 1))
    mine = [OwnCards(find(name), count) for name, count in own]
    if not offers and not mine:
        raise UserMistake(
            f"no place of the catalog offers {gpu}",
            why="there is nothing to compare",
            fix="see `graft plan catalog prices`, leave --gpu out, or add your own prices.csv with --catalog",
            where="--gpu",
        )
    reckon = Reckoner(
        asker(question), find=find, measured=measured, all_ram_matters=question.method == "full"
    )
    candidates = list_candidates(offers, known, reckon=reckon, own=mine, today=terms.today.isoformat())
    return compare(
        candidates,
        terms=terms,
        disk=disk_of(candidates[0].run),
        rows=question.rows * question.epochs,
        run={**describe_run(question), "measured": measured._asdict() if measured else None},
        with_sensitivity=with_sensitivity,
    )


def of_size(offers: Sequence[Offer], *, cards: int) -> list[Offer]:
    """Machines of up to so many cards, and the smallest that a place has of a card."""
    smallest: dict[tuple[str, str], int] = {}
    for offer in offers:
        key = (offer.place, offer.gpu)
        smallest[key] = min(offer.gpus, smallest.get(key, offer.gpus))
    return [offer for offer in offers if offer.gpus <= max(cards, smallest[offer.place, offer.gpu])]


def disk_of(run: CardRun) -> DiskNeed:
    return need_disk(
        total_parameters=run.total_parameters,
        trainable=run.trainable_parameters,
        full=run.full,
        tokens=run.tokens,
    )


def _require_places(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UserMistake(
                f"the catalog has no place {name!r}",
                why="its prices and rules are needed",
                fix=f"one of: {', '.join(known)}",
                where="--place",
            )
