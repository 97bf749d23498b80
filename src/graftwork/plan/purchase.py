"""Keep, buy or rent: what each machine can do, what each choice costs over the years, and the best of them.

Input: the GPUs to choose from, the options, what is trained how and how often. Output: a Purchase with an
answer in one sentence. A purchase costs its price less its resale value, spread over all runs, plus power;
waiting counts at what the user says an hour is worth. Reads the catalog and asks the fit.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from graftwork.plan.catalog.hardware import USUAL_RAM_GIB
from graftwork.plan.cost import GpuRun, PlaceComparison, PlaceRow, Terms, describe_run, fit_in_brief
from graftwork.plan.cost_comparison import (
    OfferFilter,
    best_of_each_place,
    compare_places,
    dollars,
    duration,
    finder,
)
from graftwork.records.base import Figure, Record
from graftwork.records.errors import UserError
from graftwork.records.hardware import Gpu, Machine
from graftwork.records.plan import FitQuestion, Method
from graftwork.text.wording import plural


class Reach(Record):
    """What a machine can do with a method."""

    method: Method
    longest: int | None
    """Tokens of the longest row that fits, of the lengths tried; None: not even the shortest."""
    hours: Figure | None = None
    """Hours of the team's run with this method at its own length; None if that does not fit."""
    why_not: str = ""


class MachineReach(Record):
    """What one machine can do of the requested work."""

    label: str
    gpu: str
    gpus: int
    watts: float
    fits: bool
    why_not: str = ""
    hours: Figure
    """Hours of the team's own run."""
    strategy: str = ""
    link: str = ""
    alone_hours: Figure | None = None
    """Hours of the team's run on one of several GPUs, if it fits one."""
    reaches: tuple[Reach, ...] = ()


class Payback(Record):
    """When a purchase becomes cheaper than renting there."""

    against: str
    place: str
    cost_usd: Figure
    """Cost of a run there."""
    saved_usd_per_run: Figure
    months: Figure | None
    """None: never, a run there costs no more than the power here."""
    in_time: bool
    """Within the years in question."""


class PurchaseChoice(Record):
    """One way to continue: keep, buy this, or rent."""

    label: str
    machine: MachineReach | None
    price_usd: Figure
    price_source: str
    residual_usd: Figure
    possible: bool
    why_not: str = ""
    hours_per_run: Figure
    hours_per_week: Figure
    speed_up: Figure | None = None
    """Speed-up of one run over the present hardware; None if that cannot do the run at all."""
    runs_at_once: int = 1
    """If a run fits one GPU, each of several can run its own."""
    throughput: Figure | None = None
    """Throughput relative to the present hardware."""
    power_usd_per_run: Figure
    cost_usd_per_run: Figure
    """Over the years: the net price spread over the runs, and the power."""
    total_usd: Figure
    becomes_possible: tuple[str, ...] = ()
    paybacks: tuple[Payback, ...] = ()
    pays_above_usd_per_hour: Figure | None = None
    """Value of an hour of waiting from which this is the best choice; None if never."""
    pays_unrented_above_usd_per_hour: Figure | None = None
    """The same if nothing may be rented, for data that must stay here."""


class Purchase(Record):
    """The choices, and the answer in one sentence."""

    run: dict[str, object]
    runs_per_week: float
    years: float
    electricity_usd_kwh: float
    residual_share: float
    waiting_usd_per_hour: float
    choices: tuple[PurchaseChoice, ...]
    best: str | None
    answer: str
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_COUNTED = re.compile(r"^\s*(?P<count>\d+)\s*[xX×]\s*(?P<name>.*\D.*)$")


class PurchaseOption(NamedTuple):
    """A machine to buy, and its price."""

    name: str
    gpus: int
    usd: float | None


def read_purchase_option(text: str, *, option: str) -> PurchaseOption:
    """The machine with all its GPUs, and the price of what must be bought for it."""
    gpus, sign, price = text.partition("=")
    counted = _COUNTED.match(gpus)
    name = (counted["name"] if counted else gpus).strip()
    count = int(counted["count"]) if counted else 1
    if not name or count < 1:
        raise _mistake(text, option)
    if not sign:
        return PurchaseOption(name, count, None)
    try:
        usd = float(price.strip().lstrip("$").replace(",", ""))
    except ValueError:
        usd = -1.0
    if not 0 <= usd < float("inf"):
        raise _mistake(text, option)
    return PurchaseOption(name, count, usd)


