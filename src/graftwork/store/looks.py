"""How often somebody looked at a test set: each look makes a lucky result likelier.

In: the hash of the cases, who was measured on them, who asked. Out: how many looks there have been, and
at how many different candidates. Counts over all projects of the database: the same cases are the same
cases.
"""

from typing import NamedTuple

from sqlalchemy import Connection, func, select

from graftwork.store.database import Database
from graftwork.store.schema import looks


class Look(NamedTuple):
    """One evaluation on a test set; `who` is empty in logs older than the column."""

    number: int
    subject: str
    when: str
    who: str


class Looks:
    """The log of evaluations, by test set. `who` is the one who looks through this object."""

    def __init__(self, database: Database, *, who: str = "") -> None:
        self._database = database
        self._who = who

    def log(self, cases_hash: str, *, subject: str, when: str) -> int:
        """Note one more look and say which it is, counted from 1."""
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
        return number

    def count(self, cases_hash: str) -> int:
        with self._database.read() as connection:
            return _count(connection, cases_hash)

    def candidates(self, cases_hash: str) -> int:
        """How many different subjects were measured: to look at one of them again chooses nothing."""
        query = select(func.count(looks.c.subject.distinct())).where(looks.c.cases_hash == cases_hash)
        with self._database.read() as connection:
            return int(connection.scalar(query) or 0)

    def history(self, cases_hash: str) -> tuple[Look, ...]:
        """Every look at these cases, the oldest first."""
        query = select(looks).where(looks.c.cases_hash == cases_hash).order_by(looks.c.number)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return tuple(Look(row.number, row.subject, row.looked_at, row.who or "") for row in rows)


def _count(connection: Connection, cases_hash: str) -> int:
    query = select(func.count()).select_from(looks).where(looks.c.cases_hash == cases_hash)
    return int(connection.scalar(query) or 0)
