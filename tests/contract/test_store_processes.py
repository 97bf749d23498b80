"""Several processes on one database, and processes that are killed in the middle."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from new_database import on_both_databases
from sqlalchemy import text
from store_samples import PROJECT, release

from graftwork.records.errors import Busy
from graftwork.store.database import MIGRATIONS, Database, open_database
from graftwork.store.releases import ReleaseTable
from graftwork.store.schema import schema_migrations

CHILD = Path(__file__).with_name("store_child.py")


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that is ready to begin; whatever happens, it is gone afterwards."""
    command = [sys.executable, str(CHILD), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def begin(process: subprocess.Popen[str]) -> None:
    process.stdin.write("go\n")
    process.stdin.flush()


@on_both_databases
def test_a_new_database_that_three_processes_open_at_once_is_made_once(database_url: str):
    with child("open", database_url) as a, child("open", database_url) as b, child("open", database_url) as c:
        for process in (a, b, c):
            begin(process)
        assert [process.stdout.readline() for process in (a, b, c)] == ["opened\n"] * 3
    database = open_database(database_url)
    with database.read() as connection:
        assert len(connection.execute(schema_migrations.select()).all()) == len(MIGRATIONS)
    database.close()


@on_both_databases
def test_of_two_processes_that_promote_at_once_exactly_one_wins(database: Database, database_url: str):
    index = ReleaseTable(database, project=PROJECT)
    rivals = [release("rival 1"), release("rival 2")]
    for rival in rivals:
        index.add(rival)
    with (
        child("promote", database_url, rivals[0].id) as one,
        child("promote", database_url, rivals[1].id) as two,
    ):
        begin(one)
        begin(two)
        output = [process.stdout.readline().strip() for process in (one, two)]
    assert sorted(output) == ["lost", "won"]
    assert index.aliases() == {"champion": rivals[output.index("won")].id}
    assert len(index.alias_log("champion")) == 1


@on_both_databases
def test_a_writer_killed_in_the_middle_leaves_a_whole_database(database_url: str):
    acknowledged: list[str] = []
    for round_number, after in enumerate((1, 8)):
        with child("write", database_url, f"round {round_number}") as writer:
            begin(writer)
            acknowledged += [writer.stdout.readline().strip() for _ in range(after)]
            writer.kill()
            # What it had said before it died was done, too.
            acknowledged += [line.strip() for line in writer.stdout if line.endswith("\n")]
        database = open_database(database_url)
        assert_whole(database, acknowledged=acknowledged)
        acknowledged = [
            move.release_id for move in ReleaseTable(database, project=PROJECT).alias_log("champion")
        ]
        database.close()


def assert_whole(database: Database, *, acknowledged: list[str]) -> None:
    with database.write():
        pass  # a server may still be at the commit that the killed client asked for: wait for its lock
    index = ReleaseTable(database, project=PROJECT)
    log = index.alias_log("champion")
    moved_to = [move.release_id for move in log]
    # All that was acknowledged is there, and at most the one move that was under way besides.
    assert moved_to[: len(acknowledged)] == acknowledged
    assert len(moved_to) <= len(acknowledged) + 1
    assert [move.previous for move in log] == [None, *moved_to[:-1]]
    assert index.aliases() == {"champion": moved_to[-1]}
    assert set(moved_to) <= {release.id for release in index.list()}
    if database.engine.dialect.name == "sqlite":
        with database.read() as connection:
            assert connection.execute(text("PRAGMA integrity_check")).scalar() == "ok"
            assert connection.execute(text("PRAGMA foreign_key_check")).all() == []


@on_both_databases
def test_a_writer_that_waits_too_long_gets_an_error_that_the_database_is_busy(
    database: Database, database_url: str
):
    impatient = open_database(database_url, wait_seconds=0.05)
    with database.write(), pytest.raises(Busy) as refused:
        ReleaseTable(impatient, project=PROJECT).add(release("a"))
    assert refused.value.fix
    impatient.close()


@on_both_databases
def test_readers_do_not_wait_for_a_writer(database: Database, database_url: str):
    index = ReleaseTable(database, project=PROJECT)
    index.add(release("a"))
    reader = open_database(database_url, wait_seconds=0.05)
    with database.write():
        assert ReleaseTable(reader, project=PROJECT).list() == (release("a"),)
    reader.close()


@on_both_databases
def test_a_failure_inside_a_transaction_undoes_all_of_it(database: Database):
    def fail_halfway() -> None:
        with database.write() as connection:
            connection.execute(schema_migrations.insert().values(number=50, name="half", applied_by="me"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    with database.read() as connection:
        assert len(connection.execute(schema_migrations.select()).all()) == len(MIGRATIONS)
