"""The index of releases and aliases, and which release is live: promote by verdict, roll back, collect.

The log of moves is append-only: a rollback is one more move. The errors are those of every implementation.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from graftwork.records.errors import Busy, NegativeResult, UserError
from graftwork.records.release import AliasMove, Release, ReleaseEntry, ReleaseNote, ReleaseQuery
from graftwork.registry.manifest import ALIAS, VERSION, require_alias, split_alias


class ReleaseIndex(Protocol):
    """The releases of one project and the aliases that point at them."""

    def add(self, release: Release, *, version: str | None = None) -> None:
        """Add a release with the given version, or the next version of its model.

        Adding it again changes nothing, except that it no longer counts as collected.
        """

    def get(self, id_or_prefix: str) -> Release:
        """The release with this id, or the only one whose id starts with it. Raises UserError."""

    def list(self) -> tuple[Release, ...]:
        """All releases with their full manifests, newest first."""

    def entries(self, query: ReleaseQuery = ReleaseQuery()) -> tuple[ReleaseEntry, ...]:  # noqa: B008
        """The matching entries, newest first. The number of statements does not grow with the result."""

    def entry(self, release_id: str) -> ReleaseEntry: ...

    def find_version(self, version: str, *, model: str | None = None) -> str | None:
        """The id of the release with this version; None unless there is exactly one."""

    def set_version(self, release_id: str, version: str) -> None:
        """Change the version of a release. Raises UserError if another release has it."""

    def tag(self, release_id: str, tags: Collection[str], *, remove: bool = False) -> tuple[str, ...]:
        """Add or remove tags. Returns the tags of the release."""

    def note(self, release_id: str, text: str, *, who: str, when: str) -> None:
        """Add a note. Notes are never changed."""

    def notes(self, release_id: str) -> tuple[ReleaseNote, ...]:
        """The notes on a release, oldest first."""

    def collect(self, release_ids: Collection[str], *, when: str) -> tuple[str, ...]:
        """Mark releases as collected. Those that an alias points at or can be rolled back to, and those that
        are tagged to be kept, are spared.

        No alias can be moved to a collected release. Returns the ids that were marked.
        """

    def aliases(self) -> dict[str, str]:
        """Each alias with the id of the release it points at."""

    def move_alias(self, move: AliasMove) -> AliasMove:
        """Move the alias and log the move if the alias still points at `move.previous`; else raise Busy.

        `previous` is None for an alias that does not exist yet. Alias and log change together or not at all.
        """

    def alias_log(self, alias: str) -> tuple[AliasMove, ...]:
        """Every move of the alias, oldest first."""

    def alias_logs(self) -> dict[str, tuple[AliasMove, ...]]:
        """The logs of all aliases."""


def alias_history(log: Iterable[AliasMove]) -> tuple[str, ...]:
    """The releases that a rollback can go back through: a promotion adds one, a rollback removes one."""
    history: list[str] = []
    for move in log:
        if move.rollback:
            history.pop()
        else:
            history.append(move.release_id)
    return tuple(history)


def reachable_releases(logs: Iterable[Iterable[AliasMove]]) -> frozenset[str]:
    """All releases that an alias points at or can be rolled back to."""
    return frozenset(release_id for log in logs for release_id in alias_history(log))


def matches_rollback(log: Iterable[AliasMove], move: AliasMove) -> bool:
    """Whether the log still ends as it did when this rollback was planned."""
    return alias_history(log)[-2:] == (move.release_id, move.previous)


def alias_moved_error(move: AliasMove, current: str | None, *, where: str) -> Busy:
    expected, actual = (
        f"release {release_id[:12]}" if release_id else "nothing" for release_id in (move.previous, current)
    )
    return Busy(
        f"the alias {move.alias} was moved by another process",
        why=f"it pointed at {expected} when this move was decided, and points at {actual} now",
        fix=f"run `graft release list`; if you still want the move, promote {move.release_id[:12]} again",
        where=where,
    )


def release_not_found_error(id_or_prefix: str, *, several: bool, where: str) -> UserError:
    return UserError(
        f"{'several releases start' if several else 'no release starts'} with {id_or_prefix}",
        fix="`graft release list` shows the ids; any unique prefix works",
        where=where,
    )


def wrong_project_error(release: Release, project: str, *, where: str) -> UserError:
    return UserError(
        f"release {release.id[:12]} belongs to project {release.project}",
        why=f"this is the index of {project}",
        fix="open the index of its own project",
        where=where,
    )


def collected_release_error(release_id: str, when: str, *, where: str) -> UserError:
    return UserError(
        f"the files of release {release_id[:12]} were removed by garbage collection at {when}",
        why="an alias can only point at a release that can be served",
        fix="make it again (`graft run`) or import it (`graft release import`), then promote it",
        where=where,
    )


def version_taken_error(version: str, holder: str, *, where: str) -> UserError:
    return UserError(
        f"version {version} is already release {holder[:12]}",
        why="a version of a model names one release",
        fix="choose a higher version; `graft release list` shows them",
        where=where,
    )


PINNED = "keep"
"""A release with this tag is kept until the tag is removed."""


class Change(NamedTuple):
    """Who moves an alias, when and why."""

    who: str
    when: str
    why: str = ""


class PlannedRollback(NamedTuple):
    """From the live release to the one before it."""

    live: str
    target: str


def find_release(index: ReleaseIndex, name: str) -> Release:
    """Find a release by alias, version (`1.4.0`, `tagger@1.4.0`), id or unique prefix of an id."""
    release_id = index.aliases().get(name) if ALIAS.fullmatch(name) else None
    if release_id is None:
        model, separator, version = name.rpartition("@")
        if VERSION.fullmatch(version):
            release_id = index.find_version(version, model=model if separator else None)
            if release_id is None:
                raise UserError(
                    f"no release has the version {name}, or several models have it",
                    fix="add the model (`tagger@1.4.0`); `graft release list` shows the versions",
                )
    return index.get(release_id or name)


def promote(
    index: ReleaseIndex,
    release: Release,
    *,
    alias: str,
    change: Change,
    force: bool = False,
    require_verdict: bool = True,
    instead_of: str | None = None,
) -> AliasMove | None:
    """Point the alias at the release. None if it already points there; then nothing is logged.

    Of two concurrent promotions one gets Busy. `instead_of` is the release that it was compared with: Busy is
    raised if the alias points at another one by now. A release needs a verdict to deploy; `force` overrules
    it and its reason goes into the log.
    """
    model, name = split_alias(alias)
    if model is not None and model != release.model:
        raise UserError(
            f"release {release.id[:12]} is a release of the model {release.model}",
            why=f"the alias {alias} belongs to another model",
            fix=f"promote it as `{release.model}/{name}`",
        )
    cleared = release.decision == "deploy" or not require_verdict
    if not cleared and not force:
        raise NegativeResult(
            f"release {release.id[:12]} is not cleared to be {alias}",
            why=f"its verdict is {release.decision.replace('_', ' ')}, not deploy",
            fix=f"see `graft release show {release.id[:12]}`, or overrule it with --force and a --reason",
        )
    if not cleared and not change.why.strip():
        raise UserError(
            "a promotion against the verdict needs a reason",
            why="the person on call has to know later why this was done",
            fix='give it: --force --reason "…"',
        )
    current = index.aliases().get(alias)
    if current == release.id:
        return None
    return index.move_alias(
        AliasMove(
            alias=alias,
            release_id=release.id,
            previous=instead_of or current,
            who=change.who,
            when=change.when,
            why=change.why or release.decision,
            forced=not cleared,
            verdict_hash=release.verdict_hash,
        )
    )


def plan_rollback(index: ReleaseIndex, *, alias: str) -> PlannedRollback:
    """Read only from the log: alias and log change together, so the last entry is the live release."""
    history = alias_history(index.alias_log(require_alias(alias)))
    if len(history) < 2:
        raise UserError(
            f"there is nothing to roll {alias} back to",
            why="it points at the first release it ever had" if history else "it never pointed at a release",
            fix=f"promote the release you want: `graft release promote ID --alias {alias}`",
        )
    return PlannedRollback(history[-1], history[-2])


def rollback(
    index: ReleaseIndex, *, alias: str, change: Change, planned: PlannedRollback | None = None
) -> AliasMove:
    """Point the alias at the release before the live one. Each further rollback goes further back.

    `planned` is the rollback that was verified; if the alias was moved since then, Busy is raised.
    """
    live, target = planned or plan_rollback(index, alias=alias)
    return index.move_alias(
        AliasMove(
            alias=alias,
            release_id=target,
            previous=live,
            who=change.who,
            when=change.when,
            why=change.why or f"rollback of {live[:12]}",
            rollback=True,
            verdict_hash=index.get(target).verdict_hash,
        )
    )


def select_retained(
    entries: Iterable[ReleaseEntry],
    *,
    reachable: Collection[str],
    leased: Collection[str],
    keep_last: int,
    young_since: str,
) -> dict[str, str]:
    """Release id to the reason why garbage collection keeps it; what is not in it may be removed.

    `entries` are sorted from newest to oldest. `young_since` is an ISO time.
    """
    reasons: dict[str, str] = {}
    counted: Counter[str] = Counter()
    for entry in entries:
        if entry.id in reachable:
            reasons[entry.id] = "an alias points at it or can be rolled back to it"
        elif entry.id in leased:
            reasons[entry.id] = "a running server uses it"
        elif entry.collected_at is not None:
            # An earlier collection marked it and was stopped.
            continue
        elif PINNED in entry.tags:
            reasons[entry.id] = f"it is tagged {PINNED}"
        elif counted[entry.model] < keep_last:
            reasons[entry.id] = f"it is one of the {keep_last} newest of {entry.model}"
        elif entry.created_at >= young_since:
            reasons[entry.id] = "it is younger than the retention period"
        counted[entry.model] += 1
    return reasons
