"""Every metric of every subject, as one table that stays readable on a narrow terminal.

In: a report, and how wide the console is. Out: a table: a column for each subject where that fits, else a
line for each. Does not know what is said before and after it.
"""

from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.text import Text

from graftwork.cli.show.tables import PlainTable, fit_words, percent, quote, safe, table, whole_width
from graftwork.evaluate.statistics.intervals import fewest_for_quantile
from graftwork.grading.metrics import FIRST_TOKEN, LATENCY, name_of
from graftwork.records.report import Comparison, Metric, Report, SubjectReport

NAME_ROOM = 24
"""The name of a metric may be wrapped between words from this width on."""
MEDIANS = (LATENCY, FIRST_TOKEN)
Pairs = dict[tuple[str, str], Comparison]


def metrics_table(console: Console, report: Report) -> PlainTable:
    """A column for each subject where all figures fit beside each other, else a line for each."""
    wide = _wide_table(report)
    names = max((len(name_of(name)) for name in figured(report)), default=0)
    if whole_width(console, wide) - max(0, names - NAME_ROOM) <= console.width:
        for column in wide.columns[1:]:
            column.no_wrap = True
        return wide
    return fit_words(console, _tall_table(report))


def subjects_of(report: Report) -> list[SubjectReport]:
    """Baseline, champion, candidate, then the others: each once."""
    champion = [one for one in report.others if one.subject == report.champion]
    ordered = (report.baseline, *champion, report.candidate, *report.others)
    return list({one.subject: one for one in ordered}.values())


def figured(report: Report) -> list[str]:
    """The metrics of which at least one subject has a figure."""
    return [name for name, known in _metrics(report).items() if known]


def figures_missing(report: Report) -> str | None:
    """Names the metrics without any figure, which are left out of the table."""
    missing = [name for name, known in _metrics(report).items() if not known]
    if not missing:
        return None
    return f"without a figure, for no case could be graded by it: {', '.join(map(_say_why(report), missing))}"


def _say_why(report: Report) -> Callable[[str], str]:
    """The name of a metric without a figure, with the reason where it is known."""

    def say(name: str) -> str:
        metric = report.candidate.metrics.get(name)
        return quote(f"{name_of(name)} ({metric.vacuous})" if metric and metric.vacuous else name_of(name))

    return say


def medians_unbounded(report: Report) -> str | None:
    """So few requests do not bound their median, and that is said instead of an interval."""
    few = {
        name: _fewest(metric)
        for subject in subjects_of(report)
        for name, metric in subject.metrics.items()
        if metric.n and not _is_bounded(metric)
    }
    if not few:
        return None
    names = " and ".join(quote(name_of(name)) for name in few)
    return f"{names}: the median of fewer than {max(few.values())} requests has no interval"


def show_p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-3 else "< 0.001"


def _metrics(report: Report) -> dict[str, bool]:
    """Every metric in order, and whether anybody has a figure of it."""
    subjects = (report.candidate, *subjects_of(report))
    names = dict.fromkeys(name for one in subjects for name in one.metrics)
    return {name: any(one.metrics[name].n for one in subjects if name in one.metrics) for name in names}


def _pairs(report: Report) -> Pairs:
    """The candidate against each other subject; a pair without a case in common shows nothing."""
    return {
        (one.metric, one.baseline): one
        for one in report.comparisons
        if one.candidate == report.candidate.subject and one.n
    }


def _is_corrected(pairs: Pairs) -> bool:
    return any(one.adjusted_p is not None for one in pairs.values())


def _wide_table(report: Report) -> PlainTable:
    subjects, pairs = subjects_of(report), _pairs(report)
    against = [one.subject for one in subjects if any(key[1] == one.subject for key in pairs)]
    corrected = _is_corrected(pairs)
    rows = PlainTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    rows.add_column("", overflow="fold")
    for subject in subjects:
        rows.add_column(Text(safe(subject.subject)), overflow="fold")
    for name in against:
        heading = "won/lost" if len(against) == 1 else f"won/lost\nto {safe(name)}"
        rows.add_column(Text(heading), overflow="fold")
        rows.add_column("p")
        if corrected and name == report.baseline.subject:
            rows.add_column("p, corrected")
    gap = " " if len(subjects) <= 2 else "\n"
    for name in figured(report):
        cells = [_figure(one.metrics.get(name), gap=gap) for one in subjects]
        for other in against:
            with_corrected = corrected and other == report.baseline.subject
            cells += _pair_cells(pairs.get((name, other)), corrected=with_corrected)
        rows.add_row(quote(name_of(name)), *cells)
    return rows


def _tall_table(report: Report) -> PlainTable:
    """A line for each subject; one line for all where they do not differ at all."""
    subjects, pairs = subjects_of(report), _pairs(report)
    corrected = _is_corrected(pairs)
    heads = ("won/lost", "p", *(["p, corrected"] if corrected else []))
    rows = table("", "", "", *heads)
    # One blank between columns: the figures need the room.
    rows.padding = (0, 1, 0, 0)
    for column in rows.columns[2:5]:
        column.no_wrap = True
    for name in figured(report):
        lines = _lines(name, subjects, pairs, corrected=corrected)
        for place, cells in enumerate(lines):
            rows.add_row(quote(name_of(name)) if not place else "", *cells)
    return rows


def _lines(
    name: str, subjects: Sequence[SubjectReport], pairs: Pairs, *, corrected: bool
) -> list[tuple[str, ...]]:
    shown = [one for one in subjects if one.metrics.get(name) is not None and one.metrics[name].n]
    figures = {one.subject: _figure(one.metrics[name], gap=" ") for one in shown}
    own = [pair for (metric, _), pair in pairs.items() if metric == name]
    if len(shown) > 1 and len(set(figures.values())) == 1 and not any(one.wins or one.losses for one in own):
        who = "all" if len(shown) == len(subjects) else ", ".join(quote(one) for one in figures)
        return [(who, next(iter(figures.values())), *([""] * (3 if corrected else 2)))]
    return [
        (quote(one), figure, *_pair_cells(pairs.get((name, one)), corrected=corrected))
        for one, figure in figures.items()
    ]


def _pair_cells(pair: Comparison | None, *, corrected: bool) -> list[str]:
    if pair is None:
        return ["", "", *([""] if corrected else [])]
    adjusted = [show_p(pair.adjusted_p) if pair.adjusted_p is not None else ""] if corrected else []
    return [f"{pair.wins}/{pair.losses}", show_p(pair.p_value), *adjusted]


def _figure(metric: Metric | None, *, gap: str) -> str:
    """The figure with its interval; the interval is what one may believe."""
    if metric is None or not metric.n:
        return ""
    if metric.kind in ("rate", "score"):
        return f"{percent(metric.value)}{gap}[dim]({100 * metric.low:.0f}–{100 * metric.high:.0f})[/]"
    figure = f"{metric.value:.1f} {quote(metric.unit)}".rstrip()
    if metric.low == metric.high or not _is_bounded(metric):
        return figure
    return f"{figure}{gap}[dim]({metric.low:.1f}–{metric.high:.1f})[/]"


def _is_bounded(metric: Metric) -> bool:
    return metric.name not in MEDIANS or metric.n >= _fewest(metric)


def _fewest(metric: Metric) -> int:
    return fewest_for_quantile(0.5, confidence=metric.confidence)
