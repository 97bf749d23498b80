"""How far plans were off on a machine, so that the next plan knows better.

In: the residuals of a finished run. Out: those of the latest runs with the same device and base.
Shared by all projects of the database: a machine is as fast for one as for the other.
"""

from collections.abc import Sequence

from sqlalchemy import select

from graftwork.records.base import Record
from graftwork.records.plan import Residual
from graftwork.store.database import Database
from graftwork.store.schema import residuals

STAGE = "stage:"
"""Begins the base of entries that are about a stage's time and not about a training run."""


class PastRun(Record):
    """The residuals of one run."""

    run_id: str
    device: str
    recorded_at: str
    residuals: tuple[Residual, ...]


class Residuals:
    """What plans said beside what came of it, by device and base model."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, run_id: str, *, device: str, base: str, found: Sequence[Residual], when: str) -> None:
        """Keep the residuals of a run. Said again for the same run, the last word counts."""
        body = [residual.model_dump(mode="json") for residual in found]
        with self._database.write() as connection:
            connection.execute(residuals.delete().where(residuals.c.run_id == run_id))
            connection.execute(
                residuals.insert().values(
                    run_id=run_id, device=device, base=base, recorded_at=when, body=body
                )
            )

    def recent(self, *, device: str, base: str, runs: int = 10) -> tuple[Residual, ...]:
        """The residuals of the latest runs on this device with this base, the newest run first."""
        query = (
            select(residuals.c.body)
            .where(residuals.c.device == device, residuals.c.base == base)
            .order_by(residuals.c.seq.desc())
            .limit(runs)
        )
        with self._database.read() as connection:
            bodies = tuple(connection.scalars(query))
        return tuple(Residual.model_validate(one) for body in bodies for one in body)

    def past(self, *, runs: int = 50) -> tuple[PastRun, ...]:
        """The latest training runs of all kinds and machines, the newest first."""
        columns = (residuals.c.run_id, residuals.c.device, residuals.c.recorded_at, residuals.c.body)
        training = residuals.c.base.not_like(f"{STAGE}%")
        query = select(*columns).where(training).order_by(residuals.c.seq.desc()).limit(runs)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return tuple(
            PastRun(
                run_id=row.run_id,
                device=row.device,
                recorded_at=row.recorded_at,
                residuals=tuple(Residual.model_validate(one) for one in row.body),
            )
            for row in rows
        )
