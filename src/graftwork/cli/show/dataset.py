"""Datasets for people: traces, coloured rows, differences, exports."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from graftwork.cli.show.tables import print_line, quote, safe, table
from graftwork.data.export.sink import ExportRecord
from graftwork.data.inspect.diff import DatasetDiff, RowChanges
from graftwork.data.inspect.rows import ShownRow, TextPiece
from graftwork.data.inspect.trace import RowPlace, Trace, TracedDrop, TracedRow, TracedToken

LOG_COLOURS = {"same": "green", "changed": "red", "gone": "yellow", "not_checked": "dim"}
TRAINED, CONTROL, BOUNDARY = "bold green", "dim", "bright_black"


def show_trace(console: Console, trace: Trace) -> None:
    for row in trace.rows:
        _show_traced_row(console, row)
    for drop in trace.drops:
        _show_traced_drop(console, drop)


def show_rows(
    console: Console, rows: tuple[ShownRow, ...], *, by_token: bool = False, plain: bool = False
) -> None:
    for row in rows:
        group = f" · {row.group}" if row.group else ""
        head = (
            f"{row.split}:{row.number}  {row.id}  {row.origin}{group} · "
            f"{row.tokens} tokens, {row.trained_tokens} trained"
        )
        _print(console, Text(safe(head), style="" if plain else "bold reverse"))
        _print(console, _mark(row.pieces, by_token) if plain else _colour(row.pieces, by_token))
        _print(console, Text(""))


def show_diff(console: Console, diff: DatasetDiff) -> None:
    print_line(console, f"{diff.before[:12]} → [bold]{diff.after[:12]}[/]")
    if diff.same:
        print_line(console, "the same dataset")
        return
    if diff.made_for or diff.settings:
        settings = table("setting", "before", "after")
        for change in (*diff.made_for, *diff.settings):
            settings.add_row(quote(change.key), _value(change.before), _value(change.after))
        console.print(settings)
    for word, files in (
        ("added", diff.inputs.added),
        ("removed", diff.inputs.removed),
        ("changed", diff.inputs.changed),
    ):
        if files:
            named = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
            print_line(console, f"logs {word}: {quote(named)}")
    _show_row_changes(console, diff.rows)
    _show_totals(console, diff)


def show_export(console: Console, export: ExportRecord, *, folder: Path) -> None:
    files = table("file", "rows", "sha256", right=("rows",))
    for file in export.files:
        files.add_row(quote(file.file), "" if file.rows is None else f"{file.rows:,}", file.sha256[:12])
    console.print(files)
    for left_out in export.left_out:
        first = ", ".join(str(origin) for origin in left_out.first[:3])
        words = f"{left_out.rows} rows left out: {left_out.why} ({first})"
        print_line(console, f"[yellow]! {quote(words)}[/]")
    for note in export.notes:
        print_line(console, f"[dim]{quote(note)}[/]")
    pairs = f", {export.preference_rows} of them preference pairs" if export.preference_rows else ""
    print_line(
        console,
        f"{export.rows:,} rows{pairs} of dataset [bold]{export.dataset[:12]}[/] written to {quote(folder)}",
    )


def _show_traced_row(console: Console, row: TracedRow) -> None:
    rows = table("row", quote(row.place.id))
    rows.add_row("from", _origin(row.place))
    rows.add_row(
        "log line", f"{row.input_hash or '?'}  [{LOG_COLOURS[row.log.state]}]{quote(row.log.words)}[/]"
    )
    rows.add_row("stands in", f"[bold]{row.place.split}[/], row {row.place.number} counted from 0")
    for label, value in (("group", row.group), ("domain", row.domain), ("stage", row.stage)):
        if value is not None:
            rows.add_row(label, quote(value))
    if row.capture is not None:
        said = "no feedback" if row.capture.feedback is None else f"feedback {row.capture.feedback:g}"
        corrected = ", corrected by a person" if row.capture.corrected else ""
        served = f"{row.capture.id} by {row.capture.release[:12]} at {row.capture.at[:19]}"
        rows.add_row("captured", quote(f"{served}, {said}{corrected}"))
    if row.weight != 1:
        rows.add_row("weight", f"{row.weight:g}")
    trained = row.tokens - row.trained_from
    rows.add_row(
        "tokens", f"{row.tokens}, of which {trained} trained: {row.trained_from} to {row.tokens - 1}"
    )
    if row.token is not None:
        rows.add_row(f"token {row.token.place}", _token(row.token))
    console.print(rows)


def _token(token: TracedToken) -> str:
    text = "not decoded here" if token.text is None else quote(repr(token.text))
    trained = "[bold green]trained[/]" if token.trained else "[dim]only read[/]"
    return f"{token.token}  {text}  {trained}"


def _show_traced_drop(console: Console, traced: TracedDrop) -> None:
    drop = traced.drop
    rows = table("left out", quote(drop.origin))
    rows.add_row(
        "log line",
        f"{drop.input_hash or '?'}  [{LOG_COLOURS[traced.log.state]}]{quote(traced.log.words)}[/]",
    )
    rows.add_row("by step", f"[bold]{quote(drop.step)}[/]")
    rows.add_row("because", quote(drop.reason))
    for place in traced.kept:
        rows.add_row("kept instead", f"{_origin(place)} in [bold]{place.split}[/], row {place.number}")
    console.print(rows)


def _origin(place: RowPlace) -> str:
    return quote(place.origin)


def _show_row_changes(console: Console, changes: RowChanges) -> None:
    print_line(
        console,
        f"rows: {changes.same:,} the same, {changes.added:,} added, {changes.removed:,} removed, "
        f"{changes.moved:,} moved to another split, {changes.changed:,} rendered otherwise",
    )
    for kind in ("moved", "changed", "added", "removed"):
        named = changes.named.get(kind, ())
        if not named:
            continue
        rows = table(kind, "from", "before", "after")
        for row in named:
            rows.add_row(quote(row.id), quote(row.origin), row.before or "", row.after or "")
        console.print(rows)


def _show_totals(console: Console, diff: DatasetDiff) -> None:
    totals = table("split", "rows", "tokens", "trained tokens", right=("rows", "tokens", "trained tokens"))
    for split, change in diff.splits.items():
        pairs = (
            (getattr(change.before, key), getattr(change.after, key))
            for key in ("rows", "tokens", "trained_tokens")
        )
        totals.add_row(split, *(_arrow(before, after) for before, after in pairs))
    console.print(totals)
    if diff.drops:
        drops = table("left out by", "rows", "new", "no longer", right=("rows", "new", "no longer"))
        for step, change_of_drops in diff.drops.items():
            counts = change_of_drops
            drops.add_row(
                quote(step), _arrow(counts.before, counts.after), str(counts.appeared), str(counts.vanished)
            )
        console.print(drops)


def _arrow(before: int, after: int) -> str:
    return f"{after:,}" if before == after else f"{before:,} → {after:,}"


def _value(value: Any) -> str:
    text = "" if value is None else str(value)
    return quote(text if len(text) <= 60 else f"{text[:57]}…")


def _colour(pieces: tuple[TextPiece, ...], by_token: bool) -> Text:
    text = Text()
    for piece in pieces:
        style = TRAINED if piece.trained else CONTROL if piece.control else ""
        text.append(safe(piece.text), style=style)
        if by_token:
            text.append("│", style=BOUNDARY)
    return text


def _mark(pieces: tuple[TextPiece, ...], by_token: bool) -> Text:
    """The same without colours."""
    parts, trained = [], False
    for piece in pieces:
        if piece.trained != trained:
            parts.append("⟦" if piece.trained else "⟧")
            trained = piece.trained
        parts.append(safe(piece.text) + ("│" if by_token else ""))
    return Text("".join(parts) + ("⟧" if trained else ""))


def _print(console: Console, text: Text) -> None:
    console.print(text, highlight=False, soft_wrap=True)
