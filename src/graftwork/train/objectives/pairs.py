"""Pairs of a chosen and a rejected reply: made from rows, checked, ordered into steps.

In: rows with a `rejected` reply, a way to render it. Out: samples in pairs, what was left out, and the
pairs of each step.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.text.words import normalise
from graftwork.train.objectives.epochs import PlannedOrder, plan_batches
from graftwork.train.objectives.samples import TrainingSample, make_sample, scale_pairs
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.model.chat.template import ChatTemplate

Render = Callable[[Row, str], tuple[tuple[int, ...], int]]
"""Tokens of the row's prompt with another reply, and where the reply begins."""
ONE_SIDED = 0.9
"""A share of pairs of which the same side is longer: then length is the easiest thing to learn."""
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


@dataclass(frozen=True)
class PairAudit:
    """What was found in the rows with a rejected reply."""

    pairs: int
    without: int = 0
    """Rows without a rejected reply; they are not trained on."""
    same: int = 0
    """Pairs whose replies are the same text; left out."""
    repeated: int = 0
    """Pairs that occur more than once; kept once."""
    reversed: int = 0
    """Pairs that occur in the opposite order too; both are left out."""
    unrendered: int = 0
    """Pairs whose rejected reply does not survive the chat template; left out."""
    too_long: int = 0
    """Pairs whose rejected reply is longer than every row, which the plan does not count; left out."""
    chosen_longer: float = 0.0
    """Share of pairs whose chosen reply has more tokens."""
    rejected_longer: float = 0.0
    chosen_tokens: float = 0.0
    rejected_tokens: float = 0.0

    def notes(self) -> list[str]:
        """What a reader should know before training on them."""
        lengths = f"chosen {self.chosen_tokens:g}, rejected {self.rejected_tokens:g}"
        found = [f"{self.pairs} pairs; median tokens: {lengths}"]
        left_out = {
            "without a rejected reply": self.without,
            "with two equal replies": self.same,
            "repeated": self.repeated,
            "that contradict another pair": self.reversed,
            "whose rejected reply the chat template changes": self.unrendered,
            "whose rejected reply is longer than every row": self.too_long,
        }
        found += [f"{count} rows {why} are left out" for why, count in left_out.items() if count]
        if max(self.chosen_longer, self.rejected_longer) >= ONE_SIDED:
            longer = "chosen" if self.chosen_longer >= ONE_SIDED else "rejected"
            found.append(
                f"in nearly all pairs the {longer} reply is longer: the model may learn length alone"
            )
        if self.pairs < FEW_PAIRS:
            found.append(f"fewer than {FEW_PAIRS} pairs: expect noise")
        return found


def make_pairs(rows: Sequence[Row], render: Render) -> tuple[list[ReplyPair], PairAudit]:
    """The pairs that are trained on, and what was left out."""
    from graftwork.model.chat.renderer import CannotProve

    texts = []
    for row in rows:
        prompt = "\0".join(f"{message.role}:{message.content}" for message in row.messages)
        texts.append((prompt, normalise(row.reply), normalise(row.rejected or "")))
    # Rows were cut to `data.max_tokens`; a rejected reply beyond the longest of them was not planned for.
    longest = max((len(row.tokens) for row in rows), default=0)
    given = Counter(text for row, text in zip(rows, texts, strict=True) if row.rejected)
    pairs: list[ReplyPair] = []
    seen: set[tuple[str, str, str]] = set()
    counts: Counter[str] = Counter()
    for row, text in zip(rows, texts, strict=True):
        prompt, chosen, rejected = text
        if not row.rejected:
            counts["without"] += 1
        elif chosen == rejected:
            counts["same"] += 1
        elif (prompt, rejected, chosen) in given:
            counts["reversed"] += 1
        elif text in seen:
            counts["repeated"] += 1
        else:
            seen.add(text)
            try:
                tokens, start = render(row, row.rejected)
            except CannotProve:
                counts["unrendered"] += 1
                continue
            if len(tokens) > longest:
                counts["too_long"] += 1
                continue
            pairs.append(
                ReplyPair(
                    make_sample(row, unit=row.id, part="chosen"),
                    make_sample(row, unit=row.id, part="rejected", tokens=tokens, trained_from=start),
                )
            )
    lengths = [[len(row.tokens) - row.trained_from for row in pair] for pair in pairs]
    audit = PairAudit(
        pairs=len(pairs),
        **counts,
        chosen_longer=sum(a > b for a, b in lengths) / max(len(lengths), 1),
        rejected_longer=sum(a < b for a, b in lengths) / max(len(lengths), 1),
        chosen_tokens=median([a for a, _ in lengths] or [0]),
        rejected_tokens=median([b for _, b in lengths] or [0]),
    )
    return pairs, audit


def require_pairs(pairs: int, *, rows: int) -> None:
    if pairs == 0:
        raise UserMistake(
            "no training row has a rejected reply that differs from its reply",
            why=f"the objective compares two replies to one prompt, and none of the {rows} rows has two",
            fix="bring logs whose rows have `prompt`, `chosen` and `rejected`, or corrected answers; or set "
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
        chosen = [
            ReplyPair(*(row.model_copy(update={"unit": f"{row.unit}/{place}"}) for row in self._pairs[at]))
            for place, at in enumerate(self._steps[step - 1])
        ]
        return scale_pairs(chosen)

    def peek(self, step: int) -> Sequence[Row]:
        return self.batch(step)

    def mark(self, number: int) -> object:
        return [row.tokens for row in self._pairs[number]]
