"""Audits and datasets as tables."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graftwork.cli.show.portions import show_portions
from graftwork.cli.show.tables import table
from graftwork.records.audit import Audit, Finding

MARKS = {"blocker": "✗", "warning": "!", "info": "·"}
COLOURS = {"blocker": "red", "warning": "yellow", "info": "dim"}


def show_audit(console: Console, audit: Audit) -> None:
    """One screen: what was found and what mends it. All the rest is in the page and in --json."""
    console.print(
        f"[bold]{audit.rows:,}[/] rows in {escape(_name_files(audit.files))}: {audit.readable:,} readable, "
        f"[bold]{audit.usable:,} usable[/] after cleaning ({audit.seconds:.1f} s)\n",
        highlight=False,
    )
    findings = Table.grid(padding=(0, 2, 0, 0))
    findings.add_column(no_wrap=True)
    findings.add_column(overflow="fold")
    for finding in audit.findings:
        colour = COLOURS[finding.severity]
        findings.add_row(
            f"[{colour}]{MARKS[finding.severity]} {escape(finding.code)}[/]", _say(finding, audit)
        )
    console.print(findings)
    for why, codes in _group_reasons(audit).items():
        console.print(f"[dim]? {escape(codes)} not looked for: {escape(why)}[/]", highlight=False)
    answer = (
        "[green]fit to train on as it is[/]"
        if audit.fit_to_train
        else "[red]must not be trained on as it is[/]: `graft data prepare` drops and mends what it can"
    )
    console.print(f"\n{answer}", highlight=False)


def _say(finding: Finding, audit: Audit) -> str:
    """The title and where; of what matters also what mends it, and of a blocker what it does."""
    effect = f": {escape(finding.effect)}" if finding.severity == "blocker" else ""
    said = f"[bold]{escape(finding.title)}[/]{effect} [dim]· {escape(_where(finding, audit.files))}[/]"
    return said if finding.severity == "info" else f"{said}\n[dim]{escape(finding.fix)}[/]"


def _where(finding: Finding, files: tuple[str, ...]) -> str:
    """The first rows; the file only where there are several."""
    if not finding.rows:
        return ""
    if len(files) == 1:
        lines = ", ".join(str(row.line) for row in finding.rows[:4])
        return f"line {lines}{' …' if len(finding.rows) > 4 else ''}"
    return f"{finding.rows[0]}{' …' if len(finding.rows) > 1 else ''}"


def _name_files(files: tuple[str, ...]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3:,} more files" if len(files) > 3 else "")


def _group_reasons(audit: Audit) -> dict[str, str]:
    """Rules that could not look for the same reason share a line."""
    codes: dict[str, list[str]] = {}
    for lacking in audit.not_looked_for:
        codes.setdefault(lacking.why, []).append(lacking.code)
    return {why: ", ".join(named) for why, named in codes.items()}


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
    packing = dataset.packing
    if packing is not None and packing.sequences:
        console.print(
            f"packed: {packing.sequences:,} sequences of {packing.length:,} tokens, {packing.fill:.1%} full",
            highlight=False,
        )
    if len(prepared.portions) > 1:
        show_portions(console, prepared.portions)
        for name, folder in prepared.folders.items():
            console.print(f"dataset [bold]{Path(folder).name[:12]}[/] for {escape(name)}", highlight=False)
    else:
        console.print(f"dataset [bold]{dataset.content_hash[:12]}[/]", highlight=False)


PRINTERS = {"Audit": show_audit, "Prepared": show_prepared}
