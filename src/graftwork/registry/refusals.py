"""What every index of releases says when it refuses, so that all say the same."""

from graftwork.records.errors import Busy, UserMistake
from graftwork.records.release import AliasMove, Release


def moved_meanwhile(move: AliasMove, current: str | None, *, where: str) -> Busy:
    """The alias is not where the mover believed it to be."""
    believed, found = (f"release {at[:12]}" if at else "nothing" for at in (move.previous, current))
    return Busy(
        f"the alias {move.alias} was moved by somebody else meanwhile",
        why=f"it pointed at {believed} when this move was decided and points at {found} now",
        fix=f"look again (`graft release list`); if it is still wanted, promote {move.release_id[:12]} anew",
        where=where,
    )


def not_one_release(id_or_prefix: str, *, several: bool, where: str) -> UserMistake:
    """The beginning of an id means no release, or more than one."""
    return UserMistake(
        f"{'several releases begin' if several else 'no release begins'} with {id_or_prefix}",
        fix="`graft release list` shows the ids; any unique beginning will do",
        where=where,
    )


def wrong_project(release: Release, project: str, *, where: str) -> UserMistake:
    """The release belongs into another index."""
    return UserMistake(
        f"release {release.id[:12]} belongs to project {release.project}",
        why=f"this is the index of {project}",
        fix="open the index of its own project",
        where=where,
    )


def is_collected(release_id: str, when: str, *, where: str) -> UserMistake:
    """The files of the release are gone."""
    return UserMistake(
        f"the files of release {release_id[:12]} were collected as garbage at {when}",
        why="an alias can only point at what can be served",
        fix="make it again (`graft run`) or bring it back (`graft release import`), then promote it",
        where=where,
    )


def version_taken(version: str, holder: str, *, where: str) -> UserMistake:
    """Two releases of one model cannot have the same version."""
    return UserMistake(
        f"version {version} is release {holder[:12]} already",
        why="a version of a model means one release",
        fix="choose a higher one; `graft release list` shows them",
        where=where,
    )
