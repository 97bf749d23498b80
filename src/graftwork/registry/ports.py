"""What the registry needs of the outside: an index of releases and aliases that outlives it."""

from collections.abc import Collection
from typing import Protocol

from graftwork.records.release import AliasMove, Release, ReleaseEntry, ReleaseNote, ReleaseQuery


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