def _mistake(text: str, option: str) -> UserError:
    return UserError(
        f"{option} {text!r} does not name a GPU",
        why="its memory, speed and price are needed",
        fix=f'write it as {option} "2x RTX 5060 Ti 16GB=700" (how many in all, which, dollars to pay)',
        where=option,
    )


METHODS: tuple[Method, ...] = ("qlora", "lora", "full")
LADDER = (512, 1024, 2048, 4096, 8192, 16384)


Ask = Callable[[Machine, Method | None, int | None], GpuRun]
"""The fit of the team's run on a machine, with another method or length if given."""


def reach_of(machine: Machine, ask: Ask, *, max_positions: int) -> MachineReach:
    run = ask(machine, None, None)
    single_gpu = ask(machine.model_copy(update={"gpus": 1}), None, None) if machine.gpus > 1 else None
    return MachineReach(
        label=machine.name,
        gpu=run.gpu,
        gpus=run.gpus,
        watts=run.watts,
        fits=run.fits,
        why_not=run.why_not,
        hours=run.hours,
        strategy=run.strategy,
        link=link_words(machine),
        alone_hours=single_gpu.hours if single_gpu is not None and single_gpu.fits else None,
        reaches=tuple(_reach(machine, method, ask, max_positions=max_positions) for method in METHODS),
    )


def link_words(machine: Machine) -> str:
    """How two of its GPUs communicate."""
    gpu = machine.gpu
    if gpu is None or machine.gpus < 2:
        return "one GPU"
    if machine.link_gb_s is not None:
        return f"{machine.link_gb_s:g} GB/s between GPUs, as stated"
    if gpu.nvlink_gb_s:
        return f"NVLink, {gpu.nvlink_gb_s:g} GB/s one way"
    return f"through the host: each GPU's connector gives {gpu.pcie_gb_s:g} GB/s one way at best"


def news(have: MachineReach, candidate: MachineReach) -> tuple[str, ...]:
    """What the other machine can do and the current one cannot."""
    news = []
    before = {reach.method: reach.longest for reach in have.reaches}
    for reach in candidate.reaches:
        longest = before.get(reach.method)
        if reach.longest is None:
            continue
        if longest is None:
            news.append(f"{reach.method} at all, up to {reach.longest:,} tokens")
        elif reach.longest > longest:
            news.append(f"{reach.method} up to {reach.longest:,} tokens instead of {longest:,}")
    return tuple(news)


def _reach(machine: Machine, method: Method, ask: Ask, *, max_positions: int) -> Reach:
    lengths = [length for length in LADDER if length <= max_positions] or [max_positions]
    # What fits fits at all lengths below.
    fitting = bisect_left(lengths, True, key=lambda length: not ask(machine, method, length).fits)
    at_own = ask(machine, method, None)
    return Reach(
        method=method,
        longest=lengths[fitting - 1] if fitting else None,
        hours=at_own.hours if at_own.fits else None,
        why_not="" if fitting else ask(machine, method, lengths[0]).why_not,
    )


WEEKS_PER_YEAR = 365.25 / 7
WEEKS_PER_MONTH = WEEKS_PER_YEAR / 12
MOST_HOURS_PER_WEEK = 0.9 * 168
"""A higher load leaves no time for failures."""
ENDLESS = 1200.0
"""Months that mean never: JSON has no infinity."""
RESIDUAL_SPREAD = (0.6, 1.3)
"""Range of the residual share, from second-hand prices over two years."""


class Use(NamedTuple):
    """Usage: how much, for how long, at which prices."""

    runs_per_week: float
    years: float
    electricity_usd_kwh: float
    residual_share: float
    host_watts: float
    waiting_usd_per_hour: float
    ram_gib: float = USUAL_RAM_GIB
    """Host memory of each machine."""

    @property
    def runs(self) -> float:
        return self.runs_per_week * self.years * WEEKS_PER_YEAR


class Price(NamedTuple):
    """A price, and its source."""

    usd: float
    source: str


