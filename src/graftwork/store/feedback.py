"""What users said of captured answers: all of it, in the order it came in.

In: feedback, redacted already. Out: the same, each with the exchange that it is about. Nothing is
overwritten: who changes his mind is kept twice, and the reader decides which one counts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, and_, func, select

from graftwork.records.interaction import Capture, Feedback
from graftwork.store.database import Database
from graftwork.store.schema import captures, feedback

_PAGE = 500


class Heard(NamedTuple):
    """`place` grows with the order in which feedback came in."""

    place: int
    feedback: Feedback
    capture: Capture


class FeedbackStore:
    """The feedback of one project."""

    def __init__(self, database: Database, *, project: str) -> None:
        self._database = database
        self._project = project

    def add(self, said: Feedback) -> bool:
        """Keep it; False where there is no such capture."""
        # Captures are never removed, so looking first is safe, and nonsense does not hold up the writers.
        with self._database.read() as connection:
            known = connection.scalar(
                select(captures.c.id).where(
                    captures.c.project == self._project, captures.c.id == said.capture
                )
            )
        if known is None:
            return False
        row = {"project": self._project, "capture_id": said.capture, "given_at": said.at}
        with self._database.write() as connection:
            connection.execute(feedback.insert(), [{**row, "body": said.model_dump(mode="json")}])
        return True

    def of_capture(self, capture_id: str) -> tuple[Feedback, ...]:
        """The oldest first."""
        query = (
            select(feedback.c.body)
            .where(feedback.c.project == self._project, feedback.c.capture_id == capture_id)
            .order_by(feedback.c.seq)
        )
        with self._database.read() as connection:
            return tuple(Feedback.model_validate(body) for body in connection.scalars(query))

    def count(self) -> int:
        query = select(func.count()).select_from(feedback).where(feedback.c.project == self._project)
        with self._database.read() as connection:
            return int(connection.scalar(query) or 0)

    def read_on(
        self, *, after: int = 0, releases: Sequence[str], dealt: str | None = None
    ) -> Iterator[Heard]:
        """What was said since place `after` of what these releases answered, in the order it was said.

        `dealt` takes only what that experiment drew; None takes all, drawn or not.
        """
        same = and_(captures.c.project == feedback.c.project, captures.c.id == feedback.c.capture_id)
        which: list[ColumnElement[bool]] = [captures.c.release.in_(releases)]
        if dealt is not None:
            which.append(captures.c.dealt == dealt)
        while True:
            query = (
                select(feedback.c.seq, feedback.c.body, captures.c.body.label("about"))
                .select_from(feedback.join(captures, same))
                .where(feedback.c.project == self._project, feedback.c.seq > after, *which)
                .order_by(feedback.c.seq)
                .limit(_PAGE)
            )
            with self._database.read() as connection:
                rows = connection.execute(query).all()
            if not rows:
                return
            for row in rows:
                yield Heard(row.seq, Feedback.model_validate(row.body), Capture.model_validate(row.about))
            after = rows[-1].seq
