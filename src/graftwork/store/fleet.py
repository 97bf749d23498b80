"""The fleet's ledger in the project's database: jobs at places, their states and their cost.

The caps are checked in the transaction that writes the intent: two controllers cannot both take the last
dollar.
"""

import secrets

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError

from graftwork.fleet.control import check_reservation, merge_update
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import Busy, UserError
from graftwork.records.fleet import FleetJob
from graftwork.store.database import ProjectTable
from graftwork.store.schema import fleet_jobs, fleet_keys


class FleetLedger(ProjectTable):
    @property
    def key(self) -> str:
        """Made once for a project in a database. A copy of the project with its database has the same one."""
        query = select(fleet_keys.c.ledger).where(fleet_keys.c.project == self._project)
        stored_key: str | None = self._database.scalar(query)
        if stored_key is not None:
            return stored_key
        with self._database.write() as connection:
            stored_key = connection.scalar(query)
            if stored_key is None:
                stored_key = secrets.token_hex(4)
                connection.execute(fleet_keys.insert().values(project=self._project, ledger=stored_key))
        return stored_key

    def reserve(self, job: FleetJob, caps: CapSettings) -> None:
        try:
            with self._database.write() as connection:
                check_reservation(job, self._all(connection), caps)
                connection.execute(fleet_jobs.insert().values(project=self._project, **_row(job)))
        except IntegrityError as error:
            raise Busy(f"job {job.id} already exists", fix="run the command again") from error

    def update(self, job: FleetJob) -> FleetJob:
        is_job = (fleet_jobs.c.project == self._project) & (fleet_jobs.c.id == job.id)
        with self._database.write() as connection:
            body = connection.scalar(select(fleet_jobs.c.body).where(is_job))
            if body is None:
                raise UserError(f"there is no job {job.id}", fix="`graft fleet list` names the jobs")
            merged = merge_update(FleetJob.model_validate(body), job)
            connection.execute(fleet_jobs.update().where(is_job).values(**_row(merged)))
        return merged

    def get(self, job_id: str) -> FleetJob | None:
        is_job = (fleet_jobs.c.project == self._project) & (fleet_jobs.c.id == job_id)
        body = self._database.scalar(select(fleet_jobs.c.body).where(is_job))
        return None if body is None else FleetJob.model_validate(body)

    def list(self) -> tuple[FleetJob, ...]:
        with self._database.read() as connection:
            return self._all(connection)

    def _all(self, connection: Connection) -> tuple[FleetJob, ...]:
        query = select(fleet_jobs.c.body).where(fleet_jobs.c.project == self._project)
        return tuple(
            FleetJob.model_validate(body) for body in connection.scalars(query.order_by(fleet_jobs.c.seq))
        )


def _row(job: FleetJob) -> dict[str, object]:
    return {
        "id": job.id,
        "place": job.place,
        "run_id": job.run_id,
        "state": job.state,
        "created_at": job.created_at,
        "body": job.model_dump(mode="json"),
    }
