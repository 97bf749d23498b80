"""Training runs, completed steps, plan residuals and the log of evaluations.

Plan, outcome and error of a run are stored as JSON, so that a newer version can list an old run. Residuals
are shared by all projects of the database: a machine is as fast for one as for another.

The log counts how often a test set was used, over all projects of the database: each further evaluation makes
a lucky result more likely. Test sets that share questions count together, so that a set that grew, or whose
file was renamed, is not a fresh one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, func, select
from sqlalchemy.exc import IntegrityError

from graftwork.records.base import Record
from graftwork.records.errors import Busy, UserError
from graftwork.records.plan import Residual
from graftwork.records.run import RunState
from graftwork.store.database import Database, ProjectTable
from graftwork.store.schema import look_questions, looks, residuals, runs, steps


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


class RunStore(ProjectTable):
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
                f"run {run_id} already exists",
                why="another process entered it, or an earlier one did",
                fix="continue the existing run (`graft status`), or plan a new one",
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
            raise UserError(
                f"there is no run {run_id}", fix="`graft status` names the runs", where=self._database.name
            )
        return _entry(row)

    def get(self, run_id: str) -> RunEntry | None:
        return next(self._entries(select(runs).where(self._is(run_id))), None)

    def list(
        self, *, limit: int = 100, offset: int = 0, state: RunState | None = None
    ) -> tuple[RunEntry, ...]:
        """The newest first."""
        query = select(runs).where(*self._in(state)).order_by(runs.c.seq.desc()).limit(limit).offset(offset)
        return tuple(self._entries(query))

    def count(self) -> dict[RunState, int]:
        """How many runs are in each state."""
        query = select(runs.c.state, func.count()).where(*self._in(None)).group_by(runs.c.state)
        return {state: int(count) for state, count in self._database.rows(query)}

    def last_failure(self) -> RunEntry | None:
        """The newest run that ended with an error."""
        query = select(runs).where(*self._in("failed"), runs.c.error.is_not(None))
        return next(self._entries(query.order_by(runs.c.updated_at.desc()).limit(1)), None)

    def _entries(self, query: Select[Any]) -> Iterator[RunEntry]:
        return (_entry(row._mapping) for row in self._database.rows(query))

    def _in(self, state: RunState | None) -> tuple[ColumnElement[bool], ...]:
        mine = runs.c.project == self._project
        return (mine,) if state is None else (mine, runs.c.state == state)

    def _is(self, run_id: str) -> ColumnElement[bool]:
        return (runs.c.project == self._project) & (runs.c.id == run_id)


def _entry(row: RowMapping) -> RunEntry:
    return RunEntry(**{name: row[name] for name in RunEntry.model_fields})


@dataclass(frozen=True)
class StepEntry:
    """The last time a step finished."""

    step: str
    fingerprint: str
    output: dict[str, Any]
    finished_at: str
    seconds: float


def _step_entry(row: RowMapping) -> StepEntry:
    return StepEntry(**{field.name: row[field.name] for field in fields(StepEntry)})


class StepLedger(ProjectTable):
    def get(self, step: str) -> StepEntry | None:
        query = select(steps).where(self._is(step))
        return next((_step_entry(row._mapping) for row in self._database.rows(query)), None)

    def times(self) -> dict[str, StepEntry]:
        """When each step was last done and what it took, without reading its output."""
        query = select(steps.c.step, steps.c.fingerprint, steps.c.finished_at, steps.c.seconds)
        rows = self._database.rows(query.where(steps.c.project == self._project))
        return {row.step: StepEntry(output={}, **row._mapping) for row in rows}

    def put(
        self, step: str, *, fingerprint: str, output: dict[str, Any], finished_at: str, seconds: float
    ) -> None:
        """Record the result of the step; the previous result is discarded."""
        with self._database.write() as connection:
            self._put(connection, StepEntry(step, fingerprint, output, finished_at, seconds))

    def put_if(
        self, entry: StepEntry, allowed: Callable[[Mapping[str, StepEntry]], bool], *, among: str = ""
    ) -> bool:
        """Put an entry if `allowed` says so, in the same transaction; whether it was put.

        It is asked with the newest entries whose names begin with `among`, by default with that of the step.
        """
        condition = steps.c.step.startswith(among, autoescape=True) if among else steps.c.step == entry.step
        with self._database.write() as connection:
            query = select(steps).where(steps.c.project == self._project, condition)
            entries = (_step_entry(row) for row in connection.execute(query).mappings())
            if not allowed({step_entry.step: step_entry for step_entry in entries}):
                return False
            self._put(connection, entry)
        return True

    def forget(self, step: str, *, fingerprint: str | None = None) -> None:
        """The step has to be done again, whatever its inputs; with a fingerprint, only if it is that one."""
        same = () if fingerprint is None else (steps.c.fingerprint == fingerprint,)
        with self._database.write() as connection:
            connection.execute(steps.delete().where(self._is(step), *same))

    def _put(self, connection: Connection, entry: StepEntry) -> None:
        connection.execute(steps.delete().where(self._is(entry.step)))
        connection.execute(steps.insert().values(project=self._project, **vars(entry)))

    def _is(self, step: str) -> ColumnElement[bool]:
        return (steps.c.project == self._project) & (steps.c.step == step)


STAGE = "stage:"
"""Begins the base of entries that are about a stage's time and not about a training run."""


