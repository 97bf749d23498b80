"""How often somebody looked at a test set: each look makes a lucky result likelier.

In: the hash of the cases and who was measured on them. Out: how many looks there have been. Counts
over all projects of the database: the same cases are the same cases.
"""

from sqlalchemy import Connection, func, select

from graftwork.store.database import Database
from graftwork.store.schema import looks


class Looks:
    """The log of evaluations, by test set."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def log(self, cases_hash: str, *, subject: str, when: str) -> int:
        """Note one more look and say which it is, counted from 1."""
        with self._database.write() as connection:
            number = _count(connection, cases_hash) + 1
            connection.execute(
                looks.insert().values(cases_hash=cases_hash, number=number, subject=subject, looked_at=when)
            )
        return number

    def count(self, cases_hash: str) -> int:
        with self._database.read() as connection:
            return _count(connection, cases_hash)


def _count(connection: Connection, cases_hash: str) -> int:
    query = select(func.count()).select_from(looks).where(looks.c.cases_hash == cases_hash)
    return int(connection.scalar(query) or 0)
