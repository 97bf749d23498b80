"""The releases of a project and the aliases that point at them: the truth about what is live.

In: releases, and moves of aliases. Out: the same, and the log of all moves. An alias and its log
change together or not at all. Does not know where the files of a release lie.
"""

from sqlalchemy import select

from graftwork.records.release import AliasMove, Release
from graftwork.registry.names import require_name
from graftwork.registry.ports import ReleaseIndex
from graftwork.registry.refusals import moved_meanwhile, not_one_release, wrong_project
from graftwork.store.database import Database
from graftwork.store.schema import alias_moves, aliases, releases


class Releases(ReleaseIndex):
    """The releases of one project, in the database."""

    def __init__(self, database: Database, *, project: str) -> None:
        self._database = database
        self._project = project

    def add(self, release: Release) -> None:
        if release.project != self._project:
            raise wrong_project(release, self._project, where=self._database.name)
        require_name(release.id, kind="release id")
        row = {
            "project": self._project,
            "id": release.id,
            "created_at": release.created_at,
            "body": release.model_dump(mode="json"),
        }
        with self._database.write() as connection:
            known = select(releases.c.id).where(
                releases.c.project == self._project, releases.c.id == release.id
            )
            if connection.execute(known).first() is None:
                connection.execute(releases.insert().values(**row))

    def get(self, id_or_prefix: str) -> Release:
        require_name(id_or_prefix, kind="release id")
        query = (
            select(releases.c.id, releases.c.body)
            .where(releases.c.project == self._project)
            .where(releases.c.id.startswith(id_or_prefix, autoescape=True))
            .order_by(releases.c.id)
            .limit(2)
        )
        with self._database.read() as connection:
            found = connection.execute(query).all()
        if len(found) == 1 or (found and found[0].id == id_or_prefix):
            return Release.model_validate(found[0].body)
        raise not_one_release(id_or_prefix, several=bool(found), where=self._database.name)

    def list(self) -> tuple[Release, ...]:
        query = (
            select(releases.c.body).where(releases.c.project == self._project).order_by(releases.c.seq.desc())
        )
        with self._database.read() as connection:
            return tuple(Release.model_validate(body) for body in connection.scalars(query))

    def aliases(self) -> dict[str, str]:
        query = (
            select(aliases.c.name, aliases.c.release_id)
            .where(aliases.c.project == self._project)
            .order_by(aliases.c.name)
        )
        with self._database.read() as connection:
            return {row.name: row.release_id for row in connection.execute(query)}

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
        release_id = self.get(to).id
        move = AliasMove(
            alias=alias,
            release_id=release_id,
            previous=expected_previous,
            who=who,
            when=when,
            why=why,
            forced=forced,
            rollback=rollback,
        )
        here = (aliases.c.project == self._project) & (aliases.c.name == alias)
        with self._database.write() as connection:
            # There is one writer at a time, so what is compared here is still so when it is changed.
            current = connection.scalar(select(aliases.c.release_id).where(here))
            if current != expected_previous:
                raise moved_meanwhile(move, current, where=self._database.name)
            if current is None:
                new = {"project": self._project, "name": alias, "release_id": release_id}
                connection.execute(aliases.insert().values(**new))
            else:
                connection.execute(aliases.update().where(here).values(release_id=release_id))
            row = {**move.model_dump(exclude={"when"}), "moved_at": when, "project": self._project}
            connection.execute(alias_moves.insert().values(**row))
        return move

    def alias_log(self, alias: str) -> tuple[AliasMove, ...]:
        require_name(alias, kind="alias")
        query = (
            select(alias_moves)
            .where(alias_moves.c.project == self._project, alias_moves.c.alias == alias)
            .order_by(alias_moves.c.seq)
        )
        with self._database.read() as connection:
            rows = connection.execute(query).mappings().all()
        return tuple(
            AliasMove(
                alias=row["alias"],
                release_id=row["release_id"],
                previous=row["previous"],
                who=row["who"],
                when=row["moved_at"],
                why=row["why"],
                forced=row["forced"],
                rollback=row["rollback"],
            )
            for row in rows
        )
