"""Groups too small to learn from, and rows that drown the others."""

from collections.abc import Iterator

from graftwork.data.rules.facts import REPLY_PRINT, Facts
from graftwork.data.rules.finding import count_rows, find_placed
from graftwork.records.audit import Finding

RARE = 10
LARGEST_SHARE = 0.5
SAME_REPLY_SHARE = 0.25
# Below this many rows every share is chance.
ENOUGH_ROWS = 20
MOST_NAMED = 8
KINDS = {"group": "roles", "domain": "domains"}


def find_imbalance(facts: Facts) -> Iterator[Finding]:
    for label, kind in KINDS.items():
        yield from _find_rare(facts, label, kind)
        yield from _find_dominant(facts, label)
    yield from _find_same_reply(facts)


def _find_rare(facts: Facts, label: str, kind: str) -> Iterator[Finding]:
    import numpy as np

    numbers, names = facts.labels(label)
    usable = np.bincount(numbers[facts.usable & (numbers >= 0)], minlength=len(names))
    logged = np.bincount(numbers[numbers >= 0], minlength=len(names))
    rare = np.flatnonzero((usable < RARE) & (logged > 0))
    places = np.flatnonzero(np.isin(numbers, rare))
    if np.count_nonzero(logged) < 2 or not len(places):
        return
    ordered = sorted(rare, key=lambda number: names[number])
    named = ", ".join(
        f"{names[number]} {usable[number]} of {logged[number]}" for number in ordered[:MOST_NAMED]
    )
    more = f" and {len(rare) - MOST_NAMED} more" if len(rare) > MOST_NAMED else ""
    yield find_placed(
        facts,
        "rare_group",
        "warning",
        places,
        show=lambda row, place: f"{names[numbers[place]]}: {row.question}",
        reasons={names[number]: int(usable[number]) for number in ordered[:40]},
        title=count_rows(len(places), "belong")
        + f" to {kind} with fewer than {RARE} usable rows ({named}{more})",
        effect="too few to learn from, and too few to hold some out and measure",
        fix="log more of them, or leave them out of the files under data.logs",
    )


def _find_dominant(facts: Facts, label: str) -> Iterator[Finding]:
    import numpy as np

    numbers, names = facts.labels(label)
    counts = np.bincount(numbers[facts.usable & (numbers >= 0)], minlength=len(names))
    rows = int(facts.usable.sum())
    if rows < ENOUGH_ROWS or np.count_nonzero(counts) < 2 or counts.max() <= LARGEST_SHARE * rows:
        return
    largest = int(counts.argmax())
    yield find_placed(
        facts,
        "imbalance",
        "info",
        np.flatnonzero(facts.usable & (numbers == largest)),
        show=lambda row, place: row.question,
        title=f"{counts[largest]:,} of {rows:,} usable rows belong to {names[largest]}",
        effect="the model becomes good at this group at the cost of the others",
        fix="log more of the other groups, or look at the figures of each group in the evaluation",
    )


def _find_same_reply(facts: Facts) -> Iterator[Finding]:
    import numpy as np

    usable = np.flatnonzero(facts.usable)
    if len(usable) < ENOUGH_ROWS:
        return
    _, number, counts = np.unique(facts.prints(REPLY_PRINT)[usable], return_inverse=True, return_counts=True)
    most = int(counts.argmax())
    if counts[most] > SAME_REPLY_SHARE * len(usable):
        yield find_placed(
            facts,
            "imbalance",
            "info",
            usable[number == most],
            show=lambda row, place: row.reply,
            title=f"{counts[most]:,} of {len(usable):,} usable rows have the same reply",
            effect="the model may give this reply where another is right",
            fix="check that the evaluation measures both sides: where this reply is right and where not",
        )
