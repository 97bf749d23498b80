"""The learned router as tables."""

from rich.console import Console
from rich.table import Table

from graftwork.records.measured import MeasuredShare
from graftwork.records.router import TrainedRouter


def show_router(console: Console, trained: TrainedRouter) -> None:
    card = trained.card
    table = Table("held-out questions", "share", "95 % interval", "of", box=None)
    for name, share in (
        ("right, likeliest model", card.accuracy),
        ("right where it is sure", card.sure_accuracy),
        (f"unsure, answered by {card.main}", card.unsure),
    ):
        table.add_row(name, f"{share.value:.1%}", _interval(share), str(share.n))
    console.print(table)
    chosen = sorted({name for found in card.confusion.values() for name in found})
    confusion = Table("question of", *chosen, box=None)
    for truth, found in card.confusion.items():
        confusion.add_row(truth, *[str(found.get(name, "·")) for name in chosen])
    console.print(confusion)
    console.print(
        f"threshold {card.threshold:.2f}, chosen on {card.chosen_on} validation questions for "
        f"{card.target:.0%}; calibration error {card.calibration_error:.3f}; "
        f"{trained.milliseconds:.2f} ms a decision",
        highlight=False,
    )
    console.print(f"written to {trained.path}", highlight=False, soft_wrap=True)


def _interval(share: MeasuredShare) -> str:
    return f"{share.low:.1%} to {share.high:.1%}"


PRINTERS = {"TrainedRouter": show_router}
