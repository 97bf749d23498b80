"""The project's store of releases, and the moves of its aliases: proven first, then moved.

In: an open project, a release by any of its names, an alias. Out: the move. A release is verified byte by
byte, and its signature where the project trusts a key, before an alias may point at it; meanwhile nobody
can collect it as garbage.
"""

from typing import NamedTuple

from graftwork.pipeline.open_project import OpenProject, current_user, timestamp
from graftwork.records.errors import UserMistake
from graftwork.records.release import AliasMove, Release
from graftwork.registry import promote as registry
from graftwork.registry.names import alias_of_model
from graftwork.registry.signature import load_public_key
from graftwork.registry.store import ReleaseStore


class Promoted(NamedTuple):
    """`move` is None where the alias pointed at the release already."""

    release: Release
    alias: str
    move: AliasMove | None


def open_store(work: OpenProject) -> ReleaseStore:
    given = work.settings.release.public_key
    key = load_public_key(given, root=work.project.root) if given else None
    return ReleaseStore.open(work.project.releases, public_key=key)


def own_alias(work: OpenProject, alias: str | None = None, *, model: str | None = None) -> str:
    """The full name of an alias of this model, by default the one that is worked on."""
    settings = work.settings
    chosen = model or work.model
    # What was released before the project had named models is the main one's.
    known = chosen if chosen in settings.models else settings.main_model
    return alias_of_model(alias or settings.release.alias, model=known, main=settings.main_model)


def promote_release(
    work: OpenProject, name: str, *, alias: str | None = None, reason: str = "", force: bool = False
) -> Promoted:
    """Point an alias of the release's own model at it."""
    store = open_store(work)
    with store.adding():
        release = registry.find_release(work.releases, name)
        full = own_alias(work, alias, model=release.model)
        _require_own(work, release, full)
        store.verify(release.id)
        move = registry.promote(
            work.releases,
            release,
            alias=full,
            who=current_user(),
            when=timestamp(),
            why=reason,
            force=force,
            require_verdict=work.settings.release.require_verdict,
        )
    return Promoted(release, full, move)


def rollback_alias(work: OpenProject, *, alias: str | None = None, reason: str = "") -> AliasMove:
    """Point an alias of the model that is worked on at the release before the present one."""
    full = own_alias(work, alias)
    store = open_store(work)
    with store.adding():
        way = registry.way_back(work.releases, alias=full)
        store.verify(way.target)
        return registry.rollback(
            work.releases, alias=full, who=current_user(), when=timestamp(), why=reason, way=way
        )


def _require_own(work: OpenProject, release: Release, alias: str) -> None:
    """An alias named with its model takes releases of that model only."""
    model, slash, _ = alias.rpartition("/")
    settings = work.settings
    if slash and (model not in settings.models or model == settings.main_model):
        raise UserMistake(
            f"there is no model {model!r} that has aliases of this kind",
            why=f"the models are {', '.join(settings.all_models)}; {settings.main_model} has no prefix",
            fix=f"leave the prefix out: the alias goes to the model of release {release.id[:12]}",
            where="--alias",
        )
