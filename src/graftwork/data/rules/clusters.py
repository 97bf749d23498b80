"""The largest clusters of rows that repeat or contradict each other, to be read side by side."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.data.rules.facts import DUPLICATE, NEAR_DUPLICATE, PROMPT_PRINT, REPLY_PRINT, Facts
from graftwork.data.rules.repeats import find_conflicting
from graftwork.data.rules.summary import show_row
from graftwork.records.audit import Cluster, ClusterKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_CLUSTERS = 50
MOST_ROWS = 20
MOST_SHOWN = 4
MOST_CHARACTERS = 400


class _Found(NamedTuple):
    kind: ClusterKind
    size: int
    places: list[int]
    shown: list[int]


def find_clusters(facts: Facts) -> tuple[Cluster, ...]:
    """The largest first; those that contradict themselves before those that only repeat."""
    weight = {"conflicting_answers": 0, "near_duplicate": 1, "duplicate": 2}
    found = [
        *_cluster_conflicts(facts),
        *_find_repeated(facts, "duplicate", DUPLICATE),
        *_find_repeated(facts, "near_duplicate", NEAR_DUPLICATE),
    ]
    found.sort(key=lambda cluster: (-cluster.size, weight[cluster.kind], cluster.places[0]))
    chosen = sorted(found[:MOST_CLUSTERS], key=lambda cluster: weight[cluster.kind])
    rows = facts.read(place for cluster in chosen for place in cluster.shown)
    return tuple(
        Cluster(
            kind=cluster.kind,
            size=cluster.size,
            rows=facts.origins(cluster.places),
            shown=tuple(show_row(rows[place], most=MOST_CHARACTERS) for place in cluster.shown),
        )
        for cluster in chosen
    )


def _find_repeated(facts: Facts, kind: ClusterKind, step: int) -> Iterator[_Found]:
    """A row that stays, and the rows that go for it."""
    import numpy as np

    gone = np.flatnonzero((facts.repeats.step == step) & (facts.repeats.instead >= 0))
    for members in _largest_runs(gone, facts.repeats.instead[gone]):
        kept = int(facts.repeats.instead[members[0]])
        places = [kept, *map(int, members[: MOST_ROWS - 1])]
        # Rows that are the same need to be read once.
        shown = places[:1] if kind == "duplicate" else places[:MOST_SHOWN]
        yield _Found(kind, len(members) + 1, places, shown)


def _cluster_conflicts(facts: Facts) -> Iterator[_Found]:
    import numpy as np

    places = find_conflicting(facts, facts.prints(PROMPT_PRINT) != 0)
    replies = facts.prints(REPLY_PRINT)
    for members in _largest_runs(places, facts.prints(PROMPT_PRINT)[places]):
        _, first = np.unique(replies[members], return_index=True)
        shown = [int(members[at]) for at in sorted(first)[:MOST_SHOWN]]
        yield _Found("conflicting_answers", len(members), [int(p) for p in members[:MOST_ROWS]], shown)


def _largest_runs(places: "NDArray[Any]", keys: "NDArray[Any]") -> "Iterator[NDArray[Any]]":
    """Places that share a key, for the keys that most share."""
    import numpy as np

    order = np.argsort(keys, kind="stable")
    _, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
    for run in np.argsort(-counts, kind="stable")[:MOST_CLUSTERS]:
        yield places[order[starts[run] : starts[run] + counts[run]]]
