"""index"""

import threading
from collections.abc import Collection, Iterable
from typing import Protocol

from graftwork.records.errors import Busy, UserMistake
from graftwork.records.release import AliasMove, Release, ReleaseEntry, ReleaseNote, ReleaseQuery
from graftwork.registry.names import (
    next_version,
    require_alias,
    require_name,
    require_version,
    sort_key,
)


class ReleaseIndex(Protocol):
    """The releases of one project and the aliases that point at them."""

    def add(self, release: Release, *, version: str | None = None) -> None:
        """Enter a release, with the next version of its model or the given one.

        Entered again, nothing changes, but that it counts as collected no more.
        """

    def get(self, id_or_prefix: str) -> Release:
        """The release with this id, or the only one whose id begins so; else UserMistake."""

    def list(self) -> tuple[Release, ...]:
        """All releases, the newest first, with all that their manifests say."""

    def entries(self, query: ReleaseQuery = ReleaseQuery()) -> tuple[ReleaseEntry, ...]:  # noqa: B008
        """What the index says of the releases asked for, the newest first. Takes as many queries for a
        thousand releases as for one."""

    def entry(self, release_id: str) -> ReleaseEntry:
        """What the index says of one release."""

    def find_version(self, version: str, *, model: str | None = None) -> str | None:
        """The id of the release with this version, if there is one and only one."""

    def set_version(self, release_id: str, version: str) -> None:
        """Give a release another version; one that is taken is refused."""

    def tag(self, release_id: str, tags: Collection[str], *, remove: bool = False) -> tuple[str, ...]:
        """Add tags or take them off; the tags that it has then."""

    def note(self, release_id: str, text: str, *, who: str, when: str) -> None:
        """Add a note. Notes are never changed."""

    def notes(self, release_id: str) -> tuple[ReleaseNote, ...]:
        """The notes on a release, the oldest first."""

    def collect(self, release_ids: Collection[str], *, when: str) -> tuple[str, ...]:
        """Mark releases as collected, but for those that an alias needs now or to be rolled back to: from now
        on no alias can be moved to them. The ids that were marked."""

    def aliases(self) -> dict[str, str]:
        """Each alias with the id of the release it points at."""

    def move_alias(
        self,
        alias: str,
        to: str,
        *,
        expected_previous: str | None,
        who: str,
        when: str,
        why: str,
        forced: bool = False,
        rollback: bool = False,
        verdict_hash: str | None = None,
    ) -> AliasMove:
        """Point the alias at `to` and log it, if it still points at `expected_previous`; else Busy.

        None expects that the alias does not exist. Alias and log change together or not at all.
        """

    def alias_log(self, alias: str) -> tuple[AliasMove, ...]:
        """Every move of the alias, the oldest first."""

    def alias_logs(self) -> dict[str, tuple[AliasMove, ...]]:
        """The log of every alias there is."""


def matches_rollback(log: Iterable[AliasMove], move: AliasMove) -> bool:
    """Whether this log still ends as whoever rolls back saw it."""
    return alias_history(log)[-2:] == (move.release_id, move.previous)


def reachable_releases(logs: Iterable[Iterable[AliasMove]]) -> frozenset[str]:
    """All releases that aliases point at, or could be rolled back to."""
    return frozenset(one for log in logs for one in alias_history(log))


def alias_history(log: Iterable[AliasMove]) -> tuple[str, ...]:
    """The releases that still count as history: a promotion adds one, a rollback takes one off."""
    history: list[str] = []
    for move in log:
        if move.rollback:
            history.pop()
        else:
            history.append(move.release_id)
    return tuple(history)


def alias_moved_error(move: AliasMove, current: str | None, *, where: str) -> Busy:
    """The alias is not where the mover believed it to be."""
    believed, found = (f"release {at[:12]}" if at else "nothing" for at in (move.previous, current))
    return Busy(
        f"the alias {move.alias} was moved by somebody else meanwhile",
        why=f"it pointed at {believed} when this move was decided and points at {found} now",
        fix=f"look again (`graft release list`); if it is still wanted, promote {move.release_id[:12]} anew",
        where=where,
    )


