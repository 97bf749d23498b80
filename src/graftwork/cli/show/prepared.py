"""Prepared datasets: what stands in them, what was left out and why, where they lie."""

import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from graftwork.cli.show.portions import show_portions
from graftwork.cli.show.tables import print_line, quote, table

if TYPE_CHECKING:
    from graftwork.records.dataset import Dataset, Drop

MOST_REASONS = 5
# Of a million rows left out the first tell enough.
MOST_DROPS = 200_000

_KINDS = (
    (re.compile(r"^the same as "), "the same as another row"),
    (re.compile(r"^nearly the same as "), "nearly the same as another row"),
    (re.compile(r"^other reply to the same prompt in "), "other reply to the same prompt in another row"),
    (re.compile(r"^set aside: it asks what "), "set aside: asks what rows in different splits ask"),
    (re.compile(r"^overlong: |^\d+ tokens, more than max_tokens"), "longer than data.max_tokens"),
)
_FIGURE = re.compile(r"\d[\d,.]*")


class Reasons(NamedTuple):
    """The most frequent first, and how many rows were looked at."""

    counts: list[tuple[str, int]]
    rows: int


def show_prepared(console: Console, prepared: Any) -> None:
    dataset: Dataset = prepared.dataset
    _show_splits(console, dataset)
    way = " → ".join(f"{step} {count}" for step, count in dataset.kept_after.items())
    print_line(console, f"rows kept: {way}")
    _show_reasons(console, Path(prepared.folder), dataset)
    if dataset.redactions:
        made = ", ".join(f"{kind} {count}" for kind, count in dataset.redactions.items())
        print_line(console, f"redacted: {quote(made)}")
    packing = dataset.packing
    if packing is not None and packing.sequences:
        print_line(
            console,
            f"packed: {packing.sequences:,} sequences of {packing.length:,} tokens, {packing.fill:.1%} full",
        )
    if len(prepared.portions) > 1:
        show_portions(console, prepared.portions)
        for name, folder in prepared.folders.items():
            _show_folder(console, folder, Path(folder).name, f" for {quote(name)}")
    else:
        _show_folder(console, prepared.folder, dataset.content_hash)
    print_line(
        console,
        "[dim]`graft data show` shows its rows, `graft data trace FILE:LINE` what became of a line of the "
        "log[/]",
    )


def count_reasons(drops: "Iterable[Drop]", *, most: int = MOST_REASONS) -> Reasons:
    """Reasons that differ only in the rows and figures that they name count as one."""
    counts = Counter(_name_kind(drop.reason) for drop in islice(drops, MOST_DROPS))
    return Reasons(counts.most_common(most), sum(counts.values()))


def _name_kind(reason: str) -> str:
    for pattern, kind in _KINDS:
        if pattern.search(reason):
            return kind
    return _FIGURE.sub("…", reason.partition("; expected ")[0])


def _show_splits(console: Console, dataset: "Dataset") -> None:
    from graftwork.data.audit.corpus_findings import say_together

    split_by = str(dataset.settings.get("split_by", "question"))
    groups = "question groups" if split_by == "question" else "groups"
    figures = ("rows", groups, "tokens", "trained tokens", "longest row")
    rows = table("split", *figures, right=figures)
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
    if split_by != "question":
        print_line(console, f"[dim]a group: rows that {quote(say_together(split_by))} (data.split_by)[/]")


def _show_reasons(console: Console, folder: Path, dataset: "Dataset") -> None:
    from graftwork.files.dataset_folder import DROPS, iterate_drops

    # A result that is shown again may be of a dataset that was removed since.
    if dataset.drops is None or not dataset.drops.rows or not (folder / DROPS).is_file():
        return
    reasons = count_reasons(iterate_drops(folder))
    among = f", among the first {reasons.rows:,}" if reasons.rows < dataset.drops.rows else ""
    print_line(console, f"left out: {dataset.drops.rows:,} rows; most often{among}")
    for reason, count in reasons.counts:
        print_line(console, f"  {count:,} × {quote(reason)}")


def _show_folder(console: Console, folder: str, content_hash: str, whose: str = "") -> None:
    # A path that is broken in two cannot be copied.
    print_line(console, f"dataset [bold]{content_hash[:12]}[/]{whose} in {quote(folder)}", soft_wrap=True)
