"""Which model gets which rows, as a table and as JSON."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table

if TYPE_CHECKING:
    from graftwork.data.split.model_subsets import SubsetSummary, UnmatchedValue

FIGURES = ("own", "replay", "epoch", "RL", "valid", "test")


def show_portions(
    console: Console, portions: "Sequence[SubsetSummary]", *, unmatched: "Sequence[UnmatchedValue]" = ()
) -> None:
    stages = sorted({stage for portion in portions for stage in portion.stages})
    named = tuple(f"s{stage}" for stage in stages)
    rows = table("model", *FIGURES, *named, right=(*FIGURES, *named))
    rows.columns[0].no_wrap = True
    for portion in portions:
        rows.add_row(
            quote(portion.model),
            f"{portion.own:,}",
            f"{portion.replayed:,}",
            f"{portion.rows_an_epoch:,.0f}",
            f"{portion.rl:,}",
            f"{portion.validation:,}",
            f"{portion.test:,}",
            *(f"{portion.stages.get(stage, 0):,}" for stage in stages),
        )
    console.print(rows)
    print_line(
        console,
        "[dim]own and replay: different training rows; epoch: rows an epoch, by their weights; "
        "RL: prompts set apart; s1 …: training rows of a stage[/]",
    )
    for key, value in unmatched:
        print_line(console, f"[yellow]![/] {quote(key)}: no kept row has {quote(repr(value))}")


def portions_as_json(
    portions: "Sequence[SubsetSummary]", *, unmatched: "Sequence[UnmatchedValue]" = ()
) -> dict[str, Any]:
    return {
        "portions": [portion.model_dump(mode="json") for portion in portions],
        "unmatched": [{"key": key, "value": value} for key, value in unmatched],
    }
