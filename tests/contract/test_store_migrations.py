from collections.abc import Iterator

import pytest
from sqlalchemy import inspect

from graftwork.records.errors import EnvironmentLacks
from graftwork.store.database import Database, open_database
from graftwork.store.migrations import MIGRATIONS, Migration, migrate
from graftwork.store.schema import metadata, schema_migrations


def test_a_new_database_is_brought_to_the_newest_schema(database: Database):
    with database.read() as connection:
        rows = connection.execute(schema_migrations.select()).all()
    assert [row.number for row in rows] == [migration.number for migration in MIGRATIONS]


def test_migrations_are_numbered_without_a_gap():
    assert [migration.number for migration in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))


def test_the_migrated_database_is_what_the_schema_declares(database: Database):
    found = inspect(database.engine)
    assert set(found.get_table_names()) == set(metadata.tables)
    for name, table in metadata.tables.items():
        columns = {column["name"]: column for column in found.get_columns(name)}
        assert list(columns) == [column.name for column in table.columns]
        for column in table.columns:
            real = columns[column.name]
            assert real["nullable"] == (column.nullable and not column.primary_key) or column.name == "seq"
            declared = column.type.compile(database.engine.dialect)
            assert affinity(real["type"].compile(database.engine.dialect)) == affinity(declared)
        assert found.get_pk_constraint(name)["constrained_columns"] == [c.name for c in table.primary_key]
        assert index_columns(found.get_indexes(name)) == {
            index.name: [column.name for column in index.columns] for index in table.indexes
        }
        assert sorted(u["column_names"] for u in found.get_unique_constraints(name)) == sorted(
            [column.name for column in constraint.columns]
            for constraint in table.constraints
            if type(constraint).__name__ == "UniqueConstraint"
        )
        assert sorted(key["constrained_columns"] for key in found.get_foreign_keys(name)) == sorted(
            constraint.column_keys for constraint in table.foreign_key_constraints
        )


def affinity(sql_type: str) -> str:
    floats = {"DOUBLE", "DOUBLE PRECISION", "DOUBLE_PRECISION", "FLOAT", "REAL"}
    return "FLOAT" if sql_type in floats else sql_type


def index_columns(indexes) -> dict[str, list[str]]:
    return {i["name"]: i["column_names"] for i in indexes if not i.get("duplicates_constraint")}


def test_opening_again_applies_nothing(database: Database):
    assert migrate(database) == ()


def test_only_the_missing_migrations_are_applied(database: Database):
    more = Migration(len(MIGRATIONS) + 1, "one more", ("CREATE TABLE more (name TEXT)",))
    assert migrate(database, migrations=(*MIGRATIONS, more)) == (more.number,)
    assert "more" in inspect(database.engine).get_table_names()


def test_a_migration_that_fails_leaves_nothing(database: Database):
    broken = Migration(len(MIGRATIONS) + 1, "broken", ("CREATE TABLE half (id TEXT)", "CREATE NONSENSE"))
    with pytest.raises(Exception, match=r"(?i)syntax"):
        migrate(database, migrations=(*MIGRATIONS, broken))
    assert "half" not in inspect(database.engine).get_table_names()
    assert migrate(database) == ()


def test_a_database_from_the_future_is_refused_and_left_alone(database: Database, database_url: str):
    with database.write() as connection:
        connection.execute(schema_migrations.insert().values(number=99, name="later", applied_by="9.0"))
    with pytest.raises(EnvironmentLacks, match="newer Graftwork") as refused:
        open_database(database_url)
    assert "99" in refused.value.why
    assert refused.value.fix


@pytest.fixture
def restarted(database_url: str) -> Iterator[Database]:
    open_database(database_url).close()
    opened = open_database(database_url)
    yield opened
    opened.close()


def test_migrated_rows_are_there_for_the_next_process(restarted: Database):
    assert migrate(restarted) == ()
