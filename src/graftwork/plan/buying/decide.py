"""Keep, buy or rent: the answer in one sentence with its main assumption.

In: the choices. Out: the best of them, and words. The cheapest possible choice wins, waiting counted at what
the user says an hour is worth; what would make another one right is said with it.
"""

from collections.abc import Sequence

from graftwork.plan.buying.choices import Use, score, with_thresholds
from graftwork.plan.buying.nouns import PurchaseChoice
from graftwork.plan.cost.rank import count, dollars, duration


def decide(
    choices: Sequence[PurchaseChoice], *, use: Use
) -> tuple[tuple[PurchaseChoice, ...], PurchaseChoice | None, str]:
    """The choices in order, the best, the sentence."""
    ranked = sorted(choices, key=lambda one: (not one.possible, score(one, use)))
    best = ranked[0] if ranked and ranked[0].possible else None
    if best is None:
        return tuple(ranked), None, _nothing(ranked)
    told = tuple(with_thresholds(one, ranked) for one in ranked)
    return told, best, _sentence(best, told, use)


def _sentence(best: PurchaseChoice, choices: Sequence[PurchaseChoice], use: Use) -> str:
    verb = "Rent" if best.machine is None else "Buy" if best.price_usd.value else "Keep"
    name = best.label.removeprefix("rent ").removeprefix("keep ").removeprefix("buy ")
    head = (
        f"{verb} {name}: a run costs {dollars(best.cost_usd_a_run.value)} "
        f"and takes {duration(best.hours_a_run.value)}"
    )
    assumed = f"{count(use.runs_a_week, 'run')} a week for {count(use.years, 'year')}"
    return f"{head}; {_against(best, choices)}, if it stays at {assumed}."


def _against(best: PurchaseChoice, choices: Sequence[PurchaseChoice]) -> str:
    """What the other side of the decision would take."""
    others = [one for one in choices if one.possible and one.label != best.label]
    if not others:
        return "nothing else can do the run"
    told = []
    quicker = [(one.pays_above_usd_per_hour.value, one) for one in others if one.pays_above_usd_per_hour]
    if quicker:
        worth, nearest = min(quicker, key=lambda pair: pair[0])
        told.append(
            f"to {_costs(nearest)} is right where an hour of waiting is worth more than {dollars(worth)}"
        )
    told += _unrented(best, others)
    if told:
        return "; ".join(told)
    return f"to {_costs(others[0])}, which is next, is no quicker for it"


def _unrented(best: PurchaseChoice, others: Sequence[PurchaseChoice]) -> list[str]:
    """The card to buy where nothing may be rented, unless buying it is right anyway."""
    if best.machine is None or any(one.pays_above_usd_per_hour for one in others if one.price_usd.value):
        return []
    bought = [
        (one.pays_unrented_above_usd_per_hour.value, one)
        for one in others
        if one.price_usd.value and one.pays_unrented_above_usd_per_hour
    ]
    if not bought:
        return []
    worth, nearest = min(bought, key=lambda pair: pair[0])
    return [
        f"to {_costs(nearest)} only where nothing may be rented and an hour of it is worth "
        f"more than {dollars(worth)}"
    ]


def _costs(choice: PurchaseChoice) -> str:
    return (
        f"{choice.label} ({dollars(choice.cost_usd_a_run.value)} a run, {duration(choice.hours_a_run.value)})"
    )


def _nothing(choices: Sequence[PurchaseChoice]) -> str:
    told = "; ".join(f"{one.label}: {one.why_not}" for one in choices)
    return f"Nothing here can do the run ({told})."
