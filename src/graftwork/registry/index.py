"""The index of releases and aliases as the registry needs it, and the errors of every implementation."""

from collections.abc import Collection, Iterable
from typing import Protocol

from graftwork.records.errors import Busy, UserMistake
from graftwork.records.release import AliasMove, Release, ReleaseEntry, ReleaseNote, ReleaseQuery


class ReleaseIndex(Protocol):
    """The releases of one project and the aliases that point at them."""

    def add(self, release: Release, *, version: str | None = None) -> None:
        """Add a release with the given version, or the next version of its model.

        Adding it again changes nothing, except that it no longer counts as collected.
        """

    def get(self, id_or_prefix: str) -> Release:
        """The release with this id, or the only one whose id starts with it. Raises UserMistake."""

    def list(self) -> tuple[Release, ...]:
        """All releases with their full manifests, newest first."""

    def entries(self, query: ReleaseQuery = ReleaseQuery()) -> tuple[ReleaseEntry, ...]:  # noqa: B008
        """The matching entries, newest first. The number of statements does not grow with the result."""

    def entry(self, release_id: str) -> ReleaseEntry: ...

    def find_version(self, version: str, *, model: str | None = None) -> str | None:
        """The id of the release with this version; None unless there is exactly one."""

    def set_version(self, release_id: str, version: str) -> None:
        """Change the version of a release. Raises UserMistake if another release has it."""

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
    expected, found = (f"release {at[:12]}" if at else "nothing" for at in (move.previous, current))
    return Busy(
        f"the alias {move.alias} was moved by another process",
        why=f"it pointed at {expected} when this move was decided, and points at {found} now",
        fix=f"run `graft release list`; if you still want the move, promote {move.release_id[:12]} again",
        where=where,
    )


def release_not_found_error(id_or_prefix: str, *, several: bool, where: str) -> UserMistake:
    return UserMistake(
        f"{'several releases start' if several else 'no release starts'} with {id_or_prefix}",
        fix="`graft release list` shows the ids; any unique prefix works",
        where=where,
    )


def wrong_project_error(release: Release, project: str, *, where: str) -> UserMistake:
    return UserMistake(
        f"release {release.id[:12]} belongs to project {release.project}",
        why=f"this is the index of {project}",
        fix="open the index of its own project",
        where=where,
    )


def collected_release_error(release_id: str, when: str, *, where: str) -> UserMistake:
    return UserMistake(
        f"the files of release {release_id[:12]} were removed by garbage collection at {when}",
        why="an alias can only point at a release that can be served",
        fix="make it again (`graft run`) or import it (`graft release import`), then promote it",
        where=where,
    )


def version_taken_error(version: str, holder: str, *, where: str) -> UserMistake:
    return UserMistake(
        f"version {version} is already release {holder[:12]}",
        why="a version of a model names one release",
        fix="choose a higher version; `graft release list` shows them",
        where=where,
    )
