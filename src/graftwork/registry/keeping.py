"""Which releases stay when garbage is collected, and why. Pure.

In: what the index says of all releases, what aliases and servers need, and the project's rules. Out: a
reason for each release that stays. What is not named may go.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from graftwork.records.release import ReleaseEntry

PINNED = "keep"
"""A release with this tag stays until the tag is taken off."""


def choose_kept(
    entries: Iterable[ReleaseEntry],
    *,
    needed: Collection[str],
    leased: Collection[str],
    keep_last: int,
    young_since: str,
) -> dict[str, str]:
    """Id to reason, for `entries` from the newest to the oldest. `young_since` is a time in ISO form."""
    kept: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for entry in entries:
        if entry.id in needed:
            kept[entry.id] = "an alias points at it, or can be rolled back to it"
        elif entry.id in leased:
            kept[entry.id] = "a running server holds it"
        elif entry.collected_at is not None:
            # Somebody began to take it away and was stopped.
            continue
        elif PINNED in entry.tags:
            kept[entry.id] = f"it is tagged {PINNED}"
        elif counted[entry.model] < keep_last:
            kept[entry.id] = f"it is among the {keep_last} newest of {entry.model}"
        elif entry.created_at >= young_since:
            kept[entry.id] = "it is young"
        counted[entry.model] += 1
    return kept