def own_choice(
    machine: MachineReach,
    *,
    label: str,
    price: Price,
    use: Use,
    have: MachineReach,
    rentals: Sequence[PlaceRow],
) -> PurchaseChoice:
    """Keeping (price 0) or buying a machine."""
    power = machine.hours.times((machine.watts + use.host_watts) / 1000 * use.electricity_usd_kwh, "USD")
    down, up = RESIDUAL_SPREAD
    residual = Figure(
        value=price.usd * use.residual_share,
        low=price.usd * use.residual_share * down,
        high=min(price.usd * use.residual_share * up, price.usd),
        unit="USD",
    )
    # Several GPUs can each have a run of their own: the week is then shorter than its runs together.
    separate_hours = (
        machine.alone_hours.times(1 / machine.gpus, "h") if machine.alone_hours else machine.hours
    )
    week = min(machine.hours, separate_hours, key=lambda hours: hours.value).times(
        use.runs_per_week, "h per week"
    )
    in_week = week.value <= MOST_HOURS_PER_WEEK
    too_slow = f"{use.runs_per_week:g} runs take {week.value:.0f} of a week's 168 hours"
    a_run = Figure(
        value=(price.usd - residual.value) / use.runs + power.value,
        low=(price.usd - residual.high) / use.runs + power.low,
        high=(price.usd - residual.low) / use.runs + power.high,
        unit="USD",
    )
    speed_up = throughput = None
    if have.fits and machine.label == have.label:
        speed_up = Figure.exact(1.0, "×")
    elif have.fits and machine.fits:
        # Errors of the same estimate cancel: the ratio is surer than either.
        speed_up = Figure.about(have.hours.value / machine.hours.value, down=0.85, up=1.15, unit="×")
    if have.fits and machine.alone_hours:
        # What two runs on one host take from each other is not known: a tenth is allowed for.
        at_once = machine.gpus * have.hours.value / machine.alone_hours.value
        throughput = Figure.about(at_once, down=0.9, up=1.0, unit="×")
    return PurchaseChoice(
        label=label,
        machine=machine,
        price_usd=Figure.exact(price.usd, "USD"),
        price_source=price.source,
        residual_usd=residual,
        possible=machine.fits and in_week,
        why_not=machine.why_not if not machine.fits else "" if in_week else too_slow,
        hours_per_run=machine.hours,
        hours_per_week=week,
        speed_up=speed_up,
        runs_at_once=machine.gpus if throughput else 1,
        throughput=throughput,
        power_usd_per_run=power,
        cost_usd_per_run=a_run,
        total_usd=a_run.times(use.runs, "USD"),
        becomes_possible=news(have, machine) if machine.label != have.label else (),
        paybacks=tuple(_payback(rental, price=price, power=power, use=use) for rental in rentals)
        if price.usd and machine.fits
        else (),
    )


def rent_choice(rental: PlaceRow, *, use: Use, have: MachineReach) -> PurchaseChoice:
    """Renting the best offer for every run."""
    hours = rental.hours_to_result
    nothing = Figure.exact(0.0, "USD")
    speed_up = None
    if have.fits and hours.low > 0:
        value = have.hours.value / hours.value
        speed_up = Figure(
            value=value,
            low=min(value, have.hours.low / hours.high),
            high=max(value, have.hours.high / hours.low),
            unit="×",
        )
    return PurchaseChoice(
        label=f"rent {rental.label}",
        machine=None,
        price_usd=nothing,
        price_source=f"prices of {rental.price_dated}",
        residual_usd=nothing,
        possible=True,
        hours_per_run=hours,
        hours_per_week=hours.times(use.runs_per_week, "h per week"),
        speed_up=speed_up,
        power_usd_per_run=nothing,
        cost_usd_per_run=rental.cost_usd,
        total_usd=rental.cost_usd.times(use.runs, "USD"),
    )


def score(choice: PurchaseChoice, use: Use) -> float:
    """Dollars a run, waiting included: less is better."""
    return choice.cost_usd_per_run.value + use.waiting_usd_per_hour * choice.hours_per_run.value


def with_thresholds(choice: PurchaseChoice, choices: Sequence[PurchaseChoice]) -> PurchaseChoice:
    """The value of an hour of waiting at which a more expensive choice is the best: of all, and of own
    GPUs.
    """
    if not choice.possible:
        return choice
    rivals = [rival for rival in choices if rival.possible and rival.label != choice.label]
    thresholds = {"pays_above_usd_per_hour": _best_above(choice, rivals)}
    if choice.machine is not None:
        bought = [rival for rival in rivals if rival.machine is not None]
        thresholds["pays_unrented_above_usd_per_hour"] = _best_above(choice, bought)
    return choice.model_copy(update=thresholds)


