"""Evaluation reports and verdicts as tables that stay readable on a narrow terminal."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.text import Text

from graftwork.evaluate.statistics.intervals import fewest_for_quantile
from graftwork.grading.metrics import (
    DOLLARS,
    FIRST_TOKEN,
    LATENCY,
    LATENCY_P95,
    LOWER_IS_BETTER,
    TOKENS_PER_TASK,
    name_of,
    show_dollars,
)
from graftwork.records.interaction import Savings
from graftwork.records.report import Comparison, Metric, Report, SliceFigure, SubjectReport, Verdict
from graftwork.text.wording import plural
from graftwork.views.document import quote, safe
from graftwork.views.terminal import PlainTable, fit_words, percent, print_line, table, whole_width

if TYPE_CHECKING:
    from graftwork.pipeline.steps.report import WrittenReport

NAME_ROOM = 24
"""Longer names of metrics may be wrapped."""
MEDIANS = (LATENCY, FIRST_TOKEN)
REQUESTS = (*MEDIANS, LATENCY_P95)
Pairs = dict[tuple[str, str], Comparison]


def metrics_table(console: Console, report: Report) -> PlainTable:
    """One column per subject if all figures fit next to each other, otherwise one line per subject."""
    wide = _wide_table(report)
    names = max((len(name_of(name)) for name in figured(report)), default=0)
    if whole_width(console, wide) - max(0, names - NAME_ROOM) <= console.width:
        for column in wide.columns[1:]:
            column.no_wrap = True
        return wide
    return fit_words(console, _tall_table(report))


def subjects_of(report: Report) -> list[SubjectReport]:
    """Baseline, champion, candidate, then the others: each once."""
    champion = [other for other in report.others if other.subject == report.champion]
    ordered = (report.baseline, *champion, report.candidate, *report.others)
    return list({subject.subject: subject for subject in ordered}.values())


def figured(report: Report) -> list[str]:
    """The metrics that at least one subject has a figure for."""
    return [name for name, known in _metrics(report).items() if known]


def figures_missing(report: Report) -> str | None:
    """Names the metrics without any figure; the table omits them."""
    missing = [name for name, known in _metrics(report).items() if not known]
    if not missing:
        return None
    return f"no figure, because no case could be graded: {', '.join(map(_say_why(report), missing))}"


def _say_why(report: Report) -> Callable[[str], str]:
    """The name of a metric without a figure, with the reason where it is known."""

    def say(name: str) -> str:
        metric = report.candidate.metrics.get(name)
        return quote(f"{name_of(name)} ({metric.vacuous})" if metric and metric.vacuous else name_of(name))

    return say


def medians_unbounded(report: Report) -> str | None:
    """A note for medians of so few requests that they have no interval."""
    few = {
        name: _fewest(metric)
        for subject in subjects_of(report)
        for name, metric in subject.metrics.items()
        if name in MEDIANS and metric.n and not _is_bounded(metric)
    }
    if not few:
        return None
    names = " and ".join(quote(name_of(name)) for name in few)
    return f"{names}: the median of fewer than {max(few.values())} requests has no interval"


def show_p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-3 else "< 0.001"


def _metrics(report: Report) -> dict[str, bool]:
    """Every metric in order, and whether any subject has a figure for it."""
    subjects = (report.candidate, *subjects_of(report))
    names = dict.fromkeys(name for subject in subjects for name in subject.metrics)
    return {
        name: any(subject.metrics[name].n for subject in subjects if name in subject.metrics)
        for name in names
    }


def _pairs(report: Report) -> Pairs:
    """The candidate against each other subject that has cases in common with it."""
    return {
        (pair.metric, pair.baseline): pair
        for pair in report.comparisons
        if pair.candidate == report.candidate.subject and pair.n
    }


def _is_corrected(pairs: Pairs) -> bool:
    return any(pair.adjusted_p is not None for pair in pairs.values())


def _wide_table(report: Report) -> PlainTable:
    subjects, pairs = subjects_of(report), _pairs(report)
    against = [item.subject for item in subjects if any(key[1] == item.subject for key in pairs)]
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
        cells = [_metric_figure(subject.metrics.get(name), gap=gap) for subject in subjects]
        for other in against:
            with_corrected = corrected and other == report.baseline.subject
            cells += _pair_cells(pairs.get((name, other)), corrected=with_corrected)
        rows.add_row(quote(name_of(name)), *cells)
    return rows


def _tall_table(report: Report) -> PlainTable:
    """One line per subject; a single line if all subjects are equal."""
    subjects, pairs = subjects_of(report), _pairs(report)
    corrected = _is_corrected(pairs)
    heads = ("won/lost", "p", *(["p, corrected"] if corrected else []))
    rows = table("", "", "", *heads)
    # One space between columns leaves room for the figures.
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
    shown = [item for item in subjects if item.metrics.get(name) is not None and item.metrics[name].n]
    figures = {item.subject: _metric_figure(item.metrics[name], gap=" ") for item in shown}
    own = [pair for (metric, _), pair in pairs.items() if metric == name]
    who = "all" if len(shown) == len(subjects) else ", ".join(quote(subject) for subject in figures)
    room = max(len(item.subject) for item in subjects)
    if (
        len(shown) > 1
        # Names that need more room than any single one would wrap the other columns.
        and len(who) <= room
        and len(set(figures.values())) == 1
        and not any(pair.wins or pair.losses for pair in own)
    ):
        return [(who, next(iter(figures.values())), *([""] * (3 if corrected else 2)))]
    return [
        (quote(subject), figure, *_pair_cells(pairs.get((name, subject)), corrected=corrected))
        for subject, figure in figures.items()
    ]


def _pair_cells(pair: Comparison | None, *, corrected: bool) -> list[str]:
    if pair is None:
        return ["", "", *([""] if corrected else [])]
    adjusted = [show_p(pair.adjusted_p) if pair.adjusted_p is not None else ""] if corrected else []
    return [f"{pair.wins}/{pair.losses}", show_p(pair.p_value), *adjusted]


def _metric_figure(metric: Metric | None, *, gap: str) -> str:
    """The figure with its interval."""
    if metric is None or not metric.n:
        return ""
    if metric.kind in ("rate", "score"):
        return f"{percent(metric.value)}{gap}[dim]({100 * metric.low:.0f}–{100 * metric.high:.0f})[/]"
    if metric.unit == DOLLARS:
        low, high = show_dollars(metric.low), show_dollars(metric.high)
        return f"{show_dollars(metric.value)}{gap}[dim]({low}–{high})[/]"
    if metric.name == TOKENS_PER_TASK:
        return f"{metric.value:,.0f}{gap}[dim]({metric.low:,.0f}–{metric.high:,.0f})[/]"
    figure = f"{metric.value:.1f} {quote(metric.unit)}".rstrip()
    if metric.low == metric.high or not _is_bounded(metric):
        return figure
    return f"{figure}{gap}[dim]({metric.low:.1f}–{metric.high:.1f})[/]"


def _is_bounded(metric: Metric) -> bool:
    return metric.name not in REQUESTS or metric.n >= _fewest(metric)


def _fewest(metric: Metric) -> int:
    quantile = 0.95 if metric.name == LATENCY_P95 else 0.5
    return fewest_for_quantile(quantile, confidence=metric.confidence)


MOST_ROWS = 8
MOST_MISTAKES = 3
FEWEST_CASES = 5
"""Slices with fewer cases differ by chance."""
ROOM_FOR_INTERVALS = 100
"""Terminal width from which figures are shown with their intervals."""


def show_parts(console: Console, report: Report) -> None:
    """The slices where base and adapter differ most, and how many more there are."""
    if not report.slices:
        return
    chosen = choose_parts(report)
    if chosen:
        console.print(_table(report, chosen, intervals=console.width >= ROOM_FOR_INTERVALS))
    print_line(console, f"[dim]{_say_rest(report, chosen)}[/]")


def show_confusions(console: Console, report: Report) -> None:
    """For each field with few values: recall and precision of each class, and its most frequent mistakes."""
    for found in report.confusions:
        if found.subject != report.candidate.subject:
            continue
        rows = table(f"expected {name_of(found.metric)}", "cases", "recall", "precision", "mistaken for")
        taken: dict[str, list[str]] = {}
        for count, label, column in found.mistakes():
            taken.setdefault(label, []).append(f"{quote(column)} {count}")
        for shown in found.classes:
            precision = "–" if shown.precision is None else percent(shown.precision)
            most = ", ".join(taken.get(shown.label, [])[:MOST_MISTAKES])
            rows.add_row(quote(shown.label), str(shown.cases), percent(shown.recall), precision, most)
        console.print(rows)


def choose_parts(report: Report) -> list[SliceFigure]:
    """The largest differences among slices with enough cases, losses first."""
    differ = [
        part for part in report.slices if part.n >= FEWEST_CASES and abs(part.after - part.before) > 1e-9
    ]

    def weight(part: SliceFigure) -> tuple[bool, float, int]:
        gain = (part.before - part.after) if part.metric in LOWER_IS_BETTER else (part.after - part.before)
        return gain > 0, -round(abs(gain), 9), -part.n

    return sorted(differ, key=weight)[:MOST_ROWS]


def _say_rest(report: Report, shown: list[SliceFigure]) -> str:
    rest = len(report.slices) - len(shown)
    where = "are on the page and in --json" if rest != 1 else "is on the page and in --json"
    if not shown:
        counted = plural(len(report.slices), "figure")
        if all(part.n < FEWEST_CASES for part in report.slices):
            return f"no slice has {FEWEST_CASES} cases or more; {counted} of slices {where}"
        return f"no slice with {FEWEST_CASES} cases or more differs; {counted} of slices {where}"
    most = (
        "the largest differences, losses first, in slices"
        if len(shown) > 1
        else "the only difference in slices"
    )
    if not rest:
        return f"{most} with {FEWEST_CASES} cases or more"
    return f"{most} with {FEWEST_CASES} cases or more; {plural(rest, 'more figure')} of slices {where}"


def _table(report: Report, figures: list[SliceFigure], *, intervals: bool) -> PlainTable:
    # Only the names of the slices may be folded.
    rows = table("slice", right=("cases",))
    for name in ("cases", report.baseline.subject, report.candidate.subject, "won/lost", "p, corrected"):
        rows.add_column(quote(name), justify="right" if name == "cases" else "left", overflow="fold")
    for column in rows.columns[1:]:
        column.min_width = min(len(str(column.header)), 12)
    for figure in figures:
        cut = "role" if figure.by == "group" else figure.by
        rows.add_row(
            f"{quote(name_of(figure.metric))}, [dim]{cut}[/] {quote(figure.part)}",
            str(figure.n),
            _slice_figure(figure.before, figure.before_low, figure.before_high, intervals=intervals),
            _slice_figure(figure.after, figure.after_low, figure.after_high, intervals=intervals),
            f"{figure.wins}/{figure.losses}",
            show_p(figure.adjusted_p) if figure.adjusted_p is not None else "",
        )
    return rows


def _slice_figure(value: float, low: float, high: float, *, intervals: bool) -> str:
    return f"{percent(value)} [dim]({100 * low:.0f}–{100 * high:.0f})[/]" if intervals else percent(value)


DECISIONS = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "abort": "bold red",
    "not_enough_evidence": "bold yellow",
}
OUTCOMES = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "unknown": "[yellow]unknown[/]"}


def show_report(console: Console, report: Report, *, held_out: bool = False) -> None:
    """`held_out`: the cases are the test split of the project."""
    source = f" (imported from {quote(report.source)})" if report.source else ""
    counted = plural(report.cases, "held-out case" if held_out else "case")
    print_line(console, f"{counted}{source}{_say_example(report)}")
    console.print(metrics_table(console, report))
    for line in _notes_on_table(report):
        print_line(console, line)
    show_parts(console, report)
    show_confusions(console, report)
    for line in _closing_notes(report):
        print_line(console, line)


def _say_example(report: Report) -> str:
    """The subjects that were shown a worked example: those that were not trained for the task."""
    helped, more = [], []
    for item in subjects_of(report):
        settings = item.generation.settings
        if count := settings.get("worked_examples"):
            more.append(f"; {count} worked examples shown to {quote(item.subject)}")
        elif settings.get("worked_example"):
            helped.append(quote(item.subject))
    return "".join([f"; one worked example shown to {', '.join(helped)}" if helped else "", *more])


def _notes_on_table(report: Report) -> list[str]:
    """What the table omits, how fast each subject answered, and which graders failed."""
    lines = []
    if len(subjects_of(report)) > 2:
        name = quote(report.candidate.subject)
        lines.append(f"[dim]won/lost: cases on which {name} did better/worse than the other subject[/]")
    lines += [f"[dim]{note}[/]" for note in (figures_missing(report), medians_unbounded(report)) if note]
    for subject in subjects_of(report):
        made = subject.generation
        speed = f", {plural(round(made.tokens_per_second), 'token')}/s" if made.tokens_per_second else ""
        lines.append(f"[dim]{quote(subject.subject)}: {plural(made.answers, 'answer')}{speed}[/]")
        lines += [
            f"[yellow]{quote(name_of(name))} of {quote(subject.subject)}: the grader failed on "
            f"{plural(metric.failed, 'case')} without a result ({quote(metric.why_failed)})[/]"
            for name, metric in subject.metrics.items()
            if metric.failed
        ]
    return lines


def _closing_notes(report: Report) -> list[str]:
    """Remarks on the subjects, the results of the judge, the statistical power, and reuse of the cases."""
    lines = [quote(remark) for remark in report.remarks]
    lines += [
        f"{quote(tally.model)} preferred {quote(tally.candidate)} in {tally.wins} of "
        f"{plural(tally.pairs, 'pair')}, {quote(tally.baseline)} in {tally.losses}; "
        f"both orders agreed in {percent(tally.agreement)} "
        f"({100 * tally.agreement_low:.0f}–{100 * tally.agreement_high:.0f})"
        for tally in report.judged
    ]
    if report.power is not None:
        lines.append(quote(report.power.sentence))
    if report.wear is not None and report.wear.worn:
        lines.append(f"[yellow]{quote(report.wear.sentence)}[/]")
    elif report.wear is not None and report.looks > 1:
        lines.append(f"[dim]{quote(report.wear.sentence)}[/]")
    elif report.looks > 1:
        lines.append(f"[dim]these cases were evaluated {report.looks} times[/]")
    return lines


def show_evaluated(console: Console, evaluated: Any) -> None:
    # Only the evaluation of the pipeline names its adapter.
    show_report(console, evaluated.report, held_out=bool(evaluated.adapter_hash))
    if evaluated.page:
        print_line(console, f"all cases, side by side: {quote(evaluated.page)}", soft_wrap=True)


def show_savings(console: Console, savings: Savings) -> None:
    """The result as a sentence, then the figures behind it."""
    print_line(console, quote(savings.sentence))
    rows = table("a month", "", "at least", "at most", right=("", "at least", "at most"))
    calls = savings.calls_per_month
    rows.add_row("calls", *(f"{value:,.0f}" for value in (calls.value, calls.low, calls.high)))
    figures = []
    if savings.unpriced < 1 and savings.days:
        figures.append(("logged model", savings.logged_usd_per_month))
    if savings.hosting is not None:
        figures.append(("hosting", savings.hosting.usd_per_month))
    if savings.saved_usd_per_month is not None:
        figures.append(("saved", savings.saved_usd_per_month))
    for name, figure in figures:
        rows.add_row(name, *(show_dollars(value) for value in (figure.value, figure.low, figure.high)))
    console.print(rows)
    for note in savings.notes:
        print_line(console, f"[dim]{quote(note)}[/]")


def show_calibration(console: Console, judged: Any) -> None:
    """One line per mode of the judge, and whether it counts in the gate."""
    rows = table("mode", "labels", "sessions", "agreement", "kappa", "counts")
    for found in judged.modes:
        share, kappa = found.agreement, found.kappa
        rows.add_row(
            found.mode,
            str(found.labels),
            str(found.clusters),
            f"{percent(share.value)} [dim]({100 * share.low:.0f}–{100 * share.high:.0f})[/]",
            "–" if kappa is None else f"{kappa.value:.2f} [dim]({kappa.low:.2f}–{kappa.high:.2f})[/]",
            "[green]yes[/]" if found.sufficient else "[red]no[/]",
        )
    print_line(console, f"{quote(judged.model)} compared with people's labels")
    console.print(rows)
    for found in judged.modes:
        if found.why_not:
            print_line(console, f"{found.mode}: {quote(found.why_not)}")
        if found.mode == "pointwise" and found.labels:
            print_line(
                console,
                f"[dim]called good by both {found.both_good}, by the judge alone {found.judge_only}, "
                f"by people alone {found.people_only}, by neither {found.both_bad}[/]",
            )
        if found.unjudged:
            print_line(console, f"[yellow]{found.mode}: {found.unjudged} got no clear reply[/]")
        if found.position is not None and found.position.always_first + found.position.always_second:
            print_line(
                console,
                f"[dim]position: in {found.position.always_first} pairs it chose the first answer in both "
                f"orders, in {found.position.always_second} the second "
                f"({show_p(found.position.p_value)}); these count as disagreements[/]",
            )
        if found.length is not None and found.length.longer + found.length.shorter:
            bias = found.length
            print_line(
                console,
                f"[dim]length: it agrees on {bias.longer_agreed:g} of {bias.longer} pairs whose better "
                f"answer is the longer one, on {bias.shorter_agreed:g} of {bias.shorter} whose better "
                f"answer is the shorter one (kappa with length balanced {bias.kappa.value:.2f}, "
                f"{bias.kappa.low:.2f} to {bias.kappa.high:.2f})[/]",
            )
        if found.groups:
            shown = ", ".join(f"{quote(group)} {counts}" for group, counts in found.groups.items())
            print_line(console, f"[dim]agreement by role: {shown}[/]")


def show_imported(console: Console, imported: Any) -> None:
    show_report(console, imported.report)
    for note in (imported.why, *imported.notes):
        print_line(console, quote(note))
    print_line(console, f"all cases, side by side: {quote(imported.page)}", soft_wrap=True)


def show_verdict(console: Console, verdict: Verdict) -> None:
    style = DECISIONS[verdict.decision]
    print_line(console, f"[{style}]{verdict.decision.replace('_', ' ').upper()}[/]  {quote(verdict.reason)}")
    rows = table("rule", "", "why")
    for rule in verdict.rules:
        rows.add_row(quote(rule.rule), OUTCOMES[rule.outcome], quote(rule.sentence))
    console.print(rows)
    for place, advice in enumerate(verdict.advice, 1):
        print_line(console, f"{place}. {quote(advice)}")


def show_written(console: Console, written: "WrittenReport") -> None:
    print_line(console, f"written to {quote(written.path)}", soft_wrap=True)