class PastRun(Record):
    """The residuals of one run."""

    run_id: str
    device: str
    recorded_at: str
    residuals: tuple[Residual, ...]


class ResidualStore:
    """Planned and measured figures, by device and base model."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, run_id: str, *, device: str, base: str, found: Sequence[Residual], when: str) -> None:
        """Store the residuals of a run. They replace earlier ones of the same run."""
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
        bodies = self._database.scalars(query)
        return tuple(Residual.model_validate(item) for body in bodies for item in body)

    def past(self, *, runs: int = 50) -> tuple[PastRun, ...]:
        """The latest training runs of all kinds and machines, the newest first."""
        columns = (residuals.c.run_id, residuals.c.device, residuals.c.recorded_at, residuals.c.body)
        training = residuals.c.base.not_like(f"{STAGE}%")
        query = select(*columns).where(training).order_by(residuals.c.seq.desc()).limit(runs)
        return tuple(
            PastRun(
                run_id=row.run_id,
                device=row.device,
                recorded_at=row.recorded_at,
                residuals=tuple(Residual.model_validate(item) for item in row.body),
            )
            for row in self._database.rows(query)
        )


SHARED_QUESTIONS = 0.05
"""The share of common questions from which two sets count together."""


class EvaluationLog:
    """The log of evaluations, by test set. `who` is the one who looks through this object."""

    def __init__(self, database: Database, *, who: str = "") -> None:
        self._database = database
        self._who = who

    def log(self, cases_hash: str, *, subject: str, when: str, questions: Collection[str] = ()) -> int:
        """Log one more evaluation on these cases. Returns its number, counted from 1."""
        with self._database.write() as connection:
            number = _count(connection, cases_hash) + 1
            connection.execute(
                looks.insert().values(
                    cases_hash=cases_hash,
                    number=number,
                    subject=subject,
                    looked_at=when,
                    who=self._who or None,
                )
            )
            stored_questions = select(func.count()).where(look_questions.c.cases_hash == cases_hash)
            if questions and not connection.scalar(stored_questions):
                rows = [
                    {"cases_hash": cases_hash, "question": question} for question in sorted(set(questions))
                ]
                connection.execute(look_questions.insert(), rows)
        return number

    def count(self, cases_hash: str) -> int:
        with self._database.read() as connection:
            return _count(connection, cases_hash)

    def candidates(self, cases_hash: str) -> int:
        """How many different subjects were measured: measuring one of them again does not count."""
        query = select(func.count(looks.c.subject.distinct())).where(looks.c.cases_hash == cases_hash)
        return int(self._database.scalar(query) or 0)

    def position(self, cases_hash: str, *, subject: str) -> int:
        """Which look at these questions this is, counted from 1.

        A look is a subject on a set of questions. The same subject on the same questions again is no further
        look; another subject, or the same one on a set that grew, is.
        """
        with self._database.read() as connection:
            overlapping = _find_overlapping_sets(connection, cases_hash)
            query = (
                select(looks.c.cases_hash, looks.c.subject, looks.c.looked_at, looks.c.number)
                .where(looks.c.cases_hash.in_(overlapping))
                .order_by(looks.c.looked_at, looks.c.number, looks.c.cases_hash)
            )
            rows = connection.execute(query).all()
        # Sets that ask the same questions are one, whatever their hash.
        earlier = dict.fromkeys((overlapping[row.cases_hash], row.subject) for row in rows)
        look = (overlapping[cases_hash], subject)
        return list(earlier).index(look) + 1 if look in earlier else len(earlier) + 1


def _find_overlapping_sets(connection: Connection, cases_hash: str) -> dict[str, str]:
    """The sets that share questions with this one, and of each the name of those that ask just the same."""
    own_questions = select(look_questions.c.question).where(look_questions.c.cases_hash == cases_hash)
    near = select(look_questions.c.cases_hash).where(look_questions.c.question.in_(own_questions)).distinct()
    query = select(look_questions).where(look_questions.c.cases_hash.in_(near))
    by_set: dict[str, set[str]] = {cases_hash: set()}
    for row in connection.execute(query):
        by_set.setdefault(row.cases_hash, set()).add(row.question)
    mine = by_set[cases_hash]
    first_hash: dict[frozenset[str], str] = {}
    return {
        set_hash: first_hash.setdefault(frozenset(questions), set_hash)
        for set_hash, questions in sorted(by_set.items())
        if set_hash == cases_hash or len(questions & mine) >= SHARED_QUESTIONS * len(mine)
    }


def _count(connection: Connection, cases_hash: str) -> int:
    query = select(func.count()).select_from(looks).where(looks.c.cases_hash == cases_hash)
    return int(connection.scalar(query) or 0)
