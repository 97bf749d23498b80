"""Which model gets which rows, as a table and as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from graftwork.cli.show.tables import table

if TYPE_CHECKING:
    from graftwork.data.portions import PortionSummary, Unmatched

FIGURES = ("own rows", "replayed", "rows an epoch", "for RL", "validation", "test")


def show_portions(
    console: Console, portions: "Sequence[PortionSummary]", *, unmatched: "Sequence[Unmatched]" = ()
) -> None:
    rows = table("model", *FIGURES, "training rows by stage", right=FIGURES)
    for portion in portions:
        rows.add_row(
            escape(portion.model),
            f"{portion.own:,}",
            f"{portion.replayed:,}",
            f"{portion.rows_an_epoch:,.0f}",
            f"{portion.rl:,}",
            f"{portion.validation:,}",
            f"{portion.test:,}",
            _name_stages(portion),
        )
    console.print(rows)
    for key, value in unmatched:
        console.print(f"[yellow]![/] {escape(key)}: no kept row has {escape(value)!r}", highlight=False)


def portions_as_json(
    portions: "Sequence[PortionSummary]", *, unmatched: "Sequence[Unmatched]" = ()
) -> dict[str, Any]:
    return {
        "portions": [portion.model_dump(mode="json") for portion in portions],
        "unmatched": [{"key": key, "value": value} for key, value in unmatched],
    }


def _name_stages(portion: "PortionSummary") -> str:
    parts = [f"{stage}: {rows:,}" for stage, rows in sorted(portion.stages.items())]
    if parts and portion.without_stage:
        parts.append(f"none: {portion.without_stage:,}")
    return "  ".join(parts) or "—"
