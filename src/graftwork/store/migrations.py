"""How a database gets its tables: a new one at once, an older one by numbered migrations, each applied once.

In: an open database. Out: the same database at the newest schema, or untouched. All of it is one transaction
under the write lock, so two processes that open a new database at once make it once, and one that dies
halfway leaves nothing.

To change the schema: change `schema`, append a migration here, never edit an old one. A contract test
compares a database with what `schema` declares.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, select

from graftwork.records.errors import EnvironmentLacks
from graftwork.store.schema import metadata, schema_migrations
from graftwork.version import __version__

if TYPE_CHECKING:
    from graftwork.store.database import Database


@dataclass(frozen=True)
class Migration:
    """Frozen SQL that both databases understand, for databases of the schema before it."""

    number: int
    name: str
    statements: tuple[str, ...] = ()


MIGRATIONS: tuple[Migration, ...] = (Migration(1, "first schema"),)


def migrate(database: "Database", *, migrations: tuple[Migration, ...] = MIGRATIONS) -> tuple[int, ...]:
    """Bring the database to the newest schema. Returns the numbers of the applied migrations."""
    with database.read() as connection:
        # The usual case, a database that is up to date, must not wait for the write lock.
        if not _missing(connection, migrations, where=database.name):
            return ()
    with database.write() as connection:
        # Another process may have done it while this one waited.
        missing = _missing(connection, migrations, where=database.name)
        is_new = len(missing) == len(migrations)
        if is_new:
            metadata.create_all(connection, checkfirst=False)
        for migration in missing:
            for statement in () if is_new else migration.statements:
                connection.exec_driver_sql(statement)
            applied = {"number": migration.number, "name": migration.name, "applied_by": __version__}
            connection.execute(schema_migrations.insert().values(applied))
    return tuple(m.number for m in missing)


def _missing(
    connection: Connection, migrations: tuple[Migration, ...], *, where: str
) -> tuple[Migration, ...]:
    applied: frozenset[int] = frozenset()
    if inspect(connection).has_table(schema_migrations.name):
        applied = frozenset(connection.scalars(select(schema_migrations.c.number)))
    newest = migrations[-1].number
    if max(applied, default=0) > newest:
        raise EnvironmentLacks(
            "the database was written by a newer Graftwork",
            why=f"it is at migration {max(applied)}; version {__version__} knows migrations up to {newest}",
            fix="upgrade Graftwork here, or name another database (GRAFT_DATABASE_URL, or another folder)",
            where=where,
        )
    return tuple(m for m in migrations if m.number not in applied)
