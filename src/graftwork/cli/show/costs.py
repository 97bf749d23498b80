"""Purchases, comparisons of places and the catalog as tables."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from graftwork.plan.cost.bill import PlaceComparison, PlaceRow, billed_how
from graftwork.plan.cost.compare import best_of_each_place, dollars, duration
from graftwork.plan.purchase import ENDLESS, Payback, Purchase, PurchaseChoice, Reach
from graftwork.text.wording import plural
from graftwork.views.document import quote
from graftwork.views.terminal import PlainTable, fit_words, print_line, table

MOST_PLACES = 8


def show_purchase(console: Console, found: Purchase) -> None:
    rhythm = f"{plural(found.runs_a_week, 'run')} a week for {plural(found.years, 'year')}"
    print_line(console, f"{_describe(found.run)}; {rhythm}")
    _show_choices(console, found)
    _show_reach(console, found)
    _show_paybacks(console, found)
    print_line(console, f"\n[bold]{quote(found.answer)}[/]")
    print_line(console, "\n[bold]Assumed[/]")
    for text in (*found.assumptions, *found.notes):
        print_line(console, f"  · {quote(text)}")


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
    console.print(fit_words(console, made))


def _note(choice: PurchaseChoice, found: Purchase) -> str:
    if not choice.possible:
        return choice.why_not
    if choice.label == found.best:
        return "best"
    notes = []
    if choice.pays_above_usd_per_hour is not None:
        notes.append(f"right above {dollars(choice.pays_above_usd_per_hour.value)} an hour of waiting")
    elif choice.pays_unrented_above_usd_per_hour is not None:
        worth = dollars(choice.pays_unrented_above_usd_per_hour.value)
        notes.append(f"if nothing may be rented, right above {worth} an hour of waiting")
    if choice.throughput is not None:
        notes.append(f"{choice.runs_at_once} runs at once: {choice.throughput.value:.1f} × the runs")
    return "; ".join(notes)


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
    console.print(fit_words(console, made))


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
    made = table(
        "months until paid back, against", "a run there", *(quote(choice.label) for choice in bought)
    )
    for index, payback in enumerate(bought[0].paybacks[:MOST_PLACES]):
        made.add_row(
            quote(payback.against),
            dollars(payback.cost_usd.value),
            *(_months(choice.paybacks[index]) for choice in bought),
        )
    console.print(fit_words(console, made))


def _months(payback: Payback) -> str:
    if payback.months is None:
        return "[dim]never[/]"
    high = "never" if payback.months.high >= ENDLESS else f"{payback.months.high:.0f}"
    text = f"{payback.months.value:.0f} ({payback.months.low:.0f}–{high})"
    return text if payback.in_time else f"[dim]{text}[/]"


SHOWN = 14
NOTED = 3
"""Places whose rules are shown: the best ones."""
RIGHT = ("hours", "$/h", "a run", "done in", "runs", "return")


def show_comparison(console: Console, found: PlaceComparison, *, everything: bool = False) -> None:
    lines = found.rows if everything else best_of_each_place(found.rows)
    shown = lines if everything else _with_a_few_that_fail(lines)
    print_line(console, _describe(found.run))
    console.print(fit_words(console, _rows(found, shown)))
    print_line(console, f"[dim]{_dates(shown)}; ranges in --json[/]")
    hidden = len(found.rows) - len(shown)
    if hidden > 0:
        print_line(console, f"[dim]{hidden} more offers with --all, everything with --json[/]")
    print_line(console, f"\n[bold]{quote(found.verdict)}[/] {quote(found.reason)}", soft_wrap=False)
    best = next((row for row in found.rows if row.eligible), None)
    if best is not None:
        _show_best(console, best)
    _show_disk(console, found)
    if found.sensitivity:
        print_line(console, "\n[bold]What changes the winner[/]")
        for change in found.sensitivity:
            print_line(console, f"  · {quote(change.words)}")
    print_line(console, "\n[bold]Assumed[/]")
    for text in (*found.assumptions, *found.notes[:1]):
        print_line(console, f"  · {quote(text)}")
    wanted = {row.title for row in (found.rows if everything else shown[:NOTED])}
    for text in found.notes[1:]:
        if text.split(":")[0] in wanted:
            print_line(console, f"  [dim]· {quote(text)}[/]")


def _with_a_few_that_fail(lines: Sequence[PlaceRow]) -> tuple[PlaceRow, ...]:
    """Offers that qualify, up to the number shown, then some that do not, with the reason."""
    good = [row for row in lines if row.eligible][:SHOWN]
    mine = [row for row in lines if row.kind == "own" and row not in good]
    bad = [row for row in lines if not row.eligible and row not in mine]
    return (*good, *mine, *bad[: max(SHOWN - len(good), 4)])


def _describe(run: dict[str, Any]) -> str:
    return (
        f"[bold]{quote(run['model'])}[/], {quote(run['method'])}, {run['rows']} rows of "
        f"{run['tokens_a_row']} tokens, {plural(run['epochs'], 'epoch')}"
    )


def _rows(found: PlaceComparison, shown: Sequence[PlaceRow]) -> PlainTable:
    budget, value = found.terms.budget_usd, found.terms.value_usd
    columns = ["place", "card", "hours", "$/h", "a run", "done in"]
    columns += ["runs"] if budget is not None else []
    columns += ["return"] if value is not None else []
    made = table(*columns, "verdict", right=RIGHT)
    for row in shown:
        cells = [
            quote(row.title + billed_how(row.title, row.billing)),
            quote(f"{row.gpus} × {row.gpu}" if row.gpus > 1 else row.gpu),
            f"{row.training_hours.value:.1f}" if row.fits else "–",
            f"{row.usd_per_hour.value:.2f}{'[yellow]*[/]' if row.stale else ''}",
            dollars(row.cost_usd.value) if row.fits else "–",
            duration(row.hours_to_result.value) if row.fits else "–",
        ]
        if budget is not None:
            cells.append(_runs(row))
        if value is not None:
            cells.append(f"{row.return_usd.value:,.0f}" if row.return_usd and row.fits else "–")
        mark = "[green]" if row.verdict == "best" else "[dim]" if not row.eligible else ""
        verdict = quote("; ".join((row.verdict, *_limits(row)[:1])))
        made.add_row(*cells, f"{mark}{verdict}[/]" if mark else verdict)
    return made


def _runs(row: PlaceRow) -> str:
    if row.runs_in_budget is None:
        return "any" if row.billing == "free" and row.fits else "–"
    return f"{row.runs_in_budget.value:,.0f}"


def _limits(row: PlaceRow) -> tuple[str, ...]:
    """The rules that this run meets: one session that is long enough is no limit."""
    if not row.fits or not row.recommended:
        return ()
    return tuple(limit for limit in row.limits if not limit.startswith("1 session "))


def _dates(shown: Sequence[PlaceRow]) -> str:
    """How old the prices are: one line instead of a column."""
    dated = sorted({row.price_dated for row in shown})
    text = f"prices of {dated[0]}" if len(dated) == 1 else f"prices of {dated[0]} to {dated[-1]}"
    return f"{text}{'; * is old: look it up' if any(row.stale for row in shown) else ''}"


def _spread(best: PlaceRow) -> str:
    hours, cost = best.training_hours, best.cost_usd
    return f"{hours.low:.1f} to {hours.high:.1f} hours, {dollars(cost.low)} to {dollars(cost.high)}"


def _show_best(console: Console, best: PlaceRow) -> None:
    parts = ", ".join(
        f"{name} {dollars(part.value)}" for name, part in best.cost_parts_usd.items() if part.value >= 0.005
    )
    print_line(console, f"  range     {_spread(best)}")
    print_line(console, f"  cost      {parts or 'nothing'}")
    rhythm = best.intervals
    print_line(
        console,
        f"  save      every {rhythm.checkpoint_minutes.value:.0f} min "
        f"({rhythm.checkpoint_steps.value:.0f} steps), {rhythm.checkpoints} in all",
    )
    print_line(
        console,
        f"  evaluate  every {rhythm.evaluation_minutes.value:.0f} min "
        f"({rhythm.evaluation_steps.value:.0f} steps), {rhythm.evaluations} in all",
    )
    if best.billing == "spot":
        print_line(
            console,
            f"  taken away {best.interruptions.value:.2f} times ({best.interruptions.low:.2f}–"
            f"{best.interruptions.high:.2f}), {60 * best.lost_hours.value:.0f} minutes lost "
            f"({100 * best.lost_hours.value / best.training_hours.value:.1f} % of the training); "
            f"the rate is {best.rate_source}",
        )
    print_line(console, f"  price     {quote(best.price_source)}, {best.price_dated}")


def _show_disk(console: Console, found: PlaceComparison) -> None:
    disk = found.disk
    parts = ", ".join(
        f"{name} {part.value:.1f}" for name, part in disk.parts_gib.items() if part.value >= 0.05
    )
    total = disk.total_gib
    print_line(console, f"  disk      {total.value:.0f} GiB ({total.low:.0f}–{total.high:.0f}): {parts}")


Rows = list[dict[str, Any]]


def show_catalog(console: Console, listed: dict[str, Rows]) -> None:
    """One table per kind, then a note about old rows."""
    makers = {
        "models": _models,
        "gpus": _gpus,
        "cpus": _cpus,
        "prices": _prices,
        "quoted": _prices,
        "places": _places,
        "api_prices": _token_prices,
    }
    for kind, rows in listed.items():
        console.print(makers[kind](kind, rows))
        for row in rows if kind == "places" else ():
            print_line(console, f"[bold]{quote(row['title'])}[/]: {quote(row['notes'])}", soft_wrap=True)
    old = sum(row.get("stale", False) for rows in listed.values() for row in rows)
    if old:
        print_line(
            console,
            f"[yellow]{old} rows are old (marked !): look the prices up and put them into your own "
            "prices.csv, named with `--catalog` or GRAFT_CATALOG[/]",
            soft_wrap=True,
        )


def _token_prices(kind: str, rows: Rows) -> PlainTable:
    numbers = ("$ per M input", "cached", "output")
    made = table("model", "provider", *numbers, "source", "dated", title=kind, right=numbers)
    for row in rows:
        columns = ("usd_per_million_input", "usd_per_million_cached", "usd_per_million_output")
        made.add_row(
            quote(row["model"]),
            quote(row["provider"]),
            *(_number(row[column]) for column in columns),
            quote(row["source"]),
            f"{quote(row['dated'])}{' !' if row['stale'] else ''}",
        )
    return made


def _models(kind: str, rows: Rows) -> PlainTable:
    made = table("model", "on the Hub", "family", "parameters", "dated", title=kind, right=("parameters",))
    for row in rows:
        count = f"{row['parameters']['value'] / 1e9:.3f} B"
        made.add_row(
            quote(row["name"]), quote(row["hf_id"]), quote(row["architecture"]), count, quote(row["dated"])
        )
    return made


def _gpus(kind: str, rows: Rows) -> PlainTable:
    numbers = ("GiB", "TFLOPS", "FP8", "GB/s", "W")
    made = table("card", *numbers, "source", "dated", title=kind, right=numbers)
    for row in rows:
        columns = ("memory_gib", "half_tflops", "eight_tflops", "bandwidth_gb_s", "watts")
        made.add_row(
            quote(row["name"]),
            *(_number(row[column]) for column in columns),
            quote(row["source"]),
            quote(row["dated"]),
        )
    return made


def _cpus(kind: str, rows: Rows) -> PlainTable:
    numbers = ("cores", "GFLOPS", "in bfloat16", "GB/s", "W")
    made = table("processor", *numbers, "source", "dated", title=kind, right=numbers)
    for row in rows:
        columns = ("cores", "gflops", "half_gflops", "bandwidth_gb_s", "watts")
        made.add_row(
            quote(row["name"]),
            *(_number(row[column]) for column in columns),
            quote(row["source"]),
            quote(row["dated"]),
        )
    return made


def _prices(kind: str, rows: Rows) -> PlainTable:
    title = "prices" if kind == "prices" else "prices quoted by teams (not used in estimates)"
    numbers = ("$ an hour", "spot", "$ a month", "hours a month")
    made = table("place", "card", *numbers, "source", "dated", title=title, right=numbers)
    for row in rows:
        columns = ("usd_per_hour", "spot_usd_per_hour", "usd_per_month", "hours_a_month")
        card = row["gpu"] if row["gpus"] == 1 else f"{row['gpus']} × {row['gpu']}"
        made.add_row(
            quote(row["place"]),
            quote(card),
            *(_number(row[column]) for column in columns),
            quote(row["source"]),
            _dated(row),
        )
    return made


def _places(kind: str, rows: Rows) -> PlainTable:
    numbers = ("session h", "set-up min", "$/GiB month", "$/GiB out")
    made = table("place", *numbers, "driven", "source", "dated", title=kind, right=numbers)
    for row in rows:
        columns = ("session_hours", "setup_minutes", "storage_usd_gib_month", "egress_usd_gib")
        made.add_row(
            quote(row["title"]),
            *(_number(row[column]) for column in columns),
            quote(row["driven_by"]),
            quote(row["source"]),
            _dated(row),
        )
    return made


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _dated(row: dict[str, Any]) -> str:
    return f"[yellow]{quote(row['dated'])} ![/]" if row["stale"] else quote(row["dated"])