def release_not_found_error(id_or_prefix: str, *, several: bool, where: str) -> UserMistake:
    """The beginning of an id means no release, or more than one."""
    return UserMistake(
        f"{'several releases begin' if several else 'no release begins'} with {id_or_prefix}",
        fix="`graft release list` shows the ids; any unique beginning will do",
        where=where,
    )


def wrong_project_error(release: Release, project: str, *, where: str) -> UserMistake:
    """The release belongs into another index."""
    return UserMistake(
        f"release {release.id[:12]} belongs to project {release.project}",
        why=f"this is the index of {project}",
        fix="open the index of its own project",
        where=where,
    )


def collected_release_error(release_id: str, when: str, *, where: str) -> UserMistake:
    """The files of the release are gone."""
    return UserMistake(
        f"the files of release {release_id[:12]} were collected as garbage at {when}",
        why="an alias can only point at what can be served",
        fix="make it again (`graft run`) or bring it back (`graft release import`), then promote it",
        where=where,
    )


def version_taken_error(version: str, holder: str, *, where: str) -> UserMistake:
    """Two releases of one model cannot have the same version."""
    return UserMistake(
        f"version {version} is release {holder[:12]} already",
        why="a version of a model means one release",
        fix="choose a higher one; `graft release list` shows them",
        where=where,
    )


