"""Which rows are trained on in which step: decided by lengths and seed alone, before the run.

Rows of like length share a batch, so that little is padded; the batches of an epoch are shuffled.
Pure: no clock, no state. A resumed run asks again and gets the same answer.
"""

import random
from collections.abc import Sequence

from graftwork.records.dataset import Row

WORTH_SHARING = 8
"""A shorter common beginning costs more in bookkeeping than it saves."""


def plan_batches(
    lengths: tuple[int, ...], *, batch_rows: int, epochs: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """The row numbers of each step, over all epochs. Every row stands once in every epoch."""
    steps: list[tuple[int, ...]] = []
    for epoch in range(epochs):
        chance = random.Random(f"{seed}/{epoch}")
        rows = list(range(len(lengths)))
        chance.shuffle(rows)
        # Sorting is stable: rows of the same length stay shuffled among themselves.
        rows.sort(key=lambda row: lengths[row])
        batches = [tuple(rows[at : at + batch_rows]) for at in range(0, len(rows), batch_rows)]
        chance.shuffle(batches)
        steps.extend(batches)
    return tuple(steps)


def choose_rows(count: int, *, most: int | None, seed: int) -> tuple[int, ...]:
    """All rows, or as many of them as the budget allows, in their order."""
    if most is None or count <= most:
        return tuple(range(count))
    return tuple(sorted(random.Random(f"{seed}/rows").sample(range(count), most)))


def shared_tokens(rows: Sequence[Row]) -> int:
    """How many first tokens all rows have in common, short of the first that predicts a reply."""
    limit = min(row.trained_from for row in rows) - 1
    first = rows[0].tokens
    count = next(
        (at for at in range(limit) if any(row.tokens[at] != first[at] for row in rows)), max(limit, 0)
    )
    return count if count >= WORTH_SHARING and len(rows) > 1 else 0
