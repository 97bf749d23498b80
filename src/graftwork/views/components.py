"""Specifications and the components that were generated from them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graftwork.components.stages import STAGES
from graftwork.text.wording import plural
from graftwork.views.document import Cell, Document, Table, quote

if TYPE_CHECKING:
    from graftwork.components.check import SpecReport
    from graftwork.components.results import EpisodeFiles, ProvenanceReport
    from graftwork.components.session import GenerationOutcome, StageRate
    from graftwork.components.tree import SpecChange

MOST_SHOWN = 60
"""Requirements without a case in one table."""
LEVEL_TONES = {"error": "red", "warning": "yellow", "note": "dim"}


def view_spec_report(report: "SpecReport", *, notes: bool = False) -> Document:
    viewed = Document(quote(report.file))
    runs = sum(requirement.executable for requirement in report.requirements)
    viewed.line(
        f"[bold]{quote(report.file)}[/]  {report.dialect}, {plural(report.nodes, 'node')}, "
        f"{report.leaves} {'leaf' if report.leaves == 1 else 'leaves'}, "
        f"{report.components_with_cases} with cases, "
        f"{runs} of {plural(len(report.requirements), 'requirement')} executable"
    )
    shown = [finding for finding in report.findings if notes or finding.level != "note"]
    if shown:
        rows = [
            (
                str(finding.line),
                f"[{LEVEL_TONES[finding.level]}]{finding.level}[/]",
                quote(finding.node),
                quote(finding.message),
                finding.code,
            )
            for finding in shown
        ]
        columns = ("line", "level", "node", "finding", "rule")
        viewed.add(Table(columns, rows, right=("line",), no_wrap={4}))
        fixes = {finding.code: finding.fix for finding in shown}
        viewed.line(*(f"  [bold]{rule}[/]: {quote(fix)}" for rule, fix in fixes.items()))
    if hidden := len(report.findings) - len(shown):
        viewed.line(f"[dim]{plural(hidden, 'note')} not shown: --notes lists them[/]")
    missing = [requirement for requirement in report.requirements if not requirement.executable]
    viewed.table(
        ("line", "node", "requirement without a case"),
        [(str(item.line), quote(item.node), quote(item.text)) for item in missing[:MOST_SHOWN]],
        right=("line",),
    )
    if len(missing) > MOST_SHOWN:
        viewed.line(f"[dim]and {len(missing) - MOST_SHOWN} more: --json lists all[/]")
    return viewed


def view_spec_tree(rows: Sequence[dict[str, Any]]) -> Document:
    """The nodes as `to_outline` lists them."""

    def name_all(parameters: dict[str, str]) -> str:
        return quote(", ".join(f"{name}: {kind}" if kind else name for name, kind in parameters.items()))

    cells: list[Sequence[Cell]] = [
        (
            quote("  " * row["depth"] + f"{row['id']} {row['name']}"),
            name_all(row["inputs"]),
            name_all(row["outputs"]),
            quote(", ".join(row["dependencies"])),
            str(len(row["requirements"]) or ""),
        )
        for row in rows
    ]
    columns = ("node", "takes", "gives", "uses", "requirements")
    return Document("Specification", [Table(columns, cells, right=("requirements",), no_wrap={0})])


def view_spec_changes(changes: "Sequence[SpecChange]") -> Document:
    viewed = Document("Changes")
    if not changes:
        viewed.line("the specifications say the same")
    viewed.table(
        ("change", "node", "key", "old", "new"),
        [
            (
                change.kind,
                quote(f"{change.node} {change.name}"),
                quote(change.key),
                *(quote("" if value is None else str(value)[:80]) for value in (change.old, change.new)),
            )
            for change in changes
        ],
    )
    return viewed


def view_generation(outcome: "GenerationOutcome") -> Document:
    viewed = Document("Generated components")
    rows: list[Sequence[Cell]] = []
    for card in outcome.cards:
        failed = [name for name, held in card.gates.items() if not held]
        state = "[green]pass[/]" if card.ok else f"[red]{quote(', '.join(failed) or 'not built')}[/]"
        low = {name: score for name, score in card.scores.items() if score is not None and score < 1}
        total = "–" if card.total is None else f"{card.total:.0f}"
        rates = " ".join(f"{_figure(card.pass_at_1.get(str(stage))):<4}" for stage in STAGES)
        figures = ", ".join(f"{name} {score:.2f}" for name, score in low.items())
        rows.append((quote(f"{card.component} {card.function}"), state, total, rates, figures))
    columns = ("component", "state", "total", "pass@1 at 1 2 3 4", "figures below 1")
    viewed.add(Table(columns, rows, right=("total",), no_wrap={0, 3}))
    viewed.line(*(f"[red]✗[/] {quote(name)}: {quote(reason)}" for name, reason in outcome.failed.items()))
    if outcome.skipped:
        viewed.line(f"[yellow]![/] {quote(outcome.skipped)}")
    viewed.add(view_rates(outcome.rates))
    viewed.line(
        f"{len(outcome.built)} of {len(outcome.cards)} components built by {quote(outcome.model)}; "
        f"{outcome.answers} answers, {outcome.tokens:,} tokens; package {quote(outcome.out)}"
    )
    if not outcome.ok:
        viewed.line(
            "[dim]the same command with more --samples or --rounds asks for what is missing, and for nothing "
            "twice[/]"
        )
    return viewed


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def view_rates(rates: "Sequence[StageRate]") -> Document:
    viewed = Document("Stages")
    figures = ("components", "answers", "pass@1", "pass@n")
    viewed.table(
        ("stage", *figures),
        [
            (str(rate.stage), rate.components, rate.answers, _figure(rate.pass_at_1), _figure(rate.pass_at_n))
            for rate in rates
        ],
        right=figures,
    )
    return viewed


def view_compared_rates(rows: Sequence[dict[str, Any]]) -> Document:
    viewed = Document("Stages before and after training")
    figures = ("answers before", "before", "answers after", "after")
    cells: list[Sequence[Cell]] = [
        (
            str(row["stage"]),
            row["answers_before"],
            _figure(row["before"]),
            row["answers_after"],
            _figure(row["after"]),
        )
        for row in rows
    ]
    viewed.add(Table(("stage", *figures), cells, right=figures))
    return viewed


def view_provenance(report: "ProvenanceReport") -> Document:
    viewed = Document("Provenance")
    viewed.line(*(f"[red]✗[/] {quote(problem)}" for problem in report.problems))
    rerun = f", {report.rerun} components run again" if report.rerun else ""
    state = "[green]every link holds[/]" if report.ok else f"[red]{len(report.problems)} do not hold[/]"
    viewed.line(f"{quote(report.package)}: {report.links} links, {report.entries} entries{rerun}: {state}")
    return viewed


def view_episodes(written: "EpisodeFiles") -> Document:
    viewed = Document("Episodes")
    viewed.line(
        f"{written.interactions} interactions ({written.pairs} pairs, {written.failed} failed), "
        f"{written.prompts} prompts for rollouts, {written.cases} held-out cases"
    )
    if written.left_out:
        viewed.line(f"{written.left_out} episodes are left out: the project holds their prompts out")
    if count := written.with_dependencies:
        viewed.line(f"{count} components use others, and are neither prompts nor held-out cases")
    viewed.line(*(f"  {name:<13}{quote(path)}" for name, path in written.files.items()))
    return viewed
