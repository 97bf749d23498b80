import sqlite3
import traceback
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, StatementError

from graftwork.records.errors import Corrupted, EnvironmentFailure, GraftError, UserError
from graftwork.store.database import open_database
from graftwork.store.schema import captures, json_text


def test_a_path_and_a_url_open_the_same_file(tmp_path: Path):
    path = tmp_path / "new folder" / "state ? #.db"
    by_path = open_database(path)
    with by_path.read() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(text("PRAGMA foreign_keys")).scalar() == 1
    by_path.close()
    assert path.exists()
    plain = tmp_path / "plain.db"
    open_database(f"sqlite:///{plain}").close()
    assert plain.exists()


@pytest.mark.parametrize(
    "url",
    ["sqlite://", "sqlite:///:memory:", "sqlite:///x.db?mode=ro", "mysql://u:secret@h/d", "no url:secret@"],
)
def test_a_url_that_cannot_keep_state_is_refused_without_repeating_it(url: str):
    with pytest.raises(UserError) as refused:
        open_database(url)
    assert refused.value.fix
    assert "secret" not in str(refused.value.as_json())


def test_a_file_that_is_no_database_is_named_and_left_alone(tmp_path: Path):
    path = tmp_path / "state.db"
    path.write_bytes(b"these are notes, not a database\n" * 100)
    before = path.read_bytes()
    with pytest.raises(Corrupted) as refused:
        open_database(path)
    assert refused.value.where == str(path)
    assert path.read_bytes() == before


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path):
    with pytest.raises(EnvironmentFailure) as refused:
        open_database(tmp_path)
    assert refused.value.fix


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFailure):
        open_database(tmp_path / "file" / "state.db")


def test_a_server_that_is_not_there_is_reported_without_the_password(tmp_path: Path):
    with pytest.raises(EnvironmentFailure, match="cannot be reached") as refused:
        open_database(f"postgresql://ada:secret@/graft?host={tmp_path}")
    assert "secret" not in str(refused.value.as_json())


SECRET = "hush-hush-42"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ada@/graft?host={folder}&password={secret}",
        "postgresql://ada:{secret}@/graft?host={folder}&sslpassword={secret}&passfile=/{secret}",
        "postgresql://ada@/graft?host={folder}&options=-c%20my.key%3D{secret}",
        "postgresql://ada@/graft?host={folder}&keepalives={secret}",
        "postgresql://ada@/graft?host={folder}&no_such_option={secret}",
        "postgresql://ada@/graft?host={folder}&port={secret}",
        # A password that should have been quoted: parts of it land elsewhere.
        "postgresql://ada:x@{secret}@127.0.0.1:1/graft",
        "postgresql://ada:x/{secret}@127.0.0.1:1/graft",
        "postgresql://ada:{secret}@127.0.0.1:{secret}/graft",
        "sqlite:///x.db?password={secret}",
    ],
)
def test_no_error_repeats_a_secret_of_the_url(tmp_path: Path, url: str):
    with pytest.raises(GraftError) as refused:
        open_database(url.format(folder=tmp_path, secret=SECRET))
    assert SECRET not in str(refused.value.as_json())
    shown = "".join(traceback.format_exception(refused.value))
    assert SECRET not in shown
    assert refused.value.fix


@pytest.mark.parametrize("way", [IntegrityError, StatementError, EnvironmentFailure])
def test_no_failure_shows_the_values_of_a_statement(tmp_path: Path, way: type[Exception]):
    database = open_database(tmp_path / "state.db")
    add = text("INSERT INTO looks VALUES (:c, :n, :s, 't', 'w')")
    values = {"c": SECRET, "n": 1, "s": "s"}

    def fail() -> None:
        with database.write() as connection:
            if way is IntegrityError:
                connection.execute(add, [values, values])
            elif way is StatementError:
                connection.execute(captures.insert(), {"id": SECRET, "body": {SECRET: object()}})
            else:
                pages = connection.execute(text("PRAGMA page_count")).scalar()
                connection.execute(text(f"PRAGMA max_page_count = {pages}"))
                connection.execute(add, [{**values, "n": n, "s": "x" * 4000} for n in range(100)])

    with pytest.raises(way) as failed:
        fail()
    assert SECRET not in "".join(traceback.format_exception(failed.value))
    database.close()


def test_a_full_disk_undoes_the_change_and_says_so(tmp_path: Path):
    database = open_database(tmp_path / "state.db")

    def fill() -> None:
        with database.write() as connection:
            pages = connection.execute(text("PRAGMA page_count")).scalar()
            connection.execute(text(f"PRAGMA max_page_count = {pages}"))
            for number in range(100):
                connection.execute(
                    text("INSERT INTO looks VALUES ('c', :n, :s, 't', 'w')"), {"n": number, "s": "x" * 4000}
                )

    with pytest.raises(EnvironmentFailure, match="could not be written"):
        fill()
    with database.read() as connection:
        assert connection.execute(text("SELECT count(*) FROM looks")).scalar() == 0
    database.close()


def test_a_mistake_of_the_program_is_not_dressed_up(tmp_path: Path):
    database = open_database(tmp_path / "state.db")
    statement = text("INSERT INTO aliases VALUES ('p', 'champion', 'no such release')")
    with pytest.raises(IntegrityError), database.write() as connection:
        connection.execute(statement)
    database.close()


def test_an_older_sqlite_file_is_turned_to_wal(tmp_path: Path):
    path = tmp_path / "state.db"
    sqlite3.connect(path).execute("CREATE TABLE theirs (id TEXT)").connection.close()
    open_database(path).close()
    assert sqlite3.connect(path).execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_json_is_kept_as_text_that_any_database_takes():
    assert json_text({"a": "\x00", "b": "é漢"}) == '{"a":"\\u0000","b":"é漢"}'
    json_text("half \ud800").encode()
