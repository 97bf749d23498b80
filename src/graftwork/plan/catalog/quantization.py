"""What frozen weights in fewer bits cost and gain in training, as measured: a table with sources and dates.

In: the form of the weights. Out: the trade in a sentence. Needs no torch.
"""

from functools import lru_cache

from graftwork.plan.catalog.table import ColumnParsers, read_table
from graftwork.records.base import Record

COLUMNS = ColumnParsers(
    needed=(
        "form",
        "speed_change",
        "speed_measured_on",
        "loss_change",
        "loss_measured_on",
        "source",
        "dated",
    ),
    optional=("note",),
    key=("form",),
)
NAMES = {"eight": "8 bits", "four": "4 bits (NF4)"}
SWITCHES = {"eight": "`train.fp8: off` keeps 16 bits", "four": "`train.method: lora` keeps 16 bits"}


class PrecisionTrade(Record):
    """Against frozen weights in bfloat16: the change of tokens a second and of the loss after training."""

    form: str
    speed_change: float
    speed_measured_on: str
    loss_change: float
    loss_measured_on: str
    source: str
    dated: str


@lru_cache
def precision_trades() -> dict[str, PrecisionTrade]:
    """By form."""
    rows = read_table("quantization", COLUMNS, overlay=None)
    trades = [
        PrecisionTrade.model_validate({name: row.text(name) for name in COLUMNS.needed}) for row in rows
    ]
    return {trade.form: trade for trade in trades}


def describe_trade(form: str) -> str:
    trade = precision_trades()[form]
    return (
        f"{NAMES[form]}: {trade.speed_change:+.0%} speed ({trade.speed_measured_on}), about "
        f"{trade.loss_change:+.0%} loss ({trade.loss_measured_on}), measured {trade.dated}; {SWITCHES[form]}"
    )
