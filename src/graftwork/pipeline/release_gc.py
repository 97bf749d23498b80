"""Collects the releases that nobody needs any more.

In: an open project and how much to keep. Out: what was taken away, or would be. What an alias points at or
can be rolled back to, what a running server holds and what is being written stays; so does what the index
does not know. Of that, what verifies is entered in the index, for an index can be lost.
"""

from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.release_store import open_store
from graftwork.records.errors import GraftError
from graftwork.records.release import Garbage, Release
from graftwork.registry.keeping import choose_kept
from graftwork.registry.promote import needed
from graftwork.registry.store import Stock

DOUBTFUL = "it cannot be found out whether a server holds it"
HELD_LATE = "a server came to hold it while garbage was collected"


def collect_garbage(
    work: OpenProject, *, dry_run: bool = False, keep_last: int | None = None, keep_days: int | None = None
) -> Garbage:
    """Take away what the project's rules, or the given ones, do not keep."""
    rules = work.settings.release
    days = rules.keep_days if keep_days is None else keep_days
    young_since = (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")
    reasons: dict[str, str] = {}
    adopted: list[str] = []
    refused: list[str] = []

    def in_use(stock: Stock) -> set[str]:
        found = _find_unknown(work, stock)
        adopted.extend(release.id for release in found.whole)
        refused.extend(found.refused)
        if not dry_run:
            for release in found.whole:
                work.releases.add(release)
        entries = work.releases.entries()
        reasons.update(
            choose_kept(
                entries,
                needed=needed(work.releases.alias_logs().values()),
                leased=stock.leased,
                keep_last=rules.keep_last if keep_last is None else keep_last,
                young_since=young_since,
            )
        )
        reasons.update({one: DOUBTFUL for one in stock.doubtful if one not in reasons})
        known = {entry.id for entry in entries}
        doomed = {one for one in stock.ids if one in known and one not in reasons}
        if not dry_run:
            # From here on no alias can be moved to them; one that was moved meanwhile spares its release.
            doomed = set(work.releases.collect(doomed, when=timestamp()))
        return set(stock.ids) - doomed

    def stays(there: frozenset[str]) -> None:
        for entry in work.releases.entries():
            if entry.collected_at is not None and entry.id in there:
                # Marked above or by a collection that was killed, and held since.
                work.releases.add(work.releases.get(entry.id))
                reasons.setdefault(entry.id, HELD_LATE)

    found = open_store(work).collect_garbage(in_use, dry_run=dry_run, stays=stays)
    return found.model_copy(
        update={"adopted": tuple(adopted), "refused": tuple(refused), "why_kept": reasons}
    )


class _Unknown(NamedTuple):
    """What lies in the store and is not in the index: whole releases, and the ids of what does not verify."""

    whole: list[Release]
    refused: list[str]


def _find_unknown(work: OpenProject, stock: Stock) -> _Unknown:
    """The index is a new one, or a killed writer left a release; what is not whole was never let in.

    Every byte is read: one that counts among the newest may cost an older one its place.
    """
    store, found = open_store(work), _Unknown([], [])
    known = {entry.id for entry in work.releases.entries()}
    for release_id in stock.ids:
        if release_id in known:
            continue
        try:
            release = store.verify_unsigned(release_id)
        except GraftError:
            found.refused.append(release_id)
        else:
            if release.project == work.settings.project:
                found.whole.append(release)
    return found
