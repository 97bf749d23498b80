"""Reports and verdicts as tables."""

from typing import Any

from rich import box
from rich.console import Console
from rich.text import Text

from graftwork.cli.show.evaluation_parts import show_parts
from graftwork.cli.show.tables import PlainTable, percent, print_line, quote, safe, table
from graftwork.evaluate.wording import name_of, plural
from graftwork.records.report import Comparison, Metric, Report, SubjectReport
from graftwork.records.verdict import Verdict

DECISIONS = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "abort": "bold red",
    "not_enough_evidence": "bold yellow",
}
OUTCOMES = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "unknown": "[yellow]unknown[/]"}


def show_report(console: Console, report: Report) -> None:
    example = ", shown one worked example" if report.settings.get("worked_example") else ""
    source = f" (imported from {quote(report.source)})" if report.source else ""
    counted = plural(report.cases, "case" if report.source else "held-out case")
    print_line(console, f"{counted}{source}; {quote(report.baseline.subject)}{example}")
    console.print(_metrics_table(report))
    for line in _told_beside(report):
        print_line(console, line)
    show_parts(console, report)
    for line in _told_at_the_end(report):
        print_line(console, line)


def _subjects(report: Report) -> list[SubjectReport]:
    """Baseline, champion, candidate, then the others: each once."""
    champion = [one for one in report.others if one.subject == report.champion]
    ordered = (report.baseline, *champion, report.candidate, *report.others)
    return list({one.subject: one for one in ordered}.values())


def _metrics_table(report: Report) -> PlainTable:
    subjects = _subjects(report)
    pairs = {
        (one.metric, one.baseline): one
        for one in report.comparisons
        if one.candidate == report.candidate.subject
    }
    against = [one.subject for one in subjects if any(key[1] == one.subject for key in pairs)]
    corrected = any(one.adjusted_p is not None for one in pairs.values())
    rows = PlainTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    rows.add_column("")
    for subject in subjects:
        rows.add_column(Text(safe(subject.subject)), overflow="fold")
    for name in against:
        heading = "won/lost" if len(against) == 1 else f"won/lost\nto {safe(name)}"
        rows.add_column(Text(heading), overflow="fold")
        rows.add_column("p")
        if corrected and name == report.baseline.subject:
            rows.add_column("p, corrected")
    beside = len(subjects) <= 2
    for name in dict.fromkeys(metric for one in (report.candidate, *subjects) for metric in one.metrics):
        cells = [_metric(one.metrics.get(name), beside=beside) for one in subjects]
        for other in against:
            pair = pairs.get((name, other))
            cells += _pair_cells(pair, corrected=corrected and other == report.baseline.subject)
        rows.add_row(quote(name_of(name)), *cells)
    return rows


def _pair_cells(pair: Comparison | None, *, corrected: bool) -> list[str]:
    if pair is None:
        return ["", "", *([""] if corrected else [])]
    counted = f"{pair.wins}/{pair.losses}" if pair.wins or pair.losses or pair.n else ""
    adjusted = [_p(pair.adjusted_p) if pair.adjusted_p is not None else ""] if corrected else []
    return [counted, _p(pair.p_value), *adjusted]


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 1e-3 else "< 0.001"


def _metric(metric: Metric | None, *, beside: bool) -> str:
    """The figure with its interval; the interval is what one may believe."""
    if metric is None or not metric.n:
        return ""
    gap = " " if beside else "\n"
    if metric.kind in ("rate", "score"):
        return f"{percent(metric.value)}{gap}{_spread(metric.low, metric.high)}"
    spread = f"{gap}[dim]({metric.low:.1f}–{metric.high:.1f})[/]" if metric.low != metric.high else ""
    return f"{metric.value:.1f} {quote(metric.unit)}".rstrip() + spread


def _spread(low: float, high: float) -> str:
    return f"[dim]({100 * low:.0f}–{100 * high:.0f})[/]"


def _told_beside(report: Report) -> list[str]:
    """How fast each answered, and which graders failed."""
    lines = []
    for subject in _subjects(report):
        made = subject.generation
        speed = f", {plural(round(made.tokens_per_second), 'token')}/s" if made.tokens_per_second else ""
        lines.append(f"[dim]{quote(subject.subject)}: {plural(made.answers, 'answer')}{speed}[/]")
        lines += [
            f"[yellow]{quote(name_of(name))} of {quote(subject.subject)}: the grader failed on "
            f"{plural(metric.failed, 'case')} of which nothing is known ({quote(metric.why_failed)})[/]"
            for name, metric in subject.metrics.items()
            if metric.failed
        ]
    return lines


def _told_at_the_end(report: Report) -> list[str]:
    """What the judge said, what so many cases can show, and how worn they are."""
    lines = [
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
        lines.append(f"[dim]these cases were looked at {report.looks} times[/]")
    return lines


def show_evaluated(console: Console, evaluated: Any) -> None:
    show_report(console, evaluated.report)
    if evaluated.page:
        print_line(console, f"every case, side by side: {quote(evaluated.page)}", soft_wrap=True)


def show_imported(console: Console, imported: Any) -> None:
    show_report(console, imported.report)
    for note in (imported.why, *imported.notes):
        print_line(console, quote(note))
    print_line(console, f"every case, side by side: {quote(imported.page)}", soft_wrap=True)


def show_verdict(console: Console, verdict: Verdict) -> None:
    style = DECISIONS[verdict.decision]
    print_line(console, f"[{style}]{verdict.decision.replace('_', ' ').upper()}[/]  {quote(verdict.reason)}")
    rows = table("rule", "", "why")
    for rule in verdict.rules:
        rows.add_row(quote(rule.rule), OUTCOMES[rule.outcome], quote(rule.sentence))
    console.print(rows)
    for place, advice in enumerate(verdict.advice, 1):
        print_line(console, f"{place}. {quote(advice)}")


PRINTERS = {"Report": show_report, "Evaluated": show_evaluated, "Verdict": show_verdict}
