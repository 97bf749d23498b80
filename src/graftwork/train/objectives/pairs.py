"""Pairs of a chosen and a rejected reply: made from rows, checked, ordered into steps.

Input: rows with a `rejected` reply, a way to render it. Output: samples in pairs, what was left out, and the
pairs of each step.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.text.words import normalize
from graftwork.train.objectives.epochs import PlannedOrder, plan_batches
from graftwork.train.objectives.samples import TrainingSample, make_sample, scale_pairs
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.model.chat.template import ChatTemplate

Render = Callable[[Row, str], tuple[tuple[int, ...], int]]
"""Tokens of the row's prompt with another reply, and where the reply begins."""
ONE_SIDED = 0.9
"""Share of pairs of which the same side is longer: then length is the easiest thing to learn."""
FEW_PAIRS = 20


def render_with(template: "ChatTemplate") -> Render:
    """Renders another reply to a row's prompt, as the dataset was rendered."""

    def render(row: Row, reply: str) -> tuple[tuple[int, ...], int]:
        rendered = template.render(row.messages, reply)
        return tuple(rendered.tokens), rendered.trained_from

    return render


class ReplyPair(NamedTuple):
    chosen: TrainingSample
    rejected: TrainingSample


LEFT_OUT = {
    "without": "without a rejected reply",
    "same": "with two equal replies",
    "repeated": "repeated",
    "reversed": "that contradict another pair",
    "unrendered": "whose rejected reply the chat template changes",
    "too_long": "whose rejected reply is longer than every row",
}
"""Why rows with two replies are not pairs. Contradicting pairs are both left out, of repeated ones one is
kept; rows longer than every other were not counted by the plan.
"""


def make_pairs(rows: Sequence[Row], render: Render) -> tuple[list[ReplyPair], Counter[str]]:
    """The pairs that are trained on, and how many rows are left out for each reason of LEFT_OUT."""
    from graftwork.model.chat.renderer import CannotProve

    texts = []
    for row in rows:
        prompt = "\0".join(f"{message.role}:{message.content}" for message in row.messages)
        texts.append((prompt, normalize(row.reply), normalize(row.rejected or "")))
    # Rows were cut to `data.max_tokens`; a rejected reply beyond the longest of them was not planned for.
    longest = max((len(row.tokens) for row in rows), default=0)
    occurrences = Counter(text for row, text in zip(rows, texts, strict=True) if row.rejected)
    pairs: list[ReplyPair] = []
    distinct: set[tuple[str, str, str]] = set()
    left_out: Counter[str] = Counter()
    for row, text in zip(rows, texts, strict=True):
        prompt, reply, rejected = text
        if not row.rejected:
            left_out["without"] += 1
        elif reply == rejected:
            left_out["same"] += 1
        elif (prompt, rejected, reply) in occurrences:
            left_out["reversed"] += 1
        elif text in distinct:
            left_out["repeated"] += 1
        else:
            distinct.add(text)
            try:
                tokens, start = render(row, row.rejected)
            except CannotProve:
                left_out["unrendered"] += 1
                continue
            if len(tokens) > longest:
                left_out["too_long"] += 1
                continue
            pairs.append(
                ReplyPair(
                    make_sample(row, unit=row.id, part="chosen"),
                    make_sample(row, unit=row.id, part="rejected", tokens=tokens, trained_from=start),
                )
            )
    return pairs, left_out


def describe_pairs(pairs: Sequence[ReplyPair], left_out: Mapping[str, int]) -> list[str]:
    """Describe what users should know before training on them."""
    lengths = [[len(row.tokens) - row.trained_from for row in pair] for pair in pairs]
    chosen_tokens, rejected = (median([length[column] for length in lengths] or [0]) for column in (0, 1))
    notes = [f"{len(pairs)} pairs; median tokens: chosen {chosen_tokens:g}, rejected {rejected:g}"]
    notes += [f"{left_out[key]} rows {why} are left out" for key, why in LEFT_OUT.items() if left_out[key]]
    longer = {"chosen": sum(a > b for a, b in lengths), "rejected": sum(a < b for a, b in lengths)}
    notes += [
        f"in nearly all pairs the {side} reply is longer: the model may learn length alone"
        for side, count in longer.items()
        if count / max(len(pairs), 1) >= ONE_SIDED
    ]
    if len(pairs) < FEW_PAIRS:
        notes.append(f"fewer than {FEW_PAIRS} pairs: expect noise")
    return notes


def require_pairs(pairs: int, *, rows: int) -> None:
    if pairs == 0:
        raise UserError(
            "no training row has a rejected reply that differs from its reply",
            why=f"the objective compares two replies to one prompt, and none of the {rows} rows has two",
            fix="add logs whose rows have `prompt`, `chosen` and `rejected`, or corrected answers; or set "
            "`objective: sft`",
            where="train.objective",
        )


class PairOrder(PlannedOrder):
    """The batch source of preferences: `batch_size` pairs per step, in the order of epochs."""

    def __init__(self, pairs: Sequence[ReplyPair], *, settings: TrainSettings) -> None:
        steps = plan_batches(
            tuple(max(len(row.tokens) for row in pair) for pair in pairs),
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            seed=settings.seed,
            stages=[pair.chosen.stage for pair in pairs],
            weights=[pair.chosen.weight for pair in pairs],
        )
        super().__init__(steps, rows_each=2)
        self._pairs = pairs

    def batch(self, step: int) -> list[TrainingSample]:
        # A pair of weight 2 can be in a step twice: its rows differ by their unit.
        pairs = [
            ReplyPair(
                *(row.model_copy(update={"unit": f"{row.unit}/{position}"}) for row in self._pairs[index])
            )
            for position, index in enumerate(self._steps[step - 1])
        ]
        return scale_pairs(pairs)

    def peek(self, step: int) -> Sequence[Row]:
        return self.batch(step)

    def mark(self, number: int) -> object:
        return [row.tokens for row in self._pairs[number]]
