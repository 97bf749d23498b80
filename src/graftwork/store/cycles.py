"""The coordinator's state in the project's database: one document, changed in one transaction at a time.

It is an entry of the table of steps, along with one entry for each cycle that has ended. On PostgreSQL any
number of coordinators may share it: each change reads the newest document under the write lock.
"""

from collections.abc import Callable
from datetime import UTC, datetime

from sqlalchemy import Connection, select

from graftwork.cycle.state import FORMAT, CoordinatorState, CycleState, require_held
from graftwork.records.base import Record
from graftwork.records.errors import EnvironmentFailure
from graftwork.store.runs import StepEntry, StepLedger
from graftwork.store.schema import steps

ENTRY = "cycle"


class CycleTable(StepLedger):
    def read(self) -> CoordinatorState:
        with self._database.read() as connection:
            return self._load(connection)

    def change(self, change: Callable[[CoordinatorState], CoordinatorState]) -> CoordinatorState:
        with self._database.write() as connection:
            before = self._load(connection)
            after = change(before)
            if after == before:
                return after
            self._keep(connection, ENTRY, str(after.format), after)
            cycle = after.cycle
            if cycle is not None and not cycle.is_open:
                self._keep(connection, name_cycle(cycle.number), cycle.outcome, cycle)
        return after

    def history(self, *, limit: int = 20) -> tuple[CycleState, ...]:
        # Names of a cycle's own entries continue with another slash.
        ended = steps.c.step.like(f"{ENTRY}/%") & steps.c.step.not_like(f"{ENTRY}/%/%")
        query = select(steps.c.output).where(steps.c.project == self._project, ended)
        bodies = self._database.scalars(query.order_by(steps.c.step.desc()).limit(limit))
        return tuple(CycleState.model_validate(body) for body in bodies)

    def keep_output(self, cycle: CycleState, held_step: str, step: str, output: Record) -> None:
        """Keep what a step made, by who holds `held_step` in this cycle; raises Superseded otherwise.

        In one transaction: a coordinator that lost its claim must not replace what its successor made.
        """
        claimed = cycle.step(held_step)
        with self._database.write() as connection:
            require_held(self._load(connection), held_step, claimed.token if claimed is not None else 0)
            self._keep(connection, name_cycle(cycle.number, step), output.fingerprint(), output)

    def _load(self, connection: Connection) -> CoordinatorState:
        body = connection.scalar(select(steps.c.output).where(self._is(ENTRY)))
        if body is None:
            return CoordinatorState()
        if int(body.get("format", 0)) > FORMAT:
            raise EnvironmentFailure(
                "the state of the coordinator was written by a newer graftwork",
                why=f"it has format {body['format']}; this version knows {FORMAT}",
                fix="upgrade graftwork here; the cycle itself is not affected",
                where=self._database.name,
            )
        return CoordinatorState.model_validate(body)

    def _keep(self, connection: Connection, name: str, mark: str, document: Record) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._put(connection, StepEntry(name, mark, document.model_dump(mode="json"), now, 0.0))


def name_cycle(number: int, step: str = "") -> str:
    """The entry of a cycle, or of what one of its steps made."""
    name = f"{ENTRY}/{number:06d}"
    return f"{name}/{step}" if step else name
