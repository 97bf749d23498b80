"""How many rows a step takes and how many steps a run has, as the trainers count them. Pure."""

import math
from typing import NamedTuple

from graftwork.plan.lint.facts import Configuration


class Steps(NamedTuple):
    epoch: int | None
    """None where only the number of steps is given."""
    total: int


def effective_batch(said: Configuration) -> int | None:
    """Rows of one optimizer step; cards that nobody named count as one."""
    if said.kind == "graft":
        return said.batch
    if said.micro_batch is not None:
        return said.micro_batch * (said.accumulation or 1) * (said.cards or 1)
    return said.batch


def count_steps(said: Configuration) -> Steps | None:
    """As transformers counts: batches a card first, then those that make an update, the last one smaller."""
    epoch = _epoch_steps(said)
    if said.max_steps is not None and said.max_steps > 0:
        return Steps(epoch, said.max_steps)
    if epoch is None or said.epochs is None:
        return None
    return Steps(epoch, math.ceil(epoch * said.epochs))


def warmup_of(said: Configuration, total: int) -> int | None:
    if said.warmup_steps is not None:
        return said.warmup_steps
    return math.ceil(said.warmup_share * total) if said.warmup_share is not None else None


def interval_of(when: str | None, steps: int | None) -> int | None:
    """Steps between two events, where they are counted in steps."""
    return steps if when in (None, "steps") else None


def _epoch_steps(said: Configuration) -> int | None:
    batch = effective_batch(said)
    if said.rows is None or not batch:
        return None
    if said.micro_batch is None:
        return math.ceil(said.rows / batch)
    batches = math.ceil(said.rows / (said.micro_batch * (said.cards or 1)))
    return max(math.ceil(batches / (said.accumulation or 1)), 1)
