"""Nothing is left to train on."""

from collections.abc import Iterator
from itertools import islice

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import make_finding
from graftwork.data.rules.gather import MOST_ROWS
from graftwork.records.audit import Finding


def find(facts: Facts) -> Iterator[Finding]:
    if facts.usable.any():
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
