"""Releases and what they answer, as tables."""

from typing import Any

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.records.release import AliasMove, Release


def show_release(console: Console, release: Release) -> None:
    rows = table("release", release.id[:12])
    for label, value in (
        ("project", release.project),
        ("base", f"{release.base} @ {release.base_fingerprint[:12]}"),
        ("adapter", release.adapter_hash[:12]),
        ("dataset", release.dataset_hash[:12]),
        ("run", release.run_id),
        ("verdict", release.decision),
        ("parent", release.parent[:12] if release.parent else "none"),
        ("made", release.created_at),
    ):
        rows.add_row(label, quote(value))
    console.print(rows)


def show_releases(console: Console, releases: tuple[Release, ...], aliases: dict[str, str]) -> None:
    if not releases:
        print_line(console, "no release yet: `graft run` makes one")
        return
    rows = table("release", "alias", "verdict", "parent", "made", "base")
    for release in releases:
        names = ", ".join(sorted(alias for alias, to in aliases.items() if to == release.id))
        rows.add_row(
            release.id[:12],
            f"[bold green]{quote(names)}[/]",
            release.decision,
            (release.parent or "")[:12],
            release.created_at[:19].replace("T", " "),
            quote(release.base),
        )
    for column in rows.columns[:-1]:
        column.no_wrap = True
    console.print(rows)


def show_move(console: Console, move: AliasMove) -> None:
    before = move.previous[:12] if move.previous else "nothing"
    print_line(console, f"{quote(move.alias)}: {before} → [bold]{move.release_id[:12]}[/]")


def show_try_out(console: Console, try_out: Any) -> None:
    for tried in try_out.tried:
        rows = table("asked", quote(tried.question))
        rows.add_row("base", quote(tried.base_answer))
        rows.add_row("[green]release[/]", f"[green]{quote(tried.release_answer)}[/]")
        rows.add_row("the log says", quote(tried.reference))
        rows.add_row(
            "[dim]answered by[/]",
            f"[dim]{tried.answered_by[:12]}, in {tried.seconds:.1f} s, captured as {tried.capture_id}[/]",
        )
        console.print(rows)


PRINTERS = {"Release": show_release, "TryOut": show_try_out}
