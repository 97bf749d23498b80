"""A release index in memory, which keeps the same promises as the one in the database."""

import threading
from collections.abc import Collection

from graftwork.records.release import AliasMove, Release, ReleaseEntry, ReleaseNote, ReleaseQuery
from graftwork.registry.index import (
    PINNED,
    ReleaseIndex,
    alias_moved_error,
    collected_release_error,
    matches_rollback,
    reachable_releases,
    release_not_found_error,
    version_taken_error,
    wrong_project_error,
)
from graftwork.registry.manifest import next_version, require_alias, require_name, require_version, sort_key


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
        found = [entry for entry in map(self._entry, self.list()) if self._is_asked_for(entry, query)]
        return tuple(found[: query.limit])

    def entry(self, release_id: str) -> ReleaseEntry:
        return self._entry(self._require(release_id))

    def find_version(self, version: str, *, model: str | None = None) -> str | None:
        require_version(version)
        found = [
            release.id
            for release in self._releases.values()
            if self._versions[release.id] == version and model in (None, release.model)
        ]
        return found[0] if len(found) == 1 else None

    def set_version(self, release_id: str, version: str) -> None:
        with self._lock:
            self._versions[release_id] = self._free_version(self._require(release_id), version)

    def tag(self, release_id: str, tags: Collection[str], *, remove: bool = False) -> tuple[str, ...]:
        wanted = {require_name(tag, kind="tag") for tag in tags}
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
            pinned = {name for name, tags in self._tags.items() if PINNED in tags} - set(self._collected)
            marked = tuple(sorted(set(release_ids) - reachable_releases(self.alias_logs().values()) - pinned))
            for release in marked:
                self._collected.setdefault(release, when)
        return marked

    def aliases(self) -> dict[str, str]:
        return dict(sorted({move.alias: move.release_id for move in self._moves}.items()))

    def move_alias(self, move: AliasMove) -> AliasMove:
        require_alias(move.alias)
        move = move.model_copy(update={"release_id": self.get(move.release_id).id})
        with self._lock:
            current = self.aliases().get(move.alias)
            if current != move.previous or (
                move.rollback and not matches_rollback(self.alias_log(move.alias), move)
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
        output = "\n".join((*words, *(note.text for note in self.notes(entry.id)))).lower()
        return (
            query.tag in (None, *entry.tags)
            and query.decision in (None, entry.decision)
            and query.model in (None, entry.model)
            and query.base in (None, entry.base)
            and (query.since is None or entry.created_at >= query.since)
            and (query.collected or entry.collected_at is None)
            and (query.search or "").lower() in output
        )

    def _free_version(self, release: Release, given: str | None) -> str:
        of_model = {
            self._versions[other.id]: other
            for other in self._releases.values()
            if other.model == release.model
        }
        if given is None:
            newest = max(of_model, key=sort_key, default=None)
            return next_version(newest, before=of_model.get(newest or ""), now=release)
        holder = of_model.get(require_version(given))
        if holder is not None and holder.id != release.id:
            raise version_taken_error(given, holder.id, where="memory")
        return given
