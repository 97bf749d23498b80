"""Nothing is left to train on, or nothing to test with."""

from collections.abc import Iterator
from itertools import islice

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import find_placed, make_finding
from graftwork.data.rules.gather import MOST_ROWS
from graftwork.records.audit import Finding
from graftwork.records.dataset import SPLITS

LARGE_GROUP = 30
"""A log of fewer rows that ask alike is small rather than one-sided."""


def find_unusable(facts: Facts) -> Iterator[Finding]:
    if facts.usable.any():
        yield from _find_empty_split(facts)
        return
    readable = facts.corpus.rows
    unreadable = sum(1 for _ in facts.corpus.faults())
    lost = islice(facts.corpus.faults(), max(0, MOST_ROWS - readable))
    yield make_finding(
        "nothing_usable",
        "blocker",
        count=readable + unreadable,
        rows=[*facts.origins(range(min(readable, MOST_ROWS))), *(fault.origin for _, fault in lost)],
        examples=(),
        title="no row is left to train on",
        effect="there is nothing to learn from",
        fix="see the other findings for why the rows went; name other files under data.logs",
    )


def _find_empty_split(facts: Facts) -> Iterator[Finding]:
    """One large group of rows that ask alike, which no split may share, so that another split gets none."""
    import numpy as np

    settings = facts.settings
    shares = {"validation": settings.validation, "test": settings.test}
    splits = facts.dealing.split[facts.usable]
    empty = [
        split
        for number, split in enumerate(SPLITS)
        if shares.get(split, 1.0) > 0 and not (splits == number).any()
    ]
    groups = np.where(facts.usable, facts.dealing.group, -1)
    sizes = np.bincount(groups[groups >= 0], minlength=1)
    largest = int(sizes.argmax())
    if not empty or sizes[largest] < LARGE_GROUP:
        return
    places = np.flatnonzero(groups == largest)
    yield find_placed(
        facts,
        "empty_split",
        "blocker",
        places,
        show=lambda row, _place: row.question,
        title=f"{len(places):,} of {int(facts.usable.sum()):,} usable rows ask alike, and no row is left for "
        f"{' and '.join(empty)}",
        effect="`graft data prepare` keeps rows that ask alike in one split and would refuse this log",
        fix="log more different questions; raise data.question_similarity "
        f"({settings.question_similarity}) if these ask different things; or set the share of a split that "
        "you do not need to 0",
    )
