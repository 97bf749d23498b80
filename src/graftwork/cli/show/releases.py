"""Releases, aliases, lineage, garbage collection and comparisons of releases as tables."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from graftwork.evaluate.live.ab import ABResult, ArmFacts
from graftwork.records.live import CanaryReport
from graftwork.records.release import AliasMove, Garbage, Release, ReleaseEntry, ReleaseNote
from graftwork.registry.project import LineageGraph, LineageNode
from graftwork.registry.prompt_release import PROMPT_RUN
from graftwork.text.wording import duration
from graftwork.views.document import quote
from graftwork.views.terminal import fit_words, print_line, table, to_text

_LONGEST_FACT = 160


def show_release(console: Console, release: Release) -> None:
    rows = table("release", release.id[:12])
    for label, value in (
        ("project", release.project),
        ("base", f"{release.base} @ {release.base_fingerprint[:12]}"),
        ("prompt" if release.run_id == PROMPT_RUN else "adapter", release.adapter_hash[:12]),
        ("dataset", release.dataset_hash[:12]),
        ("run", release.run_id),
        ("verdict", release.decision.replace("_", " ")),
        ("parent", release.parent[:12] if release.parent else "none"),
        ("created", release.created_at),
    ):
        rows.add_row(label, quote(value))
    console.print(rows)


def show_known(
    console: Console, release: Release, entry: ReleaseEntry, notes: tuple[ReleaseNote, ...]
) -> None:
    """A release with its version, aliases, tags and notes."""
    show_release(console, release)
    for label, value in (
        ("model", f"{release.model} {entry.version or ''}"),
        ("aliases", ", ".join(entry.aliases) or "none"),
        ("tags", ", ".join(entry.tags) or "none"),
        ("licence of the base", release.licence or "not stated in its files"),
        ("files", f"collected {entry.collected_at}" if entry.collected_at else f"{len(release.files)}"),
    ):
        print_line(console, f"[bold]{label}[/]: {quote(value)}")
    for note in notes:
        print_line(console, f"[dim]{quote(note.when[:19])} {quote(note.who)}:[/] {quote(note.text)}")


def show_entries(console: Console, entries: tuple[ReleaseEntry, ...], *, more: bool = False) -> None:
    if not entries:
        print_line(console, "no releases found; `graft run` creates one")
        return
    rows = table("release", "version", "alias", "verdict", "created", "tags")
    for entry in entries:
        rows.add_row(
            entry.id[:12],
            quote(f"{entry.model} {entry.version or ''}"),
            f"[bold green]{quote(', '.join(entry.aliases))}[/]",
            "[dim]collected[/]" if entry.collected_at else entry.decision.replace("_", " "),
            entry.created_at[:16].replace("T", " "),
            quote(", ".join(entry.tags)),
        )
    for place in (0, 4):
        rows.columns[place].no_wrap = True
    console.print(fit_words(console, rows))
    if more:
        print_line(console, "[dim]more releases exist: use --limit 0 to list all[/]")


def show_move(console: Console, move: AliasMove) -> None:
    before = move.previous[:12] if move.previous else "nothing"
    print_line(console, f"{quote(move.alias)}: {before} → [bold]{move.release_id[:12]}[/]")


def show_log(
    console: Console, alias: str, moves: tuple[AliasMove, ...], *, decisions: Mapping[str, str] | None = None
) -> None:
    """`decisions` are the known verdicts by release id."""
    known = decisions or {}
    if not moves:
        print_line(console, f"{quote(alias)} never pointed at a release")
        return
    rows = table("when", "to", "verdict", "from", "who", "why")
    for move in moves:
        how = "rollback: " if move.rollback else "forced: " if move.forced else ""
        rows.add_row(
            quote(move.when[:16].replace("T", " ")),
            f"[bold]{move.release_id[:12]}[/]",
            known.get(move.release_id, "unknown").replace("_", " "),
            (move.previous or "")[:12],
            quote(move.who),
            quote(how + move.why),
        )
    for column in rows.columns[:2]:
        column.no_wrap = True
    console.print(fit_words(console, rows))


def show_garbage(console: Console, found: Garbage) -> None:
    would = "would be removed" if found.dry_run else "removed"
    for release_id in found.releases:
        print_line(console, f"{release_id[:12]} {would}")
    for release_id in found.adopted:
        print_line(console, f"{release_id[:12]} was missing from the index: it is added and stays")
    for release_id in found.refused:
        if release_id not in found.unreadable:
            text = "it is not in the index and its hashes do not match, so it was neither added nor removed"
            name = quote(release_id[:12])
            print_line(console, f"[yellow]{name}[/]: {text}; move its folder away if it is not yours")
    for release_id in found.unreadable:
        text = "its manifest cannot be read, so no shared file was removed (see `graft release verify`)"
        print_line(console, f"[yellow]{quote(release_id[:12])}[/]: {text}")
    print_line(
        console,
        f"{len(found.releases)} releases, {found.blobs} files and {found.leftovers} leftovers {would}: "
        f"{found.bytes:,} bytes; {found.kept} releases stay",
    )


def show_lineage(console: Console, graph: LineageGraph) -> None:
    """The graph as a tree; a node with several parents is expanded once."""
    from rich.tree import Tree

    drawn: set[str] = set()

    def draw(tree: Tree, node: LineageNode) -> None:
        drawn.add(node.id)
        for edge, below in graph.below(node.id):
            branch = tree.add(to_text(f"[dim]{quote(edge.how)}[/] {_describe(below)}"))
            if below.id not in drawn:
                draw(branch, below)

    top = graph.nodes[0]
    tree = Tree(to_text(_describe(top)))
    draw(tree, top)
    console.print(tree)


def _describe(node: LineageNode) -> str:
    facts = ", ".join(f"{key} {_shorten(value)}" for key, value in node.facts.items())
    return f"{node.kind} [bold]{quote(node.name)}[/] [dim]{quote(facts)}[/]"


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_FACT else f"{text[: _LONGEST_FACT - 1]}…"


def show_try_out(console: Console, try_out: Any) -> None:
    together = 2 * len(try_out.tried)
    for tried in try_out.tried:
        rows = table("prompt", quote(tried.question))
        rows.add_row("base", quote(_take_lines(tried.base_answer)))
        rows.add_row("[green]release[/]", f"[green]{quote(_take_lines(tried.release_answer))}[/]")
        rows.add_row("log", quote(_take_lines(tried.reference)))
        rows.add_row(
            "[dim]answered by[/]",
            f"[dim]{tried.answered_by[:12]}, in {tried.seconds:.1f} s ({together} requests at once), "
            f"captured as {tried.capture_id}[/]",
        )
        console.print(rows)


_MOST_LINES = 12
"""Of an answer; an untrained base may write nothing but line feeds."""


def _take_lines(answer: str) -> str:
    lines = [line for line in answer.splitlines() if line.strip()]
    return "\n".join(lines[:_MOST_LINES]) + ("\n…" if len(lines) > _MOST_LINES else "")


MOST_EVIDENCE = 1_000_000
"""Larger values are not shown exactly."""


def show_ab(console: Console, found: ABResult) -> None:
    mark = "[bold green]✓[/]" if found.winner is not None else "[bold yellow]?[/]"
    print_line(console, f"{mark} [bold]{quote(found.sentence)}[/]", soft_wrap=True)
    if found.experiment is not None:
        print_line(console, f"  randomized in experiment {quote(found.experiment)}", soft_wrap=True)
    asked = f"; cases answered {found.asked}" if found.traffic == "cases" else ""
    if found.traffic == "shadow":
        asked = f"; requests copied {found.asked}"
    print_line(console, f"  {_say_counts(found)}; ungraded {found.ungraded}{asked}", soft_wrap=True)
    print_line(
        console,
        f"  B minus A: {found.low:+.1%} to {found.high:+.1%} ({found.confidence:.0%}, valid at any time); "
        f"p {found.p_value:.3g}, {_say_evidence(found)}",
        soft_wrap=True,
    )
    if found.arms:
        _show_arms(console, found.arms)
    for remark in found.remarks:
        print_line(console, f"[yellow]![/] {quote(remark)}", soft_wrap=True)


CANARY_TITLES = {
    "promoted": "[bold green]PROMOTED[/]",
    "rolled_back": "[bold red]ROLLED BACK[/]",
    "undecided": "[bold yellow]NOT DECIDED[/]",
}


def show_canary(console: Console, found: CanaryReport) -> None:
    print_line(console, f"{CANARY_TITLES[found.decision]}  {quote(found.reason)}", soft_wrap=True)
    heads = (f"champion {found.champion.release[:12]}", f"canary {found.canary.release[:12]}")
    rows = table("", *heads, right=heads)
    arms = (found.champion, found.canary)
    rows.add_row("sessions", *(f"{arm.sessions:,}" for arm in arms))
    shown = (f"{arm.successes / arm.graded:.1%} of {arm.graded:g}" if arm.graded else "-" for arm in arms)
    rows.add_row(quote(found.metric), *shown)
    rows.add_row("without an answer", *(f"{arm.failures:,}" for arm in arms))
    rows.add_row("failed a check", *(f"{arm.failed_checks:,}" for arm in arms))
    console.print(rows)
    print_line(
        console,
        f"  canary less champion: {found.low:+.1%} to {found.high:+.1%} (valid at any time); e-value "
        f"{found.e_value:.3g} by {quote(found.metric)}, {found.failures_e_value:.3g} by failures; decided at "
        f"{2 / (1 - found.confidence):.3g}",
        soft_wrap=True,
    )
    print_line(
        console,
        f"  the canary got {found.share:.1%} of the sessions of {quote(found.alias)}, for "
        f"{duration(found.seconds)}",
    )
    for remark in found.remarks:
        print_line(console, f"[yellow]![/] {quote(remark)}", soft_wrap=True)
    print_line(console, f"  report: {quote(found.file)}", soft_wrap=True)


def _say_counts(found: ABResult) -> str:
    """Successes and failures of each arm on live traffic; wins, losses and ties on cases."""
    if found.traffic in ("cases", "shadow"):
        names = {"wins": "B better", "losses": "A better", "ties": "tied"}
        return ", ".join(f"{names.get(name, name)} {count:.10g}" for name, count in found.counts.items())
    return "; ".join(
        f"{arm} right {found.counts.get(f'{arm.lower()}_successes', 0):.10g}, "
        f"wrong {found.counts.get(f'{arm.lower()}_failures', 0):.10g}"
        for arm in ("A", "B")
    )


def _say_evidence(found: ABResult) -> str:
    """The e-value against "no difference", and the threshold that decides."""
    enough = f"{1 / (1 - found.confidence):.3g}"
    if found.winner is None:
        return f"e-value {found.e_value:.2g}, decided at {enough}"
    if found.e_value >= MOST_EVIDENCE:
        return f"e-value over {MOST_EVIDENCE:,}, decided at {enough}"
    return f"e-value {found.e_value:.0f}, decided at {enough}"


def _show_arms(console: Console, arms: dict[str, ArmFacts]) -> None:
    """One column per arm, to fit a narrow terminal."""
    heads = tuple(f"{name} {arm.release[:12]}" for name, arm in arms.items())
    rows = table("", *heads, right=heads)
    figures: tuple[tuple[str, Callable[[ArmFacts], str]], ...] = (
        ("sessions", lambda arm: f"{arm.sessions:,}"),
        ("exchanges", lambda arm: f"{arm.exchanges:,}"),
        ("failed", lambda arm: _share(arm.failures, arm.exchanges)),
        ("hung up", lambda arm: _share(arm.hung_up, arm.exchanges)),
        ("failed a check", lambda arm: _share(arm.failed_checks, arm.exchanges)),
        ("with feedback", lambda arm: _share(arm.feedback, arm.exchanges)),
        ("first token, median", lambda arm: _time(arm.first_token_ms)),
        ("answer, median", lambda arm: _time(arm.median_ms)),
        ("answer, 95 % within", lambda arm: _time(arm.p95_ms)),
    )
    for name, say in figures:
        rows.add_row(name, *(say(arm) for arm in arms.values()))
    console.print(rows)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if part else "0"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "–"
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
