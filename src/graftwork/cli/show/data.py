"""Audits and datasets as tables."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from graftwork.cli.show.tables import table
from graftwork.records.audit import Audit, Finding

COLOURS = {"blocker": "red", "warning": "yellow", "info": "dim"}


def show_audit(console: Console, audit: Audit) -> None:
    console.print(
        f"{audit.rows} rows in {', '.join(audit.files)}: {audit.readable} readable, "
        f"[bold]{audit.usable} usable[/] ({audit.seconds:.1f} s)",
        highlight=False,
    )
    if audit.findings:
        rows = table(
            "finding", "rows", "what it does to training, and what mends it", "first", right=("rows",)
        )
        for finding in audit.findings:
            colour = COLOURS[finding.severity]
            rows.add_row(
                f"[{colour}]{finding.code}[/]",
                str(finding.count),
                f"{escape(finding.effect)}\n[dim]→ {escape(finding.fix)}[/]",
                _first(finding),
            )
        console.print(rows)
    answer = (
        "[green]fit to train on as it is[/]"
        if audit.fit_to_train
        else "[red]not fit to train on as it is[/]: `graft data prepare` drops and mends what can be mended"
    )
    console.print(answer, highlight=False)


def _first(finding: Finding) -> str:
    shown = [f"line {row.line}" for row in finding.rows[:3]]
    return ", ".join(shown) + (" …" if len(finding.rows) > 3 else "")


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