def _best_above(choice: PurchaseChoice, rivals: Sequence[PurchaseChoice]) -> Figure | None:
    """The value of an hour from which it is the best; None if always, or never."""
    low, high = 0.0, float("inf")
    for rival in rivals:
        dearer = choice.cost_usd_per_run.value - rival.cost_usd_per_run.value
        quicker = rival.hours_per_run.value - choice.hours_per_run.value
        if quicker > 0:
            low = max(low, dearer / quicker)
        elif quicker < 0:
            high = min(high, dearer / quicker)
        elif dearer > 0:
            return None
    return Figure.exact(low, "USD/h") if 0 < low < high else None


def _payback(rental: PlaceRow, *, price: Price, power: Figure, use: Use) -> Payback:
    saved = rental.cost_usd.value - power.value
    low, high = rental.cost_usd.low - power.high, rental.cost_usd.high - power.low
    months = None
    if saved > 0:
        a_month = use.runs_per_week * WEEKS_PER_MONTH
        value = price.usd / (saved * a_month)
        months = Figure(
            value=value,
            low=price.usd / (high * a_month),
            # A range that reaches no saving at all has no end.
            high=max(min(price.usd / (low * a_month), ENDLESS) if low > 0 else ENDLESS, value),
            unit="months",
        )
    return Payback(
        against=rental.label,
        place=rental.place,
        cost_usd=rental.cost_usd,
        saved_usd_per_run=Figure(value=saved, low=low, high=high, unit="USD"),
        months=months,
        in_time=months is not None and months.value <= 12 * use.years,
    )


def decide(
    choices: Sequence[PurchaseChoice], *, use: Use
) -> tuple[tuple[PurchaseChoice, ...], PurchaseChoice | None, str]:
    """The choices in order, the best, the sentence."""
    ranked = sorted(choices, key=lambda choice: (not choice.possible, score(choice, use)))
    if not ranked or not ranked[0].possible:
        reasons = "; ".join(f"{choice.label}: {choice.why_not}" for choice in ranked)
        return tuple(ranked), None, f"Nothing here can do the run ({reasons})."
    compared = tuple(with_thresholds(choice, ranked) for choice in ranked)
    best = ranked[0]
    verb = "Rent" if best.machine is None else "Buy" if best.price_usd.value else "Keep"
    name = best.label.removeprefix("rent ").removeprefix("keep ").removeprefix("buy ")
    answer = (
        f"{verb} {name}: a run costs {dollars(best.cost_usd_per_run.value)} "
        f"and takes {duration(best.hours_per_run.value)}; {_against(best, compared)}, "
        f"if it stays at {plural(use.runs_per_week, 'run')} a week for {plural(use.years, 'year')}."
    )
    return compared, best, answer


def _against(best: PurchaseChoice, choices: Sequence[PurchaseChoice]) -> str:
    """What the other side of the decision would require."""
    rivals = [choice for choice in choices if choice.possible and choice.label != best.label]
    if not rivals:
        return "nothing else can do the run"
    reasons = []
    nearest = _nearest((rival.pays_above_usd_per_hour, rival) for rival in rivals)
    if nearest:
        reasons.append(f"to {nearest[0]} is right where an hour of waiting is worth more than {nearest[1]}")
    # The GPU to buy where nothing may be rented, unless buying it is right anyway.
    bought = [rival for rival in rivals if rival.price_usd.value]
    if best.machine is not None and not any(rival.pays_above_usd_per_hour for rival in bought):
        nearest = _nearest((rival.pays_unrented_above_usd_per_hour, rival) for rival in bought)
        if nearest:
            reasons.append(
                f"to {nearest[0]} only where nothing may be rented and an hour of it is worth "
                f"more than {nearest[1]}"
            )
    return "; ".join(reasons) or f"to {_costs(rivals[0])}, which is next, is no quicker for it"


def _nearest(thresholds: Iterable[tuple[Figure | None, PurchaseChoice]]) -> tuple[str, str] | None:
    """The choice that becomes right at the lowest value of an hour, and that value."""
    worths = [(worth.value, choice) for worth, choice in thresholds if worth]
    if not worths:
        return None
    worth, choice = min(worths, key=lambda pair: pair[0])
    return _costs(choice), dollars(worth)


def _costs(choice: PurchaseChoice) -> str:
    cost = dollars(choice.cost_usd_per_run.value)
    return f"{choice.label} ({cost} a run, {duration(choice.hours_per_run.value)})"


LAUNCH = "launch price; street prices of 2026 ran well above it"


