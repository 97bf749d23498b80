"""What an audit shows beside its findings: lengths, groups, models, examples to read.

In: facts. Out: counts over columns, and a few rows. The examples are chosen by the hash of their
content: the same rows every time, and none of them picked to please.
"""

from typing import TYPE_CHECKING, Any, Literal

from graftwork.data.rules.facts import PROMPT_PRINT, REPLY_PRINT, Facts
from graftwork.records.audit import LengthHistogram, LengthSummary, ReadableRow
from graftwork.records.interaction import Interaction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Ten buckets to each power of ten, at round numbers, up to ten million characters.
LENGTH_EDGES: tuple[int, ...] = (
    0,
    *(int(step * 10**power) for power in range(1, 7) for step in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)),
    10_000_000,
)
MOST_GROUPS_DRAWN = 3
EXAMPLES = 12
MOST_CHARACTERS = 600


def count_labels(facts: Facts, label: str, *, among: "NDArray[np.bool_] | None" = None) -> dict[str, int]:
    """The most frequent first."""
    import numpy as np

    numbers, names = facts.labels(label)
    chosen = numbers >= 0 if among is None else (numbers >= 0) & among
    counts = np.bincount(numbers[chosen], minlength=len(names))
    found: dict[str, int] = {}
    for name, count in zip(names, counts, strict=True):
        if count:
            # Names that were told apart by a secret in them are one when it is taken out.
            found[name] = found.get(name, 0) + int(count)
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def summarise_lengths(lengths: "NDArray[Any]") -> LengthSummary:
    import numpy as np

    if not len(lengths):
        return LengthSummary(smallest=0, median=0, p95=0, largest=0)
    ordered = np.sort(lengths)
    return LengthSummary(
        smallest=int(ordered[0]),
        median=int(np.median(ordered)),
        p95=int(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]),
        largest=int(ordered[-1]),
    )


def draw_histograms(facts: Facts) -> tuple[LengthHistogram, ...]:
    """Prompts and replies: of all rows, then of the largest groups."""
    numbers, names = facts.labels("group")
    largest = list(count_labels(facts, "group"))[:MOST_GROUPS_DRAWN]
    made = []
    columns: tuple[tuple[Literal["prompt", "reply"], str], ...] = (
        ("prompt", "prompt_chars"),
        ("reply", "reply_chars"),
    )
    for of, column in columns:
        lengths = facts.corpus.column(column)
        made.append(LengthHistogram(of=of, counts=_count(lengths)))
        made += [
            LengthHistogram(of=of, group=name, counts=_count(lengths[numbers == names.index(name)]))
            for name in largest
        ]
    return tuple(made)


def choose_examples(facts: Facts) -> tuple[ReadableRow, ...]:
    import numpy as np

    usable = np.flatnonzero(facts.usable)
    prints = facts.prints(PROMPT_PRINT)[usable] ^ facts.prints(REPLY_PRINT)[usable]
    # An odd factor spreads prints that begin alike.
    mixed = prints.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    chosen = usable[np.argsort(mixed, kind="stable")[:EXAMPLES]]
    rows = facts.read(chosen)
    return tuple(show_row(rows[place]) for place in sorted(rows))


def show_row(row: Interaction, *, most: int = MOST_CHARACTERS) -> ReadableRow:
    return ReadableRow(
        origin=row.origin,
        question=shorten(row.question, most),
        reply=shorten(row.reply, most),
        group=row.group,
        model=row.model,
    )


def shorten(text: str, most: int) -> str:
    """The beginning and the end: sources stand before a question, and a cut shows at the end."""
    bare = text.strip()
    if len(bare) <= most:
        return bare
    head = most * 2 // 3
    return f"{bare[:head].rstrip()}\n[…]\n{bare[-(most - head) :].lstrip()}"


def _count(lengths: "NDArray[Any]") -> tuple[int, ...]:
    import numpy as np

    places = np.searchsorted(np.array(LENGTH_EDGES), lengths, side="right") - 1
    return tuple(int(count) for count in np.bincount(places, minlength=len(LENGTH_EDGES)))
