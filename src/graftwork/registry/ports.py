"""What the registry needs of the outside: an index of releases and aliases that outlives it."""

from typing import Protocol

from graftwork.records.release import AliasMove, Release


class ReleaseIndex(Protocol):
    """The releases of one project and the aliases that point at them."""

    def add(self, release: Release) -> None:
        """Enter a release. Entered again, nothing changes."""

    def get(self, id_or_prefix: str) -> Release:
        """The release with this id, or the only one whose id begins so; else UserMistake."""

    def list(self) -> tuple[Release, ...]:
        """All releases, the newest first."""

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
    ) -> AliasMove:
        """Point the alias at `to` and log it, if it still points at `expected_previous`; else Busy.

        None expects that the alias does not exist. Alias and log change together or not at all.
        """

    def alias_log(self, alias: str) -> tuple[AliasMove, ...]:
        """Every move of the alias, the oldest first."""
