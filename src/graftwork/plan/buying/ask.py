"""The purchase as it is asked about: names and prices in, a Purchase out. Reads the catalog, asks the fit.

In: the cards that are there, the cards that might be bought, what is trained how and how often. Out: the
choices with an answer. Clouds stand in it with the best offer of each.
"""

from collections.abc import Sequence
from pathlib import Path

from graftwork.plan.buying.choices import Price, Use, own_choice, rent_choice
from graftwork.plan.buying.decide import decide
from graftwork.plan.buying.nouns import Purchase, PurchaseChoice, Rental
from graftwork.plan.buying.reach import Ask, reach_of
from graftwork.plan.buying.wish import PurchaseOption
from graftwork.plan.catalog.hardware import USUAL_RAM_GIB
from graftwork.plan.cost.ask import compare_places, finder
from graftwork.plan.cost.brief import Brief, fit_in_brief
from graftwork.plan.cost.nouns import PlaceComparison, Terms
from graftwork.plan.cost.rank import best_of_each_place, count
from graftwork.plan.cost.runs import describe_run
from graftwork.records.errors import UserMistake
from graftwork.records.fit import FitQuestion, Method
from graftwork.records.hardware import Gpu, Machine

LAUNCH = "launch price; street prices of 2026 ran well above it"


def weigh_purchase(
    question: FitQuestion,
    *,
    have: PurchaseOption,
    options: Sequence[PurchaseOption],
    use: Use,
    terms: Terms,
    ram_gib: float | None = None,
    overlay: Path | None = None,
    places: Sequence[str] = (),
) -> Purchase:
    """Keep what is there, buy one of the options, or rent: over the years, for this run."""
    find = finder(overlay)
    ask = _ask(question)
    ram = USUAL_RAM_GIB if ram_gib is None else ram_gib
    there = Machine(gpu=find(have.name), gpus=have.cards, ram_gib=ram)
    now = reach_of(there, ask)
    table = compare_places(question, terms=terms, overlay=overlay, places=places, with_sensitivity=False)
    rentals = list_rentals(table)
    choices = [
        own_choice(
            now, label=f"keep {now.label}", price=Price(0.0, "paid for"), use=use, have=now, rentals=rentals
        )
    ]
    for wish in options:
        gpu = find(wish.name)
        machine = Machine(gpu=gpu, gpus=wish.cards, ram_gib=ram)
        reach = reach_of(machine, ask)
        price = price_of(wish, gpu, have=there)
        choices.append(
            own_choice(reach, label=f"buy {reach.label}", price=price, use=use, have=now, rentals=rentals)
        )
    if rentals:
        cheapest = min(
            rentals, key=lambda one: one.cost_usd.value + use.waiting_usd_per_hour * one.hours_to_result.value
        )
        choices.append(rent_choice(cheapest, use=use, have=now))
    ranked, best, answer = decide(choices, use=use)
    return Purchase(
        run=describe_run(question),
        runs_a_week=use.runs_a_week,
        years=use.years,
        electricity_usd_kwh=use.electricity_usd_kwh,
        residual_share=use.residual_share,
        waiting_usd_per_hour=use.waiting_usd_per_hour,
        choices=ranked,
        best=best.label if best else None,
        answer=answer,
        assumptions=(*_assumptions(use, terms), f"each machine has {ram:g} GiB of host memory (--ram)"),
        notes=_notes(ranked),
    )


def price_of(wish: PurchaseOption, gpu: Gpu, *, have: Machine) -> Price:
    """What the user states, or the launch price of the cards that are not there yet."""
    if wish.usd is not None:
        return Price(wish.usd, "as stated")
    if gpu.launch_usd is None:
        raise UserMistake(
            f"{gpu.name} has no price",
            why="it was not sold by itself at launch, or the catalog does not know for how much",
            fix=f'state it: --option "{gpu.name}=1800"',
            where="--option",
        )
    there = have.gpus if have.gpu is not None and have.gpu.name == gpu.name else 0
    return Price(gpu.launch_usd * max(wish.cards - there, 0), LAUNCH)


def list_rentals(table: PlaceComparison) -> tuple[Rental, ...]:
    """The best paid offer of each place that does the run: what is free is no yardstick for a price."""
    found: dict[str, Rental] = {}
    for row in best_of_each_place(table.rows):
        if not row.eligible or row.billing in {"free", "electricity"}:
            continue
        rental = Rental(
            label=row.label,
            place=row.place,
            cost_usd=row.cost_usd,
            hours_to_result=row.hours_to_result,
            dated=row.price_dated,
            stale=row.stale,
        )
        if row.place not in found or rental.cost_usd.value < found[row.place].cost_usd.value:
            found[row.place] = rental
    return tuple(sorted(found.values(), key=lambda one: one.cost_usd.value))


def _ask(question: FitQuestion) -> Ask:
    known: dict[tuple[str, str | None, int | None], Brief] = {}

    def asked(machine: Machine, method: Method | None, seq: int | None) -> Brief:
        key = (machine.name, method, seq)
        if key not in known:
            changed: dict[str, object] = {"machine": machine, "method": method or question.method}
            if seq is not None:
                # Only whether it fits is asked: a row a card tells, and more rows need not be tried.
                changed |= {"lengths": (seq,), "batch_rows": max(machine.gpus, 1)}
            known[key] = fit_in_brief(question.model_copy(update=changed))
        return known[key]

    return Ask(fit=asked, max_positions=question.shape.max_positions)


def _assumptions(use: Use, terms: Terms) -> tuple[str, ...]:
    return (
        f"{count(use.runs_a_week, 'run')} a week for {count(use.years, 'year')}, "
        f"{use.runs:,.0f} in all, all like this one",
        f"a card is sold for {100 * use.residual_share:.0f} % of its price in the end",
        f"electricity costs {use.electricity_usd_kwh:g} USD a kWh; the machine around the cards takes "
        f"{use.host_watts:g} W while it trains, and is not counted while it does not",
        f"rents stay as they were on the day of their lists, and subscriptions are shared among "
        f"{terms.runs_a_month:.0f} runs a month",
    )


def _notes(choices: Sequence[PurchaseChoice]) -> tuple[str, ...]:
    found = [
        f'{one.label}: {one.price_usd.value:,.0f} USD is the {LAUNCH}; state yours as --option "…=PRICE"'
        for one in choices
        if one.price_source == LAUNCH and one.price_usd.value
    ]
    return tuple(found)
