"""The releases of a project and its aliases: the truth about what is live.

An alias and its log change together or not at all. Entries are listed and searched without reading a
manifest, in three statements however many there are. Does not know where the files of a release are.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, or_, select

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
from graftwork.store.database import ProjectTable
from graftwork.store.schema import alias_moves, aliases, release_notes, release_tags, releases

_COLUMNS = (
    releases.c.id,
    releases.c.model,
    releases.c.version,
    releases.c.base,
    releases.c.decision,
    releases.c.run_id,
    releases.c.dataset_hash,
    releases.c.parent,
    releases.c.created_at,
    releases.c.collected_at,
)


def select_entries(connection: Connection, project: str, query: ReleaseQuery) -> tuple[ReleaseEntry, ...]:
    """The entries that the query asks for, the newest first."""
    statement = select(*_COLUMNS).where(releases.c.project == project, *_conditions(project, query))
    statement = statement.order_by(releases.c.seq.desc())
    if query.limit is not None:
        statement = statement.limit(query.limit)
    return _entries(connection, project, statement)


def select_entry(connection: Connection, project: str, release_id: str) -> ReleaseEntry | None:
    statement = select(*_COLUMNS).where(releases.c.project == project, releases.c.id == release_id)
    return next(iter(_entries(connection, project, statement)), None)


def select_tags(connection: Connection, project: str, release_id: str) -> tuple[str, ...]:
    matching = (release_tags.c.project == project) & (release_tags.c.release_id == release_id)
    return tuple(connection.scalars(select(release_tags.c.tag).where(matching).order_by(release_tags.c.tag)))


def _entries(connection: Connection, project: str, statement: Select[Any]) -> tuple[ReleaseEntry, ...]:
    tags, names = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    rows = connection.execute(statement).mappings().all()
    tagged = select(release_tags.c.release_id, release_tags.c.tag).where(release_tags.c.project == project)
    for row in connection.execute(tagged.order_by(release_tags.c.tag)):
        tags[row.release_id].append(row.tag)
    pointing = select(aliases.c.release_id, aliases.c.name).where(aliases.c.project == project)
    for row in connection.execute(pointing.order_by(aliases.c.name)):
        names[row.release_id].append(row.name)
    return tuple(
        ReleaseEntry(**row, tags=tuple(tags.get(row["id"], ())), aliases=tuple(names.get(row["id"], ())))
        for row in rows
    )


def _conditions(project: str, query: ReleaseQuery) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    for column, value in (
        (releases.c.decision, query.decision),
        (releases.c.model, query.model),
        (releases.c.base, query.base),
    ):
        if value is not None:
            conditions.append(column == value)
    if query.since is not None:
        conditions.append(releases.c.created_at >= query.since)
    if not query.collected:
        conditions.append(releases.c.collected_at.is_(None))
    if query.tag is not None:
        conditions.append(releases.c.id.in_(_tagged(project).where(release_tags.c.tag == query.tag)))
    if query.search:
        conditions.append(_says(project, query.search))
    return conditions


def _says(project: str, text: str) -> ColumnElement[bool]:
    def holds(column: Any) -> ColumnElement[bool]:
        condition: ColumnElement[bool] = func.lower(column).contains(text.lower(), autoescape=True)
        return condition

    noted = select(release_notes.c.release_id).where(release_notes.c.project == project)
    columns = (releases.c.id, releases.c.version, releases.c.base, releases.c.run_id, releases.c.model)
    return or_(
        *(holds(column) for column in columns),
        releases.c.id.in_(_tagged(project).where(holds(release_tags.c.tag))),
        releases.c.id.in_(noted.where(holds(release_notes.c.text))),
    )


def _tagged(project: str) -> Select[Any]:
    return select(release_tags.c.release_id).where(release_tags.c.project == project)


class ReleaseTable(ProjectTable, ReleaseIndex):
    """The releases of one project, in the database."""

    def add(self, release: Release, *, version: str | None = None) -> None:
        if release.project != self._project:
            raise wrong_project_error(release, self._project, where=self._database.name)
        require_name(release.id, kind="release id")
        with self._database.write() as connection:
            stored = connection.execute(select(releases.c.seq).where(self._is(release.id))).first()
            if stored is not None:
                connection.execute(releases.update().where(self._is(release.id)).values(collected_at=None))
                return
            row = {
                "project": self._project,
                "created_at": release.created_at,
                "body": release.model_dump(mode="json"),
                "version": self._free_version(connection, release, version),
            }
            row |= release.model_dump(
                include={"id", "model", "base", "decision", "run_id", "dataset_hash", "parent"}
            )
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
        rows = self._database.rows(query)
        if len(rows) == 1 or (rows and rows[0].id == id_or_prefix):
            return Release.model_validate(rows[0].body)
        raise release_not_found_error(id_or_prefix, several=bool(rows), where=self._database.name)

    def list(self) -> tuple[Release, ...]:
        query = (
            select(releases.c.body).where(releases.c.project == self._project).order_by(releases.c.seq.desc())
        )
        return tuple(Release.model_validate(body) for body in self._database.scalars(query))

    def entries(self, query: ReleaseQuery = ReleaseQuery()) -> tuple[ReleaseEntry, ...]:  # noqa: B008
        with self._database.read() as connection:
            return select_entries(connection, self._project, query)

    def entry(self, release_id: str) -> ReleaseEntry:
        with self._database.read() as connection:
            stored = select_entry(connection, self._project, require_name(release_id, kind="release id"))
        if stored is None:
            raise release_not_found_error(release_id, several=False, where=self._database.name)
        return stored

    def find_version(self, version: str, *, model: str | None = None) -> str | None:
        query = select(releases.c.id).where(
            releases.c.project == self._project, releases.c.version == require_version(version)
        )
        if model is not None:
            query = query.where(releases.c.model == model)
        ids = self._database.scalars(query.limit(2))
        return str(ids[0]) if len(ids) == 1 else None

    def set_version(self, release_id: str, version: str) -> None:
        with self._database.write() as connection:
            release = self._require(connection, release_id)
            self._require_free(connection, str(release.model), require_version(version), but=release_id)
            connection.execute(releases.update().where(self._is(release_id)).values(version=version))

    def tag(self, release_id: str, tags: Collection[str], *, remove: bool = False) -> tuple[str, ...]:
        names = {require_name(tag, kind="tag") for tag in tags}
        with self._database.write() as connection:
            self._require(connection, release_id)
            has = set(select_tags(connection, self._project, release_id))
            if remove:
                matching = (release_tags.c.project == self._project) & (
                    release_tags.c.release_id == release_id
                )
                connection.execute(release_tags.delete().where(matching, release_tags.c.tag.in_(names)))
            else:
                for tag in sorted(names - has):
                    row = {"project": self._project, "release_id": release_id, "tag": tag}
                    connection.execute(release_tags.insert().values(**row))
            return select_tags(connection, self._project, release_id)

    def note(self, release_id: str, text: str, *, who: str, when: str) -> None:
        with self._database.write() as connection:
            self._require(connection, release_id)
            row = {"project": self._project, "release_id": release_id, "who": who, "noted_at": when}
            # PostgreSQL keeps no NUL in text.
            connection.execute(release_notes.insert().values(**row, text=text.replace("\0", "")))

    def notes(self, release_id: str) -> tuple[ReleaseNote, ...]:
        matching = (release_notes.c.project == self._project) & (release_notes.c.release_id == release_id)
        query = select(release_notes).where(matching).order_by(release_notes.c.seq)
        rows = self._database.rows(query)
        return tuple(ReleaseNote(text=row.text, who=row.who, when=row.noted_at) for row in rows)

    def collect(self, release_ids: Collection[str], *, when: str) -> tuple[str, ...]:
        with self._database.write() as connection:
            reachable = reachable_releases(self._logs(connection).values())
            # Tagged since the caller looked; one that a collection has marked before is past saving.
            pinned = _tagged(self._project).where(release_tags.c.tag == PINNED)
            spared = select(releases.c.id).where(
                releases.c.project == self._project,
                releases.c.id.in_(pinned),
                releases.c.collected_at.is_(None),
            )
            marked = tuple(sorted(set(release_ids) - reachable - set(connection.scalars(spared))))
            for release_id in marked:
                connection.execute(
                    releases.update()
                    .where(self._is(release_id), releases.c.collected_at.is_(None))
                    .values(collected_at=when)
                )
        return marked

    def aliases(self) -> dict[str, str]:
        query = (
            select(aliases.c.name, aliases.c.release_id)
            .where(aliases.c.project == self._project)
            .order_by(aliases.c.name)
        )
        return {row.name: row.release_id for row in self._database.rows(query)}

    def move_alias(self, move: AliasMove) -> AliasMove:
        alias = require_alias(move.alias)
        move = move.model_copy(update={"release_id": self.get(move.release_id).id})
        release_id = move.release_id
        matching = (aliases.c.project == self._project) & (aliases.c.name == alias)
        with self._database.write() as connection:
            # There is one writer at a time, so what is compared here is still so when it is changed.
            current = connection.scalar(select(aliases.c.release_id).where(matching))
            log = self._logs(connection, alias=alias).get(alias, ()) if move.rollback else ()
            if current != move.previous or (move.rollback and not matches_rollback(log, move)):
                raise alias_moved_error(move, current, where=self._database.name)
            collected = self._require(connection, release_id).collected_at
            if collected is not None:
                raise collected_release_error(release_id, collected, where=self._database.name)
            if current is None:
                new = {"project": self._project, "name": alias, "release_id": release_id}
                connection.execute(aliases.insert().values(**new))
            else:
                connection.execute(aliases.update().where(matching).values(release_id=release_id))
            row = {**move.model_dump(exclude={"when"}), "moved_at": move.when, "project": self._project}
            connection.execute(alias_moves.insert().values(**row))
        return move

    def alias_log(self, alias: str) -> tuple[AliasMove, ...]:
        with self._database.read() as connection:
            return self._logs(connection, alias=require_alias(alias)).get(alias, ())

    def alias_logs(self) -> dict[str, tuple[AliasMove, ...]]:
        with self._database.read() as connection:
            return self._logs(connection)

    def _logs(self, connection: Connection, *, alias: str | None = None) -> dict[str, tuple[AliasMove, ...]]:
        query = select(alias_moves).where(alias_moves.c.project == self._project).order_by(alias_moves.c.seq)
        if alias is not None:
            query = query.where(alias_moves.c.alias == alias)
        logs = defaultdict[str, list[AliasMove]](list)
        for row in connection.execute(query).mappings():
            values = {key: row[key] for key in AliasMove.model_fields if key != "when"}
            logs[row["alias"]].append(AliasMove(**values, when=row["moved_at"]))
        return {name: tuple(moves) for name, moves in sorted(logs.items())}

    def _is(self, release_id: str) -> ColumnElement[bool]:
        return (releases.c.project == self._project) & (releases.c.id == release_id)

    def _require(self, connection: Connection, release_id: str) -> Any:
        columns = (releases.c.model, releases.c.version, releases.c.collected_at)
        row = connection.execute(select(*columns).where(self._is(release_id))).first()
        if row is None:
            raise release_not_found_error(release_id, several=False, where=self._database.name)
        return row

    def _free_version(self, connection: Connection, release: Release, requested: str | None) -> str:
        if requested is not None:
            self._require_free(connection, release.model, require_version(requested), but=release.id)
            return requested
        of_model = (releases.c.project == self._project) & (releases.c.model == release.model)
        versioned = select(releases.c.version, releases.c.seq).where(
            of_model, releases.c.version.is_not(None)
        )
        newest = max(connection.execute(versioned), key=lambda row: sort_key(row.version), default=None)
        if newest is None:
            return next_version(None, before=None, now=release)
        body = connection.scalar(select(releases.c.body).where(releases.c.seq == newest.seq))
        return next_version(newest.version, before=Release.model_validate(body), now=release)

    def _require_free(self, connection: Connection, model: str, version: str, *, but: str) -> None:
        of_model = (releases.c.project == self._project) & (releases.c.model == model)
        holder = connection.scalar(select(releases.c.id).where(of_model, releases.c.version == version))
        if holder is not None and holder != but:
            raise version_taken_error(version, holder, where=self._database.name)
