"""Audits and datasets as tables."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graftwork.cli.show.tables import table
from graftwork.records.audit import Audit, Finding

MARKS = {"blocker": "✗", "warning": "!", "info": "·"}
COLOURS = {"blocker": "red", "warning": "yellow", "info": "dim"}


def show_audit(console: Console, audit: Audit) -> None:
    console.print(
        f"[bold]{audit.rows}[/] rows in {', '.join(audit.files)}: {audit.readable} readable, "
        f"[bold]{audit.usable} usable[/] after cleaning ({audit.seconds:.1f} s)\n",
        highlight=False,
    )
    findings = Table.grid(padding=(0, 2, 1, 0))
    findings.add_column(no_wrap=True)
    findings.add_column(overflow="fold")
    for finding in audit.findings:
        colour = COLOURS[finding.severity]
        findings.add_row(
            f"[{colour}]{MARKS[finding.severity]} {finding.code}[/]",
            f"[bold]{escape(finding.title)}[/]: {escape(finding.effect)}\n"
            f"[dim]{escape(finding.fix)}\n{escape(_where(finding))}[/]",
        )
    console.print(findings)
    answer = (
        "[green]fit to train on as it is[/]"
        if audit.fit_to_train
        else "[red]not fit to train on as it is[/]: `graft data prepare` drops and mends what can be mended"
    )
    console.print(answer, highlight=False)


def _where(finding: Finding) -> str:
    shown = ", ".join(str(row) for row in finding.rows[:1])
    lines = ", ".join(str(row.line) for row in finding.rows[1:6])
    more = " …" if len(finding.rows) > 6 else ""
    return f"{shown}{', ' if lines else ''}{lines}{more}"


def show_prepared(console: Console, prepared: Any) -> None:
    dataset = prepared.dataset
    rows = table(
        "split",
        "rows",
        "question groups",
        "tokens",
        "trained tokens",
        "longest row",
        right=("rows", "question groups", "tokens", "trained tokens", "longest row"),
    )
    for split, summary in dataset.splits.items():
        rows.add_row(
            split,
            str(summary.rows),
            str(summary.groups),
            f"{summary.tokens:,}",
            f"{summary.trained_tokens:,}",
            str(summary.longest),
        )
    console.print(rows)
    way = " → ".join(f"{step} {count}" for step, count in dataset.kept_after.items())
    console.print(f"rows kept: {way}", highlight=False)
    if dataset.redactions:
        made = ", ".join(f"{kind} {count}" for kind, count in dataset.redactions.items())
        console.print(f"redacted: {made}", highlight=False)
    console.print(f"dataset [bold]{dataset.content_hash[:12]}[/]", highlight=False)


PRINTERS = {"Audit": show_audit, "Prepared": show_prepared}
