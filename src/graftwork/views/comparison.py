"""Comparisons of places, purchases and the catalog they are made of."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftwork.plan.cost import PlaceComparison, PlaceRow, billed_how
from graftwork.plan.cost_comparison import best_of_each_place, dollars, duration
from graftwork.plan.purchase import ENDLESS, Payback, Purchase, PurchaseChoice, Reach
from graftwork.records.plan import Method
from graftwork.text.wording import plural
from graftwork.views.document import Document, quote

MOST_PLACES = 8


def view_purchase(found: Purchase) -> Document:
    viewed = Document("Purchase")
    rhythm = f"{plural(found.runs_per_week, 'run')} a week for {plural(found.years, 'year')}"
    viewed.line(f"{_describe(found.run)}; {rhythm}")
    columns = ("choice", "to pay", "a run takes", "speed", "a week", "power", "a run costs", "in all", "note")
    viewed.table(columns, [_choice(choice, found) for choice in found.choices], right=columns[1:-1])
    viewed.line("[bold]Longest rows that fit, and how long this run takes[/]")
    viewed.table(
        ("machine", "qlora", "lora", "full", "GPUs meet", "becomes possible"),
        [
            (
                quote(machine.label),
                *(_reach({reach.method: reach for reach in machine.reaches}.get(m)) for m in METHODS),
                quote(machine.link),
                quote("; ".join(choice.becomes_possible)),
            )
            for choice in found.choices
            if (machine := choice.machine) is not None
        ],
    )
    bought = [choice for choice in found.choices if choice.paybacks]
    if bought:
        viewed.table(
            ("months until paid back, against", "a run there", *(quote(choice.label) for choice in bought)),
            [
                (
                    quote(payback.against),
                    dollars(payback.cost_usd.value),
                    *(_months(choice.paybacks[index]) for choice in bought),
                )
                for index, payback in enumerate(bought[0].paybacks[:MOST_PLACES])
            ],
        )
    viewed.line(f"\n[bold]{quote(found.answer)}[/]")
    viewed.items(map(quote, (*found.assumptions, *found.notes)), title="Assumed")
    return viewed


METHODS: tuple[Method, ...] = ("qlora", "lora", "full")


def _choice(choice: PurchaseChoice, found: Purchase) -> tuple[str, ...]:
    if not choice.possible:
        note = choice.why_not
    elif choice.label == found.best:
        note = "best"
    else:
        notes = []
        if choice.pays_above_usd_per_hour is not None:
            notes.append(f"right above {dollars(choice.pays_above_usd_per_hour.value)} an hour of waiting")
        elif choice.pays_unrented_above_usd_per_hour is not None:
            worth = dollars(choice.pays_unrented_above_usd_per_hour.value)
            notes.append(f"if nothing may be rented, right above {worth} an hour of waiting")
        if choice.throughput is not None:
            notes.append(f"{choice.runs_at_once} runs at once: {choice.throughput.value:.1f} × the runs")
        note = "; ".join(notes)
    able = choice.machine is None or choice.machine.fits
    return (
        quote(choice.label),
        f"${choice.price_usd.value:,.0f}",
        duration(choice.hours_per_run.value) if able else "–",
        f"{choice.speed_up.value:.2f} ×" if choice.speed_up else "–",
        f"{choice.hours_per_week.value:.1f} h" if able else "–",
        dollars(choice.power_usd_per_run.value) if able else "–",
        dollars(choice.cost_usd_per_run.value) if able else "–",
        dollars(choice.total_usd.value) if able else "–",
        quote(note),
    )


def _reach(reach: Reach | None) -> str:
    if reach is None:
        return "–"
    if reach.longest is None:
        return f"[dim]no: {quote(reach.why_not)}[/]"
    took = f", {duration(reach.hours.value)}" if reach.hours else ""
    return f"{reach.longest:,}{took}"


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


def view_comparison(found: PlaceComparison, *, everything: bool = False) -> Document:
    viewed = Document("Places for this run")
    lines = found.rows if everything else best_of_each_place(found.rows)
    shown = lines if everything else _without_most_failures(lines)
    viewed.line(_describe(found.run))
    has_budget, has_value = found.terms.budget_usd is not None, found.terms.value_usd is not None
    columns = ("place", "GPU", "hours", "$/h", "a run", "done in")
    more = (*(("runs",) if has_budget else ()), *(("return",) if has_value else ()), "verdict")
    rows = [_place(row, has_budget=has_budget, has_value=has_value) for row in shown]
    viewed.table((*columns, *more), rows, right=RIGHT)
    # How old the prices are: one line instead of a column.
    dated = sorted({row.price_dated for row in shown})
    dates = f"prices of {dated[0]}" if len(dated) == 1 else f"prices of {dated[0]} to {dated[-1]}"
    old = "; * is old: look it up" if any(row.stale for row in shown) else ""
    viewed.line(f"[dim]{dates}{old}; ranges in --json[/]")
    hidden = len(found.rows) - len(shown)
    if hidden > 0:
        viewed.line(f"[dim]{hidden} more offers with --all, everything with --json[/]")
    viewed.line(f"\n[bold]{quote(found.verdict)}[/] {quote(found.reason)}")
    best = next((row for row in found.rows if row.eligible), None)
    if best is not None:
        viewed.line(*_describe_best(best))
    total = found.disk.total_gib
    parts = ", ".join(
        f"{n} {part.value:.1f}" for n, part in found.disk.parts_gib.items() if part.value >= 0.05
    )
    viewed.line(f"  disk      {total.value:.0f} GiB ({total.low:.0f}–{total.high:.0f}): {parts}")
    viewed.items((quote(change.words) for change in found.sensitivity), title="What changes the winner")
    viewed.items(map(quote, (*found.assumptions, *found.notes[:1])), title="Assumed")
    wanted = {row.title for row in (found.rows if everything else shown[:NOTED])}
    viewed.line(*(f"  [dim]· {quote(text)}[/]" for text in found.notes[1:] if text.split(":")[0] in wanted))
    return viewed


def _without_most_failures(lines: Sequence[PlaceRow]) -> tuple[PlaceRow, ...]:
    """Offers that qualify, up to the number shown, then some that do not, with the reason."""
    good = [row for row in lines if row.eligible][:SHOWN]
    mine = [row for row in lines if row.kind == "own" and row not in good]
    bad = [row for row in lines if not row.eligible and row not in mine]
    return (*good, *mine, *bad[: max(SHOWN - len(good), 4)])


def _describe(run: dict[str, Any]) -> str:
    return (
        f"[bold]{quote(run['model'])}[/], {quote(run['method'])}, {run['rows']} rows of "
        f"{run['tokens_per_row']} tokens, {plural(run['epochs'], 'epoch')}"
    )


def _place(row: PlaceRow, *, has_budget: bool, has_value: bool) -> list[str]:
    cells = [
        quote(row.title + billed_how(row.title, row.billing)),
        quote(f"{row.gpus} × {row.gpu}" if row.gpus > 1 else row.gpu),
        f"{row.training_hours.value:.1f}" if row.fits else "–",
        f"{row.usd_per_hour.value:.2f}{'[yellow]*[/]' if row.stale else ''}",
        dollars(row.cost_usd.value) if row.fits else "–",
        duration(row.hours_to_result.value) if row.fits else "–",
    ]
    if has_budget:
        unlimited = "any" if row.billing == "free" and row.fits else "–"
        cells.append(unlimited if row.runs_in_budget is None else f"{row.runs_in_budget.value:,.0f}")
    if has_value:
        cells.append(f"{row.return_usd.value:,.0f}" if row.return_usd and row.fits else "–")
    mark = "[green]" if row.verdict == "best" else "[dim]" if not row.eligible else ""
    # The first rule that this run meets: a single session that is long enough is not a limit.
    limits = [limit for limit in row.limits if not limit.startswith("1 session ")]
    verdict = quote("; ".join((row.verdict, *(limits[:1] if row.fits and row.recommended else ()))))
    return [*cells, f"{mark}{verdict}[/]" if mark else verdict]


def _describe_best(best: PlaceRow) -> list[str]:
    hours, cost, rhythm = best.training_hours, best.cost_usd, best.intervals
    parts = ", ".join(
        f"{name} {dollars(part.value)}" for name, part in best.cost_parts_usd.items() if part.value >= 0.005
    )
    lines = [
        f"  range     {hours.low:.1f} to {hours.high:.1f} hours, {dollars(cost.low)} to {dollars(cost.high)}",
        f"  cost      {parts or 'nothing'}",
        f"  save      every {rhythm.checkpoint_minutes.value:.0f} min "
        f"({rhythm.checkpoint_steps.value:.0f} steps), {rhythm.checkpoints} in all",
        f"  evaluate  every {rhythm.evaluation_minutes.value:.0f} min "
        f"({rhythm.evaluation_steps.value:.0f} steps), {rhythm.evaluations} in all",
    ]
    if best.billing == "spot":
        lines.append(
            f"  taken away {best.interruptions.value:.2f} times ({best.interruptions.low:.2f}–"
            f"{best.interruptions.high:.2f}), {60 * best.lost_hours.value:.0f} minutes lost "
            f"({100 * best.lost_hours.value / hours.value:.1f} % of the training); "
            f"the rate is {best.rate_source}"
        )
    return [*lines, f"  price     {quote(best.price_source)}, {best.price_dated}"]


Row = Mapping[str, Any]


def _number(column: str) -> Callable[[Row], str]:
    return lambda row: "" if row[column] is None else f"{row[column]:g}"


def _text(column: str) -> Callable[[Row], str]:
    return lambda row: quote(row[column])


def _dated(row: Row) -> str:
    return f"[yellow]{quote(row['dated'])} ![/]" if row.get("stale") else quote(row["dated"])


_PRICES: dict[str, Callable[[Row], str]] = {
    "place": _text("place"),
    "GPU": lambda row: quote(row["gpu"] if row["gpus"] == 1 else f"{row['gpus']} × {row['gpu']}"),
    "$ an hour": _number("usd_per_hour"),
    "spot": _number("spot_usd_per_hour"),
    "$ a month": _number("usd_per_month"),
    "hours per month": _number("hours_per_month"),
    "source": _text("source"),
}
_GRADES = {"JSON": "json_replies", "tools": "tools", "code": "code", "text": "text"}


def _grade(key: str) -> Callable[[Row], str]:
    return lambda row: str(row["grades"][key])


CATALOG: dict[str, dict[str, Callable[[Row], str]]] = {
    "models": {
        "model": _text("name"),
        "on the Hub": _text("hf_id"),
        "family": _text("architecture"),
        "parameters": lambda row: f"{row['parameters']['value'] / 1e9:.3f} B",
    },
    "bases": {
        "base": _text("name"),
        "license": _text("license"),
        **{task: _grade(key) for task, key in _GRADES.items()},
        "languages": lambda row: " ".join(row["languages"]),
        "good for": _text("good_for"),
        "not for": _text("not_for"),
        "source": _text("source"),
    },
    "gpus": {
        "GPU": _text("name"),
        "GiB": _number("memory_gib"),
        "TFLOPS": _number("half_tflops"),
        "FP8": _number("eight_tflops"),
        "GB/s": _number("bandwidth_gb_s"),
        "W": _number("watts"),
        "source": _text("source"),
    },
    "cpus": {
        "CPU": _text("name"),
        "cores": _number("cores"),
        "GFLOPS": _number("gflops"),
        "in bfloat16": _number("half_gflops"),
        "GB/s": _number("bandwidth_gb_s"),
        "W": _number("watts"),
        "source": _text("source"),
    },
    "prices": _PRICES,
    "quoted": _PRICES,
    "places": {
        "place": _text("title"),
        "session h": _number("session_hours"),
        "set-up min": _number("setup_minutes"),
        "$/GiB month": _number("storage_usd_gib_month"),
        "$/GiB out": _number("egress_usd_gib"),
        "driven": _text("driven_by"),
        "source": _text("source"),
    },
    "api_prices": {
        "model": _text("model"),
        "provider": _text("provider"),
        "$ per M input": _number("usd_per_million_input"),
        "cached": _number("usd_per_million_cached"),
        "output": _number("usd_per_million_output"),
        "source": _text("source"),
    },
}
"""The columns of each kind of facts, before its date; columns that are not text are numbers."""
TEXTS = {
    "model", "on the Hub", "family", "GPU", "CPU", "place", "driven", "provider", "source",
    "base", "license", *_GRADES, "languages", "good for", "not for",
}  # fmt: skip


def view_catalog(listed: Mapping[str, Sequence[Row]]) -> Document:
    """One table per kind, then a note about old rows."""
    viewed = Document("Catalog")
    titles = {"quoted": "prices quoted by teams (not used in estimates)"}
    for kind, rows in listed.items():
        cells = {**CATALOG[kind], "dated": _dated}
        viewed.table(
            tuple(cells),
            [[write(row) for write in cells.values()] for row in rows],
            right=set(cells) - TEXTS - {"dated"},
            title=titles.get(kind, kind),
        )
        if kind == "places":
            notes = (f"[bold]{quote(row['title'])}[/]: {quote(row['notes'])}" for row in rows)
            viewed.line(*notes, wrap=False)
    old = sum(row.get("stale", False) for rows in listed.values() for row in rows)
    if old:
        viewed.line(
            f"[yellow]{old} rows are old (marked !): look the prices up and put them into your own "
            "prices.csv, named with `--catalog` or GRAFT_CATALOG[/]",
            wrap=False,
        )
    return viewed
