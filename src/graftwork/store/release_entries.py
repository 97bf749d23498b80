"""What the database says of releases beside their manifests: listed, searched, tagged, noted.

In: a connection, a project and a query. Out: entries, in three statements however many releases there are.
No manifest is read for it.
"""

from collections import defaultdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, func, or_, select

from graftwork.records.release import ReleaseEntry, ReleaseQuery
from graftwork.store.schema import aliases, release_notes, release_tags, releases

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
    here = (release_tags.c.project == project) & (release_tags.c.release_id == release_id)
    return tuple(connection.scalars(select(release_tags.c.tag).where(here).order_by(release_tags.c.tag)))


def _entries(connection: Connection, project: str, statement: Select[Any]) -> tuple[ReleaseEntry, ...]:
    tags, names = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    found = connection.execute(statement).mappings().all()
    tagged = select(release_tags.c.release_id, release_tags.c.tag).where(release_tags.c.project == project)
    for row in connection.execute(tagged.order_by(release_tags.c.tag)):
        tags[row.release_id].append(row.tag)
    pointing = select(aliases.c.release_id, aliases.c.name).where(aliases.c.project == project)
    for row in connection.execute(pointing.order_by(aliases.c.name)):
        names[row.release_id].append(row.name)
    return tuple(
        ReleaseEntry(**row, tags=tuple(tags.get(row["id"], ())), aliases=tuple(names.get(row["id"], ())))
        for row in found
    )


def _conditions(project: str, query: ReleaseQuery) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for column, wanted in (
        (releases.c.decision, query.decision),
        (releases.c.model, query.model),
        (releases.c.base, query.base),
    ):
        if wanted is not None:
            found.append(column == wanted)
    if query.since is not None:
        found.append(releases.c.created_at >= query.since)
    if not query.collected:
        found.append(releases.c.collected_at.is_(None))
    if query.tag is not None:
        found.append(releases.c.id.in_(_tagged(project).where(release_tags.c.tag == query.tag)))
    if query.search:
        found.append(_says(project, query.search))
    return found


def _says(project: str, text: str) -> ColumnElement[bool]:
    def holds(column: Any) -> ColumnElement[bool]:
        found: ColumnElement[bool] = func.lower(column).contains(text.lower(), autoescape=True)
        return found

    noted = select(release_notes.c.release_id).where(release_notes.c.project == project)
    columns = (releases.c.id, releases.c.version, releases.c.base, releases.c.run_id, releases.c.model)
    return or_(
        *(holds(column) for column in columns),
        releases.c.id.in_(_tagged(project).where(holds(release_tags.c.tag))),
        releases.c.id.in_(noted.where(holds(release_notes.c.text))),
    )


def _tagged(project: str) -> Select[Any]:
    return select(release_tags.c.release_id).where(release_tags.c.project == project)
