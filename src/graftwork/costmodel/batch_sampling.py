"""Sampling answers of models that remember windows or states, which slots do not fit. Pure.

In: a shape and the answers of a batch. Out: bytes and seconds of the static batches in which they are written
(`model/generate/static.py`). A processor answers one prompt at a time. A card answers all prompts that are
asked together, and reads each of them once for every answer; its passes are not recorded.
"""

from graftwork.costmodel.rates import StepRates
from graftwork.model.generate.memory import MOST_ROWS
from graftwork.model.shape import layer_parameters
from graftwork.records.plan import ModelShape, RolloutLoad

LAUNCHED_SECONDS_A_BLOCK = 2.6e-3
"""Of a pass whose kernels Python launches, with adapters. At least: three steps of 512 passes through the 30
blocks of SmolLM2 took more than 120 s on an H200."""


def batch_rows(load: RolloutLoad, *, card: bool) -> int:
    """Rows of one batch."""
    return min(load.rows_at_once if card else load.answers, MOST_ROWS)


def count_batches(load: RolloutLoad, *, card: bool) -> int:
    """Batches of a step, one after the other."""
    if not card:
        return load.prompts * -(-load.answers // MOST_ROWS)
    rounds, rest = divmod(load.rows, load.rows_at_once)
    return rounds * -(-load.rows_at_once // MOST_ROWS) + -(-rest // MOST_ROWS)


def remembered_bytes(shape: ModelShape, load: RolloutLoad, *, rows: int, width: float, card: bool) -> float:
    """Keys, values and states of a batch when its answers have their full length.

    A prompt that is read by each row stays whole until the first token is written; one that is read once is
    cut to the windows when it is copied.
    """
    position = 2.0 * shape.kv_heads * shape.head_dim * width * rows
    final, read = load.longest + load.max_tokens - 1, load.longest if card else 0
    kept = [min(final, size) if size else final for size in shape.remembered]
    # A layer's keys are copied for each token: both are there for a moment.
    return position * (sum(max(held, read) for held in kept) + max(kept) / 2)


def card_batch_seconds(
    shape: ModelShape, load: RolloutLoad, *, rates: StepRates, weight_bytes: float
) -> dict[str, float]:
    """Of one step, without rewards."""
    weights = float(shape.layers * layer_parameters(shape))
    rows = batch_rows(load, card=True)
    length = load.longest + load.max_tokens
    seen = sum(min(length, size) if size else length for size in shape.remembered) / len(shape.remembered)
    cache = 2.0 * shape.layers * shape.kv_heads * shape.head_dim * 2.0 * seen * rows
    table = shape.vocab_size * shape.hidden_size * 2.0
    reading = (weights * weight_bytes + table + cache) / rates.bandwidth
    passing = shape.layers * LAUNCHED_SECONDS_A_BLOCK + max(reading, rows * 2.0 * weights / rates.half)
    return {
        "reading prompts": load.rows * load.prompt_tokens * 2.0 * weights / rates.half,
        "generation": count_batches(load, card=True) * load.max_tokens * passing,
    }
