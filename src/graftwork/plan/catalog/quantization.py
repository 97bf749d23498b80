"""What frozen weights in fewer bits cost and gain in training, as measured: a table with sources and dates.

In: the form of the weights. Out: the trade in a sentence. Needs no torch.
"""

from functools import cache

from graftwork.plan.catalog.table import SOURCE, ColumnParsers, read_table, text

COLUMNS = ColumnParsers(
    needed={
        "form": text,
        "speed_change": text,
        "speed_measured_on": text,
        "loss_change": text,
        "loss_measured_on": text,
        **SOURCE,
    },
    optional={"note": text},
    key=("form",),
)
NAMES = {"eight": "8 bits", "four": "4 bits (NF4)"}
SWITCHES = {"eight": "`train.fp8: off` keeps 16 bits", "four": "`train.method: lora` keeps 16 bits"}


@cache
def describe_trade(form: str) -> str:
    """Against frozen weights in bfloat16: the change of tokens a second and of the loss after training."""
    row = next(row for row in read_table("quantization", COLUMNS) if row.text("form") == form)
    speed, loss = float(row.text("speed_change")), float(row.text("loss_change"))
    return (
        f"{NAMES[form]}: {speed:+.0%} speed ({row.text('speed_measured_on')}), about {loss:+.0%} "
        f"loss ({row.text('loss_measured_on')}), measured {row.text('dated')}; {SWITCHES[form]}"
    )
