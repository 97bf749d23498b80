"""Reports and verdicts as tables."""

from typing import Any

from rich import box
from rich.console import Console
from rich.text import Text

from graftwork.cli.show.tables import PlainTable, percent, print_line, quote, safe, table
from graftwork.evaluate.wording import name_of
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
    example = ", shown one worked example" if report.settings.get("worked_example") else ""
    print_line(console, f"{report.cases} held-out cases; {quote(report.baseline.subject)}{example}")
    rows = PlainTable(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for column in ("", report.baseline.subject, report.candidate.subject, "won/lost", "p"):
        rows.add_column(Text(safe(column)), no_wrap=True)
    for name, after in report.candidate.metrics.items():
        before, pair = report.baseline.metrics.get(name), pairs.get(name)
        rows.add_row(
            name_of(name),
            _metric(before) if before else "",
            _metric(after),
            f"{pair.wins}/{pair.losses}" if pair else "",
            (f"{pair.p_value:.2g}" if pair.p_value >= 1e-3 else "< 0.001") if pair else "",
        )
    console.print(rows)
    for subject in (report.baseline, report.candidate):
        made = subject.generation
        print_line(
            console,
            f"[dim]{quote(subject.subject)}: {made.answers} answers, "
            f"{made.tokens_per_second:.0f} tokens/s[/]",
        )
    if report.looks > 1:
        print_line(console, f"[dim]these cases were looked at {report.looks} times[/]")


def _metric(metric: Metric) -> str:
    """The figure with its interval; the interval is what one may believe."""
    if metric.kind == "rate":
        return f"{percent(metric.value)} [dim]({100 * metric.low:.0f}–{100 * metric.high:.0f})[/]"
    spread = f" [dim]({metric.low:.1f}–{metric.high:.1f})[/]" if metric.low != metric.high else ""
    return f"{metric.value:.1f} {metric.unit}{spread}"


def show_evaluated(console: Console, evaluated: Any) -> None:
    show_report(console, evaluated.report)


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
