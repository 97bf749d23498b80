"""The purchase as tables: the choices, what each machine can, payback against each place, the sentence."""

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.plan.cost.assess import count, dollars, duration
from graftwork.plan.purchase.decide import ENDLESS
from graftwork.plan.purchase.types import Payback, Purchase, PurchaseChoice, Reach

MOST_PLACES = 8


def show_purchase(console: Console, found: Purchase) -> None:
    run = found.run
    print_line(
        console,
        f"[bold]{quote(run['model'])}[/], {quote(run['method'])}, {run['rows']} rows of "
        f"{run['tokens_a_row']} tokens, {count(run['epochs'], 'epoch')}; "
        f"{count(found.runs_a_week, 'run')} a week for {count(found.years, 'year')}",
    )
    _show_choices(console, found)
    _show_reach(console, found)
    _show_paybacks(console, found)
    print_line(console, f"\n[bold]{quote(found.answer)}[/]")
    print_line(console, "\n[bold]Assumed[/]")
    for words in (*found.assumptions, *found.notes):
        print_line(console, f"  · {quote(words)}")


def _show_choices(console: Console, found: Purchase) -> None:
    made = table(
        "choice", "to pay", "a run takes", "speed", "a week", "power", "a run costs", "in all", "note",
        right=("to pay", "a run takes", "speed", "a week", "power", "a run costs", "in all"),
    )  # fmt: skip
    for choice in found.choices:
        able = choice.machine is None or choice.machine.fits
        made.add_row(
            quote(choice.label),
            f"${choice.price_usd.value:,.0f}",
            duration(choice.hours_a_run.value) if able else "–",
            f"{choice.speed_up.value:.2f} ×" if choice.speed_up else "–",
            f"{choice.hours_a_week.value:.1f} h" if able else "–",
            dollars(choice.power_usd_a_run.value) if able else "–",
            dollars(choice.cost_usd_a_run.value) if able else "–",
            dollars(choice.total_usd.value) if able else "–",
            quote(_note(choice, found)),
        )
    console.print(made)


def _note(choice: PurchaseChoice, found: Purchase) -> str:
    if not choice.possible:
        return choice.why_not
    if choice.label == found.best:
        return "best"
    words = []
    if choice.pays_above_usd_per_hour is not None:
        words.append(f"right above {dollars(choice.pays_above_usd_per_hour.value)} an hour of waiting")
    elif choice.pays_unrented_above_usd_per_hour is not None:
        worth = dollars(choice.pays_unrented_above_usd_per_hour.value)
        words.append(f"if nothing may be rented, right above {worth} an hour of waiting")
    if choice.throughput is not None:
        words.append(f"{choice.runs_at_once} runs at once: {choice.throughput.value:.1f} × the runs")
    return "; ".join(words)


def _show_reach(console: Console, found: Purchase) -> None:
    made = table("machine", "qlora", "lora", "full", "cards meet", "becomes possible")
    for choice in found.choices:
        if choice.machine is None:
            continue
        reaches = {reach.method: reach for reach in choice.machine.reaches}
        made.add_row(
            quote(choice.machine.label),
            *(_reach(reaches.get(method)) for method in ("qlora", "lora", "full")),
            quote(choice.machine.link),
            quote("; ".join(choice.becomes_possible)),
        )
    print_line(console, "[bold]Longest rows that fit, and how long this run takes[/]")
    console.print(made)


def _reach(reach: Reach | None) -> str:
    if reach is None:
        return "–"
    if reach.longest is None:
        return f"[dim]no: {quote(reach.why_not)}[/]"
    took = f", {duration(reach.hours.value)}" if reach.hours else ""
    return f"{reach.longest:,}{took}"


def _show_paybacks(console: Console, found: Purchase) -> None:
    bought = [choice for choice in found.choices if choice.paybacks]
    if not bought:
        return
    made = table("months until paid back, against", "a run there", *(quote(one.label) for one in bought))
    for index, payback in enumerate(bought[0].paybacks[:MOST_PLACES]):
        made.add_row(
            quote(payback.against),
            dollars(payback.cost_usd.value),
            *(_months(choice.paybacks[index]) for choice in bought),
        )
    console.print(made)


def _months(payback: Payback) -> str:
    if payback.months is None:
        return "[dim]never[/]"
    high = "never" if payback.months.high >= ENDLESS else f"{payback.months.high:.0f}"
    words = f"{payback.months.value:.0f} ({payback.months.low:.0f}–{high})"
    return words if payback.in_time else f"[dim]{words}[/]"
