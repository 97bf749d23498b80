"""Captured replies that only a model stands behind."""

from collections.abc import Iterator

from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_placed
from graftwork.records.audit import Finding


def find_unconfirmed_captures(facts: Facts) -> Iterator[Finding]:
    import numpy as np

    places = np.flatnonzero((facts.corpus.column("unconfirmed") != 0) & facts.usable)
    if not len(places):
        return
    yield find_placed(
        facts,
        "unconfirmed_captures",
        "info",
        places,
        show=lambda row, _place: row.question,
        title=count_rows(len(places), "hold a served reply that nobody confirmed"),
        effect="they may be trained on; none is a reference for a test, or the model would grade itself",
        fix="send corrections to /v1/feedback, or set data.captures.positive_confirms; "
        "data.captures.feedback: positive leaves them out",
    )
