"""The epoch order of a dataset's rows: which rows are trained in which step, and the learning rate of a step.

In: rows with their lengths, weights and stages, and the settings. Out: the rows of each step. A batch takes
its rows from all lengths, so that no kind of row (short refusals, long reports) fills batches of its own;
within a batch, rows are sorted by length, so that micro-batches pad little. Where rows have stages, lower
stages come first in every epoch, no batch spans two stages, and rows without a stage join the last one.
Pure: depends on the rows and the seed alone, so a resumed run gets the same batches.
"""

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Any

from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.train.settings import TrainSettings

WORTH_SHARING = 8
"""A shorter common prefix costs more in bookkeeping than it saves."""


class EpochOrder:
    """The batch source of supervised fine-tuning."""

    def __init__(self, rows: Sequence[Row], *, settings: TrainSettings) -> None:
        self._rows = rows
        self._batches = plan_steps(rows, settings=settings)

    @property
    def steps(self) -> int:
        return len(self._batches)

    def batch(self, step: int) -> list[Row]:
        return [self._rows[at] for at in self._batches[step - 1]]

    def peek(self, step: int) -> list[Row]:
        return self.batch(step)

    def measures(self, step: int) -> dict[str, float]:
        return {}

    def rows_before(self, step: int) -> int:
        return sum(len(batch) for batch in self._batches[:step])

    def identity(self) -> dict[str, Any]:
        """Which rows, of what length, in which step: another order is another run."""
        digest = hashlib.sha256()
        for batch in self._batches:
            digest.update(repr([(self._rows[at].id, len(self._rows[at].tokens)) for at in batch]).encode())
        return {"steps": self.steps, "order": digest.hexdigest()[:16]}


def plan_steps(rows: Sequence[Row], *, settings: TrainSettings) -> tuple[tuple[int, ...], ...]:
    """The row numbers of each step. The planner calls it too, so what is planned is what is trained."""
    steps = plan_batches(
        tuple(len(row.tokens) for row in rows),
        batch_rows=settings.batch_rows,
        epochs=settings.epochs,
        seed=settings.seed,
        stages=[row.stage for row in rows],
        weights=[row.weight for row in rows],
    )
    if not steps:
        raise UserMistake(
            "no row is in any epoch",
            why=f"the weights of the {len(rows)} training rows leave nothing in {settings.epochs} epochs",
            fix="raise the `weights` of this model under `models:`, or `train.epochs`",
        )
    return steps


def plan_batches(
    lengths: tuple[int, ...],
    *,
    batch_rows: int,
    epochs: int,
    seed: int,
    stages: Sequence[int | None] | None = None,
    weights: Sequence[float] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """The row numbers of each step, over all epochs.

    A row is in an epoch as often as its weight says: once where no weights are given.
    """
    steps: list[tuple[int, ...]] = []
    ranks = _rank_stages(stages) if stages is not None else [0] * len(lengths)
    phases = _draw_phases(weights, seed=seed) if weights is not None else []
    for epoch in range(epochs):
        chance = random.Random(f"{seed}/{epoch}")
        by_stage: list[list[int]] = [[] for _ in range(max(ranks, default=-1) + 1)]
        for row, rank in enumerate(ranks):
            visits = 1 if weights is None else count_visits(weights[row], epoch=epoch, phase=phases[row])
            by_stage[rank].extend([row] * visits)
        for rows in by_stage:
            chance.shuffle(rows)
            # Sorting is stable: rows of the same length stay shuffled among themselves.
            rows.sort(key=lambda row: lengths[row])
            steps.extend(_mix_lengths(rows, batches=-(-len(rows) // batch_rows), chance=chance))
    return tuple(steps)


def _mix_lengths(rows: Sequence[int], *, batches: int, chance: random.Random) -> list[tuple[int, ...]]:
    """Assign sorted rows to batches: each batch gets one row of each band of similar lengths."""
    mixed: list[list[int]] = [[] for _ in range(batches)]
    for first in range(0, len(rows), batches or 1):
        band = rows[first : first + batches]
        for batch, row in zip(chance.sample(range(batches), len(band)), band, strict=True):
            mixed[batch].append(row)
    return [tuple(batch) for batch in mixed]


def count_visits(weight: float, *, epoch: int, phase: float) -> int:
    """How often a row of this weight is in an epoch: 2.0 twice in each, 0.5 in every second one.

    Over the first n epochs it is n × weight, rounded up or down. `phase`, uniform between 0 and 1, decides
    which, so that the expected count is exact in every epoch.
    """
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"a weight is a number of visits, at least 0, not {weight}")
    whole = math.floor(weight)
    part = weight - whole
    return whole + math.floor((epoch + 1) * part + phase) - math.floor(epoch * part + phase)


def choose_training_rows(rows: Sequence[Row], *, settings: TrainSettings) -> list[Row]:
    """The rows of positive weight, at most `train.max_rows` of them."""
    weighted = [row for row in rows if row.weight > 0]
    chosen = choose_rows(len(weighted), most=settings.max_rows, seed=settings.seed)
    return [weighted[at] for at in chosen]


def choose_rows(count: int, *, most: int | None, seed: int) -> tuple[int, ...]:
    """All row numbers, or a sample of `most` of them in order."""
    if most is None or count <= most:
        return tuple(range(count))
    return tuple(sorted(random.Random(f"{seed}/rows").sample(range(count), most)))


def shared_tokens(rows: Sequence[Row]) -> int:
    """The length of the common prefix of all rows, up to the first token that predicts a reply."""
    limit = min(row.trained_from for row in rows) - 1
    first = rows[0].tokens
    count = next(
        (at for at in range(limit) if any(row.tokens[at] != first[at] for row in rows)), max(limit, 0)
    )
    return count if count >= WORTH_SHARING and len(rows) > 1 else 0


def _rank_stages(stages: Sequence[int | None]) -> list[int]:
    """The rank of each row's stage among those that occur; rows without a stage get the last rank."""
    ranks = {stage: rank for rank, stage in enumerate(sorted({s for s in stages if s is not None}))}
    last = max(len(ranks) - 1, 0)
    return [last if stage is None else ranks[stage] for stage in stages]


def _draw_phases(weights: Sequence[float], *, seed: int) -> list[float]:
    """The phase of each row; only fractional weights have one."""
    return [0.0 if weight % 1 == 0 else _uniform(f"{seed}/{row}") for row, weight in enumerate(weights)]


def _uniform(text: str) -> float:
    """A number between 0 and 1 in steps of 2⁻³², so that adding an epoch's share loses nothing."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32


def learning_rate(step: int, *, steps: int, highest: float, warmup_share: float) -> float:
    """Linear warmup, then cosine decay; step 1 … `steps`. Never zero, so that no step is wasted."""
    warmup = round(steps * warmup_share)
    if step <= warmup:
        return highest * step / (warmup + 1)
    gone = (step - warmup - 1) / max(steps - warmup, 1)
    return highest * 0.5 * (1 + math.cos(math.pi * gone))
