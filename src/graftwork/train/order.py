"""Which rows are trained on in which step: decided by lengths and seed alone, before the run.

Rows of like length share a batch, so that little is padded; the batches of an epoch are shuffled.
Pure: no clock, no state. A resumed run asks again and gets the same answer.
"""

import random


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