def weigh_purchase(
    question: FitQuestion,
    *,
    have: PurchaseOption,
    options: Sequence[PurchaseOption],
    use: Use,
    terms: Terms,
    overlay: Path | None = None,
    providers: Sequence[str] = (),
) -> Purchase:
    """Compare keeping, buying and renting over the years, for this run."""
    find = finder(overlay)

    def ask(machine: Machine, method: Method | None, seq: int | None) -> GpuRun:
        changed: dict[str, object] = {"machine": machine, "method": method or question.method}
        if seq is not None:
            # Only whether it fits matters: one row a GPU is enough to know.
            changed |= {"lengths": (seq,), "batch_size": max(machine.gpus, 1)}
        return fit_in_brief(question.model_copy(update=changed))

    machines = [
        Machine(gpu=find(option.name), gpus=option.gpus, ram_gib=use.ram_gib) for option in (have, *options)
    ]
    priced = [("keep", Price(0.0, "paid for"))] + [
        ("buy", price_of(option, find(option.name), have=machines[0])) for option in options
    ]
    reaches = [reach_of(machine, ask, max_positions=question.shape.max_positions) for machine in machines]
    now = reaches[0]
    table = compare_places(
        question, OfferFilter(providers), terms=terms, overlay=overlay, with_sensitivity=False
    )
    rentals = list_rentals(table)
    choices = [
        own_choice(reach, label=f"{verb} {reach.label}", price=price, use=use, have=now, rentals=rentals)
        for reach, (verb, price) in zip(reaches, priced, strict=True)
    ]
    if rentals:
        waiting = use.waiting_usd_per_hour
        cheapest = min(rentals, key=lambda row: row.cost_usd.value + waiting * row.hours_to_result.value)
        choices.append(rent_choice(cheapest, use=use, have=now))
    ranked, best, answer = decide(choices, use=use)
    return Purchase(
        run=describe_run(question),
        runs_per_week=use.runs_per_week,
        years=use.years,
        electricity_usd_kwh=use.electricity_usd_kwh,
        residual_share=use.residual_share,
        waiting_usd_per_hour=use.waiting_usd_per_hour,
        choices=ranked,
        best=best.label if best else None,
        answer=answer,
        assumptions=(
            f"{plural(use.runs_per_week, 'run')} a week for {plural(use.years, 'year')}, "
            f"{use.runs:,.0f} in all, all like this one",
            f"a GPU is sold at the end for {100 * use.residual_share:.0f} % of its price",
            f"electricity costs {use.electricity_usd_kwh:g} USD a kWh; the machine around the GPUs takes "
            f"{use.host_watts:g} W while it trains, and is not counted while it does not",
            "rents stay as they were on the day of their lists, and subscriptions are shared "
            f"among {terms.runs_per_month:.0f} runs per month",
            f"each machine has {use.ram_gib:g} GiB of host memory (--ram)",
        ),
        notes=tuple(
            f"{choice.label}: {choice.price_usd.value:,.0f} USD is the {LAUNCH}; "
            'state yours as --option "…=PRICE"'
            for choice in ranked
            if choice.price_source == LAUNCH and choice.price_usd.value
        ),
    )


def price_of(option: PurchaseOption, gpu: Gpu, *, have: Machine) -> Price:
    """The user's price, or the launch price of the GPUs to be bought."""
    if option.usd is not None:
        return Price(option.usd, "as stated")
    if gpu.launch_usd is None:
        raise UserError(
            f"{gpu.name} has no price",
            why="it was not sold separately at launch, or the catalog lacks its price",
            fix=f'state it: --option "{gpu.name}=1800"',
            where="--option",
        )
    owned = have.gpus if have.gpu is not None and have.gpu.name == gpu.name else 0
    return Price(gpu.launch_usd * max(option.gpus - owned, 0), LAUNCH)


def list_rentals(table: PlaceComparison) -> tuple[PlaceRow, ...]:
    """The best paid offer of each place that can do the run: free offers are not a basis for a price."""
    cheapest: dict[str, PlaceRow] = {}
    for row in best_of_each_place(table.rows):
        if not row.eligible or row.billing in {"free", "electricity"}:
            continue
        if row.place not in cheapest or row.cost_usd.value < cheapest[row.place].cost_usd.value:
            cheapest[row.place] = row
    return tuple(sorted(cheapest.values(), key=lambda row: row.cost_usd.value))
