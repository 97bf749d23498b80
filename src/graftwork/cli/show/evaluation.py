"""Reports and verdicts as tables."""

from typing import Any

from rich.console import Console

from graftwork.cli.show.evaluation_metrics import (
    figures_missing,
    medians_unbounded,
    metrics_table,
    subjects_of,
)
from graftwork.cli.show.evaluation_parts import show_confusions, show_parts
from graftwork.cli.show.tables import percent, print_line, quote, table
from graftwork.grading.metrics import name_of, plural
from graftwork.records.report import Report
from graftwork.records.verdict import Verdict

DECISIONS = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "abort": "bold red",
    "not_enough_evidence": "bold yellow",
}
OUTCOMES = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "unknown": "[yellow]unknown[/]"}


def show_report(console: Console, report: Report, *, held_out: bool = False) -> None:
    """`held_out` says that the cases are the project's own, which no row of training comes of."""
    source = f" (imported from {quote(report.source)})" if report.source else ""
    counted = plural(report.cases, "held-out case" if held_out else "case")
    print_line(console, f"{counted}{source}{_say_example(report)}")
    console.print(metrics_table(console, report))
    for line in _told_beside(report):
        print_line(console, line)
    show_parts(console, report)
    show_confusions(console, report)
    for line in _told_at_the_end(report):
        print_line(console, line)


def _say_example(report: Report) -> str:
    """Who was shown a worked example: only whoever answers without having been trained for it."""
    helped = [
        quote(one.subject) for one in subjects_of(report) if one.generation.settings.get("worked_example")
    ]
    return f"; one worked example shown to {', '.join(helped)}" if helped else ""


def _told_beside(report: Report) -> list[str]:
    """What stands in the table and what does not, how fast each answered, and which graders failed."""
    lines = []
    if len(subjects_of(report)) > 2:
        name = quote(report.candidate.subject)
        lines.append(f"[dim]won/lost: cases on which {name} did better/worse than the one named[/]")
    lines += [f"[dim]{one}[/]" for one in (figures_missing(report), medians_unbounded(report)) if one]
    for subject in subjects_of(report):
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
    """What to know of the subjects, what the judge said, what so many cases can show, how worn they are."""
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
        lines.append(f"[dim]these cases were looked at {report.looks} times[/]")
    return lines


def show_evaluated(console: Console, evaluated: Any) -> None:
    # Only the pipeline's own evaluation names its adapter; cases of a file may be anybody's.
    show_report(console, evaluated.report, held_out=bool(evaluated.adapter_hash))
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
