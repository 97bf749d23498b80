"""Reports and verdicts as tables."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from graftwork.cli.show.tables import percent, table
from graftwork.records.report import Metric, Report
from graftwork.records.verdict import Verdict

DECISIONS = {
    "deploy": "bold green",
    "iterate": "bold yellow",
    "abort": "bold red",
    "not_enough_evidence": "bold yellow",
}
OUTCOMES = {"pass": "[green]pass[/]", "fail": "[red]fail[/]", "unknown": "[yellow]unknown[/]"}


def show_report(console: Console, report: Report) -> None:
    pairs = {one.metric: one for one in report.comparisons}
    title = f"{report.cases} held-out cases; the base was shown one worked example"
    rows = table(
        "metric",
        report.baseline.subject,
        report.candidate.subject,
        "difference",
        "wins / losses",
        "p",
        title=title,
    )
    for name, after in report.candidate.metrics.items():
        before, pair = report.baseline.metrics.get(name), pairs.get(name)
        rate = after.kind == "rate"
        rows.add_row(
            name,
            _metric(before) if before else "",
            _metric(after),
            (f"{100 * pair.difference:+.1f} points" if rate else f"{pair.difference:+.2f} {after.unit}")
            if pair
            else "",
            f"{pair.wins} / {pair.losses}" if pair else "",
            (f"{pair.p_value:.2g}" if pair.p_value >= 1e-6 else "< 1e-6") if pair else "",
        )
    console.print(rows)
    for subject in (report.baseline, report.candidate):
        made = subject.generation
        console.print(
            f"[dim]{subject.subject}: {made.answers} answers, {made.tokens_per_second:.0f} tokens/s[/]",
            highlight=False,
        )
    if report.looks > 1:
        console.print(f"[dim]these cases were looked at {report.looks} times[/]", highlight=False)


def _metric(metric: Metric) -> str:
    if metric.kind == "rate":
        return f"{percent(metric.value)} [dim]({percent(metric.low)} … {percent(metric.high)})[/]"
    return f"{metric.value:.2f} {metric.unit} [dim]({metric.low:.2f} … {metric.high:.2f})[/]"


def show_evaluated(console: Console, evaluated: Any) -> None:
    show_report(console, evaluated.report)


def show_verdict(console: Console, verdict: Verdict) -> None:
    style = DECISIONS[verdict.decision]
    console.print(
        f"[{style}]{verdict.decision.replace('_', ' ').upper()}[/]  {escape(verdict.reason)}", highlight=False
    )
    rows = table("rule", "", "why")
    for rule in verdict.rules:
        rows.add_row(escape(rule.rule), OUTCOMES[rule.outcome], escape(rule.sentence))
    console.print(rows)
    for place, advice in enumerate(verdict.advice, 1):
        console.print(f"{place}. {escape(advice)}", highlight=False)


PRINTERS = {"Report": show_report, "Evaluated": show_evaluated, "Verdict": show_verdict}
