"""The training runs of a project and how each stands.

In: a run's id, folder and plan, then its changes of state. Out: entries, newest first. Plan,
outcome and error are kept as JSON, so that an old run can be listed by a newer version.
"""

from typing import Any

from sqlalchemy import ColumnElement, RowMapping, select
from sqlalchemy.exc import IntegrityError

from graftwork.records.base import Record
from graftwork.records.errors import Busy, UserMistake
from graftwork.records.run import RunState
from graftwork.store.database import Database
from graftwork.store.schema import runs


class RunEntry(Record):
    """One run as the store knows it."""

    id: str
    state: RunState
    folder: str
    created_at: str
    updated_at: str
    plan: dict[str, Any]
    outcome: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class RunStore:
    """The runs of one project."""

    def __init__(self, database: Database, *, project: str) -> None:
        self._database = database
        self._project = project

    def create(self, run_id: str, *, folder: str, plan: dict[str, Any], when: str) -> RunEntry:
        """Enter a new run as planned. An id is used once."""
        entry = RunEntry(
            id=run_id, state="planned", folder=folder, created_at=when, updated_at=when, plan=plan
        )
        try:
            with self._database.write() as connection:
                connection.execute(runs.insert().values(project=self._project, **entry.model_dump()))
        except IntegrityError as error:
            raise Busy(
                f"run {run_id} exists already",
                why="another process entered it, or an earlier one did",
                fix="go on with the run that exists (`graft status`), or plan a new one",
                where=self._database.name,
            ) from error
        return entry

    def update(
        self,
        run_id: str,
        *,
        state: RunState,
        when: str,
        outcome: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
    ) -> RunEntry:
        """Set the state. An error belongs to the state it came with; an outcome stays once it is there."""
        values: dict[str, Any] = {"state": state, "updated_at": when, "error": error}
        if outcome is not None:
            values["outcome"] = outcome
        with self._database.write() as connection:
            changed = connection.execute(
                runs.update().where(self._is(run_id)).values(**values).returning(*runs.c)
            )
            row = changed.mappings().one_or_none()
        if row is None:
            raise UserMistake(
                f"there is no run {run_id}", fix="`graft status` names the runs", where=self._database.name
            )
        return _entry(row)

    def get(self, run_id: str) -> RunEntry | None:
        with self._database.read() as connection:
            row = connection.execute(select(runs).where(self._is(run_id))).mappings().one_or_none()
        return None if row is None else _entry(row)

    def list(self, *, limit: int = 100) -> tuple[RunEntry, ...]:
        """The newest first."""
        query = select(runs).where(runs.c.project == self._project).order_by(runs.c.seq.desc()).limit(limit)
        with self._database.read() as connection:
            return tuple(_entry(row) for row in connection.execute(query).mappings())

    def _is(self, run_id: str) -> ColumnElement[bool]:
        return (runs.c.project == self._project) & (runs.c.id == run_id)


def _entry(row: RowMapping) -> RunEntry:
    return RunEntry(**{name: row[name] for name in RunEntry.model_fields})
