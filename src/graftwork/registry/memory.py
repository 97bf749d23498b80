"""The stand-in for the release index: the same promises, kept in this process only."""

import threading

from graftwork.records.release import AliasMove, Release
from graftwork.registry.names import require_name
from graftwork.registry.ports import ReleaseIndex
from graftwork.registry.refusals import moved_meanwhile, not_one_release, wrong_project


class ReleasesInMemory(ReleaseIndex):
    """For tests and for looking around; forgets everything when the process ends."""

    def __init__(self, *, project: str) -> None:
        self._project = project
        self._lock = threading.Lock()
        self._releases: dict[str, Release] = {}
        self._moves: tuple[AliasMove, ...] = ()

    def add(self, release: Release) -> None:
        if release.project != self._project:
            raise wrong_project(release, self._project, where="memory")
        require_name(release.id, kind="release id")
        with self._lock:
            self._releases.setdefault(release.id, release)

    def get(self, id_or_prefix: str) -> Release:
        require_name(id_or_prefix, kind="release id")
        if id_or_prefix in self._releases:
            return self._releases[id_or_prefix]
        found = [id_ for id_ in self._releases if id_.startswith(id_or_prefix)]
        if len(found) == 1:
            return self._releases[found[0]]
        raise not_one_release(id_or_prefix, several=bool(found), where="memory")

    def list(self) -> tuple[Release, ...]:
        return tuple(reversed(self._releases.values()))

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
    ) -> AliasMove:
        require_name(alias, kind="alias")
        move = AliasMove(
            alias=alias,
            release_id=self.get(to).id,
            previous=expected_previous,
            who=who,
            when=when,
            why=why,
            forced=forced,
            rollback=rollback,
        )
        with self._lock:
            current = self.aliases().get(alias)
            if current != expected_previous:
                raise moved_meanwhile(move, current, where="memory")
            self._moves = (*self._moves, move)
        return move

    def alias_log(self, alias: str) -> tuple[AliasMove, ...]:
        require_name(alias, kind="alias")
        return tuple(move for move in self._moves if move.alias == alias)
