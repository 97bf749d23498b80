"""Releases, aliases, lineage, garbage collection and comparisons of releases."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from graftwork.records.live import CanaryReport
from graftwork.records.release import PROMPT_RUN, AliasMove, Garbage, Release, ReleaseEntry, ReleaseNote
from graftwork.text.wording import duration
from graftwork.views.document import Document, Table, Timestamp, quote

if TYPE_CHECKING:
    from graftwork.evaluate.live.ab import ABResult, ArmFacts
    from graftwork.pipeline.steps.release import TryOut


def view_release(release: Release) -> Document:
    viewed = Document(f"Release {release.id[:12]}")
    viewed.table(
        ("release", release.id[:12]),
        [
            (label, quote(value))
            for label, value in (
                ("project", release.project),
                ("base", f"{release.base} @ {release.base_fingerprint[:12]}"),
                ("prompt" if release.run_id == PROMPT_RUN else "adapter", release.adapter_hash[:12]),
                ("dataset", release.dataset_hash[:12]),
                ("run", release.run_id),
                ("verdict", release.decision.replace("_", " ")),
                ("parent", release.parent[:12] if release.parent else "none"),
                ("created", release.created_at),
            )
        ],
    )
    return viewed


def view_known(release: Release, entry: ReleaseEntry, notes: tuple[ReleaseNote, ...]) -> Document:
    """A release with its version, aliases, tags and notes."""
    viewed = view_release(release)
    for label, value in (
        ("model", f"{release.model} {entry.version or ''}"),
        ("aliases", ", ".join(entry.aliases) or "none"),
        ("tags", ", ".join(entry.tags) or "none"),
        ("license of the base", release.licence or "not stated in its files"),
        ("files", f"collected {entry.collected_at}" if entry.collected_at else f"{len(release.files)}"),
    ):
        viewed.line(f"[bold]{label}[/]: {quote(value)}")
    viewed.line(*(f"[dim]{quote(n.when[:19])} {quote(n.who)}:[/] {quote(n.text)}" for n in notes))
    return viewed


def view_entries(entries: tuple[ReleaseEntry, ...], *, more: bool = False) -> Document:
    viewed = Document("Releases")
    if not entries:
        viewed.line("no releases found; `graft run` creates one")
        return viewed
    rows = [
        (
            entry.id[:12],
            quote(f"{entry.model} {entry.version or ''}"),
            f"[bold green]{quote(', '.join(entry.aliases))}[/]",
            "[dim]collected[/]" if entry.collected_at else entry.decision.replace("_", " "),
            Timestamp(entry.created_at),
            quote(", ".join(entry.tags)),
        )
        for entry in entries
    ]
    columns = ("release", "version", "alias", "verdict", "created", "tags")
    viewed.add(Table(columns, rows, no_wrap=(0, 4)))
    if more:
        viewed.line("[dim]more releases exist: use --limit 0 to list all[/]")
    return viewed


def view_move(move: AliasMove) -> Document:
    before = move.previous[:12] if move.previous else "nothing"
    viewed = Document("Alias")
    viewed.line(f"{quote(move.alias)}: {before} → [bold]{move.release_id[:12]}[/]")
    return viewed


def view_log(
    alias: str, moves: tuple[AliasMove, ...], *, decisions: Mapping[str, str] | None = None
) -> Document:
    """`decisions` are the known verdicts by release id."""
    known = decisions or {}
    viewed = Document(f"Moves of {alias}")
    if not moves:
        viewed.line(f"{quote(alias)} never pointed at a release")
        return viewed
    rows = [
        (
            Timestamp(move.when),
            f"[bold]{move.release_id[:12]}[/]",
            known.get(move.release_id, "unknown").replace("_", " "),
            (move.previous or "")[:12],
            quote(move.who),
            quote(("rollback: " if move.rollback else "forced: " if move.forced else "") + move.why),
        )
        for move in moves
    ]
    viewed.add(Table(("when", "to", "verdict", "from", "who", "why"), rows, no_wrap=(0, 1)))
    return viewed


def view_garbage(found: Garbage) -> Document:
    viewed = Document("Garbage")
    would = "would be removed" if found.dry_run else "removed"
    viewed.line(
        *(f"{release_id[:12]} {would}" for release_id in found.releases),
        *(
            f"{release_id[:12]} was missing from the index: it is added and stays"
            for release_id in found.adopted
        ),
        *(
            f"[yellow]{quote(release_id[:12])}[/]: it is not in the index and its hashes do not match, so it "
            "was neither added nor removed; move its folder away if it is not yours"
            for release_id in found.refused
            if release_id not in found.unreadable
        ),
        *(
            f"[yellow]{quote(release_id[:12])}[/]: its manifest cannot be read, so no shared file was "
            "removed (see `graft release verify`)"
            for release_id in found.unreadable
        ),
        f"{len(found.releases)} releases, {found.blobs} files and {found.leftovers} leftovers {would}: "
        f"{found.bytes:,} bytes; {found.kept} releases stay",
    )
    if found.readers_unseen:
        viewed.line(
            f"[yellow]readers cannot be detected[/]: {len(found.readers_unseen)} releases stay, because this "
            "file system does not show whether a server without write access uses them; run gc as the owner "
            "of the files"
        )
    return viewed


def view_try_out(try_out: "TryOut") -> Document:
    viewed = Document("Answers of the release")
    together = 2 * len(try_out.tried)
    for tried in try_out.tried:
        viewed.table(
            ("prompt", quote(tried.question)),
            [
                ("base", quote(_take_lines(tried.base_answer))),
                ("[green]release[/]", f"[green]{quote(_take_lines(tried.release_answer))}[/]"),
                ("log", quote(_take_lines(tried.reference))),
                (
                    "[dim]answered by[/]",
                    f"[dim]{tried.answered_by[:12]}, in {tried.seconds:.1f} s ({together} requests at once), "
                    f"captured as {tried.capture_id}[/]",
                ),
            ],
        )
    return viewed


MOST_LINES = 12
"""Lines of an answer to show; an untrained base may write nothing but line feeds."""


def _take_lines(answer: str) -> str:
    lines = [line for line in answer.splitlines() if line.strip()]
    return "\n".join(lines[:MOST_LINES]) + ("\n…" if len(lines) > MOST_LINES else "")


MOST_EVIDENCE = 1_000_000
"""Larger values are not shown exactly."""


def view_ab(found: "ABResult") -> Document:
    viewed = Document("Comparison of two releases")
    mark = "[bold green]✓[/]" if found.winner is not None else "[bold yellow]?[/]"
    lines = [f"{mark} [bold]{quote(found.sentence)}[/]"]
    if found.experiment is not None:
        lines.append(f"  randomized in experiment {quote(found.experiment)}")
    asked = f"; cases answered {found.asked}" if found.traffic == "cases" else ""
    if found.traffic == "shadow":
        asked = f"; requests copied {found.asked}"
    lines += [
        f"  {_say_counts(found)}; ungraded {found.ungraded}{asked}",
        f"  B minus A: {found.low:+.1%} to {found.high:+.1%} ({found.confidence:.0%}, valid at any time); "
        f"p {found.p_value:.3g}, {_say_evidence(found)}",
    ]
    viewed.line(*lines, wrap=False)
    if found.arms:
        _add_arms(viewed, found.arms)
    viewed.line(*(f"[yellow]![/] {quote(remark)}" for remark in found.remarks), wrap=False)
    return viewed


CANARY_TITLES = {
    "promoted": "[bold green]PROMOTED[/]",
    "rolled_back": "[bold red]ROLLED BACK[/]",
    "undecided": "[bold yellow]NOT DECIDED[/]",
}


def view_canary(found: CanaryReport) -> Document:
    viewed = Document("Canary")
    viewed.line(f"{CANARY_TITLES[found.decision]}  {quote(found.reason)}", wrap=False)
    heads = (f"champion {found.champion.release[:12]}", f"canary {found.canary.release[:12]}")
    arms = (found.champion, found.canary)
    graded = (f"{arm.successes / arm.graded:.1%} of {arm.graded:g}" if arm.graded else "-" for arm in arms)
    viewed.table(
        ("", *heads),
        [
            ("sessions", *(arm.sessions for arm in arms)),
            (quote(found.metric), *graded),
            ("without an answer", *(arm.failures for arm in arms)),
            ("failed a check", *(arm.failed_checks for arm in arms)),
        ],
        right=heads,
    )
    viewed.line(
        f"  canary less champion: {found.low:+.1%} to {found.high:+.1%} (valid at any time); e-value "
        f"{found.e_value:.3g} by {quote(found.metric)}, {found.failures_e_value:.3g} by failures; decided at "
        f"{2 / (1 - found.confidence):.3g}",
        f"  the canary got {found.share:.1%} of the sessions of {quote(found.alias)}, for "
        f"{duration(found.seconds)}",
        *(f"[yellow]![/] {quote(remark)}" for remark in found.remarks),
        f"  report: {quote(found.file)}",
        wrap=False,
    )
    return viewed


def _say_counts(found: "ABResult") -> str:
    """Successes and failures of each arm on live traffic; wins, losses and ties on cases."""
    if found.traffic in ("cases", "shadow"):
        names = {"wins": "B better", "losses": "A better", "ties": "tied"}
        return ", ".join(f"{names.get(name, name)} {count:.10g}" for name, count in found.counts.items())
    return "; ".join(
        f"{arm} right {found.counts.get(f'{arm.lower()}_successes', 0):.10g}, "
        f"wrong {found.counts.get(f'{arm.lower()}_failures', 0):.10g}"
        for arm in ("A", "B")
    )


def _say_evidence(found: "ABResult") -> str:
    """The e-value against "no difference", and the threshold that decides."""
    enough = f"{1 / (1 - found.confidence):.3g}"
    if found.winner is None:
        return f"e-value {found.e_value:.2g}, decided at {enough}"
    if found.e_value >= MOST_EVIDENCE:
        return f"e-value over {MOST_EVIDENCE:,}, decided at {enough}"
    return f"e-value {found.e_value:.0f}, decided at {enough}"


def _add_arms(viewed: Document, arms: "dict[str, ArmFacts]") -> None:
    """One column per arm, to fit a narrow terminal."""
    heads = tuple(f"{name} {arm.release[:12]}" for name, arm in arms.items())
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
    viewed.table(("", *heads), [(name, *map(say, arms.values())) for name, say in figures], right=heads)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if part else "0"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "–"
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
