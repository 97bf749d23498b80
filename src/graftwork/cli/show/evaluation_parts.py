"""The parts of the cases that matter most, as one table: the rest is on the page and in the JSON."""

from rich.console import Console

from graftwork.cli.show.evaluation_metrics import show_p
from graftwork.cli.show.tables import PlainTable, percent, print_line, quote, table
from graftwork.grading.metrics import LOWER_IS_BETTER, name_of, plural
from graftwork.records.report import Report, SliceFigure

MOST_ROWS = 8
MOST_MISTAKES = 3
FEWEST_CASES = 5
"""A part of fewer cases shows a large difference by chance."""
ROOM_FOR_INTERVALS = 100
"""Columns from which on each figure stands with its interval."""


def show_parts(console: Console, report: Report) -> None:
    """Where base and adapter differ most, and how many more figures there are."""
    if not report.slices:
        return
    telling = choose_parts(report)
    if telling:
        console.print(_table(report, telling, intervals=console.width >= ROOM_FOR_INTERVALS))
    print_line(console, f"[dim]{_say_rest(report, telling)}[/]")


def show_confusions(console: Console, report: Report) -> None:
    """For each field with few values: what became of each class, and what it was taken for most often."""
    for found in report.confusions:
        if found.subject != report.candidate.subject:
            continue
        rows = table(f"{name_of(found.metric)} due", "cases", "found", "right when said", "taken for")
        taken: dict[str, list[str]] = {}
        for count, label, column in found.mistakes():
            taken.setdefault(label, []).append(f"{quote(column)} {count}")
        for shown in found.classes:
            said = "–" if shown.precision is None else percent(shown.precision)
            most = ", ".join(taken.get(shown.label, [])[:MOST_MISTAKES])
            rows.add_row(quote(shown.label), str(shown.cases), percent(shown.recall), said, most)
        console.print(rows)


def choose_parts(report: Report) -> list[SliceFigure]:
    """The largest differences among the parts that have enough cases: what got worse first."""
    differ = [one for one in report.slices if one.n >= FEWEST_CASES and abs(one.after - one.before) > 1e-9]

    def weight(one: SliceFigure) -> tuple[bool, float, int]:
        gain = (one.before - one.after) if one.metric in LOWER_IS_BETTER else (one.after - one.before)
        return gain > 0, -round(abs(gain), 9), -one.n

    return sorted(differ, key=weight)[:MOST_ROWS]


def _say_rest(report: Report, shown: list[SliceFigure]) -> str:
    rest = len(report.slices) - len(shown)
    where = "are on the page and in --json" if rest != 1 else "is on the page and in --json"
    if not shown:
        counted = plural(len(report.slices), "figure")
        if all(one.n < FEWEST_CASES for one in report.slices):
            return f"no part has {FEWEST_CASES} cases or more; the {counted} of all parts {where}"
        return f"no part of {FEWEST_CASES} cases and more differs; the {counted} of all parts {where}"
    most = (
        "the largest differences, losses first, between parts"
        if len(shown) > 1
        else "the one difference between parts"
    )
    if not rest:
        return f"{most} of {FEWEST_CASES} cases and more"
    return f"{most} of {FEWEST_CASES} cases and more; {plural(rest, 'more figure')} of parts {where}"


def _table(report: Report, figures: list[SliceFigure], *, intervals: bool) -> PlainTable:
    # What every line must show stays whole; only the names of the parts are folded.
    rows = table("part of the cases", right=("cases",))
    for name in ("cases", report.baseline.subject, report.candidate.subject, "won/lost", "p, corrected"):
        rows.add_column(quote(name), justify="right" if name == "cases" else "left", overflow="fold")
    for column in rows.columns[1:]:
        column.min_width = min(len(str(column.header)), 12)
    for one in figures:
        cut = "role" if one.by == "group" else one.by
        rows.add_row(
            f"{quote(name_of(one.metric))}, [dim]{cut}[/] {quote(one.part)}",
            str(one.n),
            _figure(one.before, one.before_low, one.before_high, intervals=intervals),
            _figure(one.after, one.after_low, one.after_high, intervals=intervals),
            f"{one.wins}/{one.losses}",
            show_p(one.adjusted_p) if one.adjusted_p is not None else "",
        )
    return rows


def _figure(value: float, low: float, high: float, *, intervals: bool) -> str:
    return f"{percent(value)} [dim]({100 * low:.0f}–{100 * high:.0f})[/]" if intervals else percent(value)
