"""The exchanges that the endpoint served and kept: the one way back from serving to data.

In: captures, redacted already, many at a time. Out: the newest, those of a release, those that hold
a text, or all in order. Does not know how they become training data.
"""

from collections.abc import Iterable, Iterator

from sqlalchemy import Select, Text, func, or_, select, type_coerce

from graftwork.records.capture import Capture
from graftwork.store.database import Database
from graftwork.store.schema import captures, json_text

_PAGE = 500


class CaptureStore:
    """The captures of one project."""

    def __init__(self, database: Database, *, project: str) -> None:
        self._database = database
        self._project = project

    def add(self, new: Iterable[Capture]) -> int:
        """Keep them all or none; one that is kept already is not kept twice. Says how many were new."""
        by_id = {capture.id: capture for capture in new}
        added = 0
        with self._database.write() as connection:
            ids = tuple(by_id)
            # Databases limit how many values one statement may name.
            for start in range(0, len(ids), _PAGE):
                page = ids[start : start + _PAGE]
                known = set(
                    connection.scalars(
                        select(captures.c.id).where(
                            captures.c.project == self._project, captures.c.id.in_(page)
                        )
                    )
                )
                rows = [self._row(by_id[id_]) for id_ in page if id_ not in known]
                if rows:
                    connection.execute(captures.insert(), rows)
                added += len(rows)
        return added

    def get(self, capture_id: str) -> Capture | None:
        found = self._fetch(self._all().where(captures.c.id == capture_id))
        return found[0] if found else None

    def recent(self, *, limit: int = 20) -> tuple[Capture, ...]:
        """The newest first."""
        return self._fetch(self._all().order_by(captures.c.seq.desc()).limit(limit))

    def of_release(self, release: str, *, limit: int = 1000) -> tuple[Capture, ...]:
        """What a release answered, the newest first."""
        query = self._all().where(captures.c.release == release)
        return self._fetch(query.order_by(captures.c.seq.desc()).limit(limit))

    def find(self, text: str, *, limit: int = 20) -> tuple[Capture, ...]:
        """Those whose id is `text` or that hold it, letter for letter, the newest first."""
        # SQLite's LIKE takes A for a and PostgreSQL's does not; a position is the same on both.
        position = func.instr if self._database.engine.dialect.name == "sqlite" else func.strpos
        holds = position(type_coerce(captures.c.body, Text), json_text(text)[1:-1]) > 0
        query = self._all().where(or_(captures.c.id == text, holds))
        return self._fetch(query.order_by(captures.c.seq.desc()).limit(limit))

    def count(self, *, release: str | None = None) -> int:
        query = select(func.count()).select_from(captures).where(captures.c.project == self._project)
        if release is not None:
            query = query.where(captures.c.release == release)
        with self._database.read() as connection:
            return int(connection.scalar(query) or 0)

    def export(self, *, release: str | None = None) -> Iterator[Capture]:
        """All in the order they came in. Read page by page, so that no transaction stays open."""
        last = 0
        while True:
            query = (
                select(captures.c.seq, captures.c.body)
                .where(captures.c.project == self._project, captures.c.seq > last)
                .order_by(captures.c.seq)
                .limit(_PAGE)
            )
            if release is not None:
                query = query.where(captures.c.release == release)
            with self._database.read() as connection:
                rows = connection.execute(query).all()
            if not rows:
                return
            for row in rows:
                yield Capture.model_validate(row.body)
            last = rows[-1].seq

    def _all(self) -> Select[tuple[dict[str, object]]]:
        return select(captures.c.body).where(captures.c.project == self._project)

    def _fetch(self, query: Select[tuple[dict[str, object]]]) -> tuple[Capture, ...]:
        with self._database.read() as connection:
            return tuple(Capture.model_validate(body) for body in connection.scalars(query))

    def _row(self, capture: Capture) -> dict[str, object]:
        return {
            "project": self._project,
            "id": capture.id,
            "captured_at": capture.at,
            "release": capture.release,
            "body": capture.model_dump(mode="json"),
        }
