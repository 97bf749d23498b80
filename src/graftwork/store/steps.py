"""What each step of a project last did, so that it is not done again for the same inputs.

In: a step's name, the fingerprint of its inputs, its output. Out: the same, later. Does not know
what a step is.
"""

from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, select

from graftwork.store.database import Database
from graftwork.store.schema import steps


@dataclass(frozen=True)
class StepEntry:
    """The last time a step came to its end."""

    step: str
    fingerprint: str
    output: dict[str, Any]
    finished_at: str
    seconds: float


class StepLedger:
    """The ledger of one project."""

    def __init__(self, database: Database, *, project: str) -> None:
        self._database = database
        self._project = project

    def get(self, step: str) -> StepEntry | None:
        query = select(steps).where(self._is(step))
        with self._database.read() as connection:
            row = connection.execute(query).mappings().one_or_none()
        return (
            None if row is None else StepEntry(**{field.name: row[field.name] for field in fields(StepEntry)})
        )

    def put(
        self, step: str, *, fingerprint: str, output: dict[str, Any], finished_at: str, seconds: float
    ) -> None:
        """Remember what the step did; what it did before is forgotten."""
        with self._database.write() as connection:
            connection.execute(steps.delete().where(self._is(step)))
            connection.execute(
                steps.insert().values(
                    project=self._project,
                    step=step,
                    fingerprint=fingerprint,
                    output=output,
                    finished_at=finished_at,
                    seconds=seconds,
                )
            )

    def forget(self, step: str) -> None:
        """The step has to be done again, whatever its inputs."""
        with self._database.write() as connection:
            connection.execute(steps.delete().where(self._is(step)))

    def _is(self, step: str) -> ColumnElement[bool]:
        return (steps.c.project == self._project) & (steps.c.step == step)