class InMemoryReleaseIndex(ReleaseIndex):
    """For tests and for looking around; forgets everything when the process ends."""

    def __init__(self, *, project: str) -> None:
        self._project = project
        self._lock = threading.Lock()
        self._releases: dict[str, Release] = {}
        self._moves: tuple[AliasMove, ...] = ()
        self._versions: dict[str, str] = {}
        self._tags: dict[str, set[str]] = {}
        self._notes: dict[str, tuple[ReleaseNote, ...]] = {}
        self._collected: dict[str, str] = {}

    def add(self, release: Release, *, version: str | None = None) -> None:
        if release.project != self._project:
            raise wrong_project_error(release, self._project, where="memory")
        require_name(release.id, kind="release id")
        with self._lock:
            self._collected.pop(release.id, None)
            if release.id not in self._releases:
                self._versions[release.id] = self._free_version(release, version)
                self._releases[release.id] = release

    def get(self, id_or_prefix: str) -> Release:
        require_name(id_or_prefix, kind="release id")
        if id_or_prefix in self._releases:
            return self._releases[id_or_prefix]
        found = [id_ for id_ in self._releases if id_.startswith(id_or_prefix)]
        if len(found) == 1:
            return self._releases[found[0]]
        raise release_not_found_error(id_or_prefix, several=bool(found), where="memory")

    def list(self) -> tuple[Release, ...]:
        return tuple(reversed(self._releases.values()))

    def entries(self, query: ReleaseQuery = ReleaseQuery()) -> tuple[ReleaseEntry, ...]:  # noqa: B008
        found = [one for one in map(self._entry, self.list()) if self._is_asked_for(one, query)]
        return tuple(found[: query.limit])

    def entry(self, release_id: str) -> ReleaseEntry:
        return self._entry(self._require(release_id))

    def find_version(self, version: str, *, model: str | None = None) -> str | None:
        require_version(version)
        found = [
            one.id
            for one in self._releases.values()
            if self._versions[one.id] == version and model in (None, one.model)
        ]
        return found[0] if len(found) == 1 else None

    def set_version(self, release_id: str, version: str) -> None:
        with self._lock:
            self._versions[release_id] = self._free_version(self._require(release_id), version)

    def tag(self, release_id: str, tags: Collection[str], *, remove: bool = False) -> tuple[str, ...]:
        wanted = {require_name(one, kind="tag") for one in tags}
        has = self._tags.setdefault(self._require(release_id).id, set())
        (has.difference_update if remove else has.update)(wanted)
        return tuple(sorted(has))

    def note(self, release_id: str, text: str, *, who: str, when: str) -> None:
        release = self._require(release_id)
        note = ReleaseNote(text=text.replace("\0", ""), who=who, when=when)
        self._notes[release.id] = (*self.notes(release.id), note)

    def notes(self, release_id: str) -> tuple[ReleaseNote, ...]:
        return self._notes.get(release_id, ())

    def collect(self, release_ids: Collection[str], *, when: str) -> tuple[str, ...]:
        with self._lock:
            marked = tuple(sorted(set(release_ids) - reachable_releases(self.alias_logs().values())))
            for one in marked:
                self._collected.setdefault(one, when)
        return marked

    def aliases(self) -> dict[str, str]:
        return dict(sorted({move.alias: move.release_id for move in self._moves}.items()))

    def move_alias(
        self,
        alias: str,
        to: str,
        *,
        expected_previous: str | None,
        who: str,
        when: str,
        why: str,
        forced: bool = False,
        rollback: bool = False,
        verdict_hash: str | None = None,
    ) -> AliasMove:
        require_alias(alias)
        move = AliasMove(
            alias=alias,
            release_id=self.get(to).id,
            previous=expected_previous,
            who=who,
            when=when,
            why=why,
            forced=forced,
            rollback=rollback,
            verdict_hash=verdict_hash,
        )
        with self._lock:
            current = self.aliases().get(alias)
            if current != expected_previous or (
                rollback and not matches_rollback(self.alias_log(alias), move)
            ):
                raise alias_moved_error(move, current, where="memory")
            if move.release_id in self._collected:
                raise collected_release_error(
                    move.release_id, self._collected[move.release_id], where="memory"
                )
            self._moves = (*self._moves, move)
        return move

    def alias_log(self, alias: str) -> tuple[AliasMove, ...]:
        require_alias(alias)
        return tuple(move for move in self._moves if move.alias == alias)

    def alias_logs(self) -> dict[str, tuple[AliasMove, ...]]:
        return {alias: self.alias_log(alias) for alias in self.aliases()}

    def _require(self, release_id: str) -> Release:
        if release_id not in self._releases:
            raise release_not_found_error(release_id, several=False, where="memory")
        return self._releases[release_id]

    def _entry(self, release: Release) -> ReleaseEntry:
        fields = {"id", "model", "base", "decision", "run_id", "dataset_hash", "parent", "created_at"}
        return ReleaseEntry(
            **release.model_dump(include=fields),
            version=self._versions[release.id],
            tags=tuple(sorted(self._tags.get(release.id, ()))),
            aliases=tuple(alias for alias, to in self.aliases().items() if to == release.id),
            collected_at=self._collected.get(release.id),
        )

    def _is_asked_for(self, entry: ReleaseEntry, query: ReleaseQuery) -> bool:
        words = (entry.id, entry.version or "", entry.base, entry.run_id, entry.model, *entry.tags)
        said = "\n".join((*words, *(note.text for note in self.notes(entry.id)))).lower()
        return (
            query.tag in (None, *entry.tags)
            and query.decision in (None, entry.decision)
            and query.model in (None, entry.model)
            and query.base in (None, entry.base)
            and (query.since is None or entry.created_at >= query.since)
            and (query.collected or entry.collected_at is None)
            and (query.search or "").lower() in said
        )

    def _free_version(self, release: Release, given: str | None) -> str:
        of_model = {
            self._versions[one.id]: one for one in self._releases.values() if one.model == release.model
        }
        if given is None:
            newest = max(of_model, key=sort_key, default=None)
            return next_version(newest, before=of_model.get(newest or ""), now=release)
        holder = of_model.get(require_version(given))
        if holder is not None and holder.id != release.id:
            raise version_taken_error(given, holder.id, where="memory")
        return given
