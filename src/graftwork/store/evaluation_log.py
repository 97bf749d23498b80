"""How often a test set was used: each further evaluation makes a lucky result more likely.

Counts over all projects of the database. Test sets that share questions count together, so that a set that
grew, or whose file was renamed, is not a fresh one.
"""

from collections.abc import Collection

from sqlalchemy import Connection, func, select

from graftwork.store.database import Database
from graftwork.store.schema import look_questions, looks

SHARED = 0.05
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
            known = select(func.count()).where(look_questions.c.cases_hash == cases_hash)
            if questions and not connection.scalar(known):
                rows = [
                    {"cases_hash": cases_hash, "question": question} for question in sorted(set(questions))
                ]
                connection.execute(look_questions.insert(), rows)
        return number

    def count(self, cases_hash: str) -> int:
        with self._database.read() as connection:
            return _count(connection, cases_hash)

    def candidates(self, cases_hash: str) -> int:
        """How many different subjects were measured: to look at one of them again chooses nothing."""
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
        seen = dict.fromkeys((overlapping[row.cases_hash], row.subject) for row in rows)
        own = (overlapping[cases_hash], subject)
        return list(seen).index(own) + 1 if own in seen else len(seen) + 1


def _find_overlapping_sets(connection: Connection, cases_hash: str) -> dict[str, str]:
    """The sets that share questions with this one, and of each the name of those that ask just the same."""
    own = select(look_questions.c.question).where(look_questions.c.cases_hash == cases_hash)
    near = select(look_questions.c.cases_hash).where(look_questions.c.question.in_(own)).distinct()
    query = select(look_questions).where(look_questions.c.cases_hash.in_(near))
    asked: dict[str, set[str]] = {cases_hash: set()}
    for row in connection.execute(query):
        asked.setdefault(row.cases_hash, set()).add(row.question)
    mine = asked[cases_hash]
    named: dict[frozenset[str], str] = {}
    return {
        other: named.setdefault(frozenset(questions), other)
        for other, questions in sorted(asked.items())
        if other == cases_hash or len(questions & mine) >= SHARED * len(mine)
    }


def _count(connection: Connection, cases_hash: str) -> int:
    query = select(func.count()).select_from(looks).where(looks.c.cases_hash == cases_hash)
    return int(connection.scalar(query) or 0)
