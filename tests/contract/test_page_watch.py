"""The mark by which the web page notices changes, on both databases."""

import time

from graftwork.api.overview import mark_project
from graftwork.api.project import open_project

DEADLINE_SECONDS = 40


def test_a_written_row_changes_the_mark_and_a_read_does_not(database_url, database, tmp_path, monkeypatch):
    from sqlalchemy import text

    monkeypatch.setenv("GRAFT_DATABASE_URL", database_url)
    (tmp_path / "graft.yaml").write_text("project: p\nbase: small\ndata: {logs: [a.jsonl]}\n")
    watched_project = open_project(tmp_path)

    def write() -> None:
        with database.write() as connection:
            connection.execute(text("UPDATE schema_migrations SET applied_by = 'ada'"))

    def wait_for_another(before: str) -> str:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (mark := mark_project(watched_project)) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return mark

    first = wait_for_another("none yet")
    write()
    second = wait_for_another(first)
    with database.read() as connection:
        connection.execute(text("SELECT * FROM schema_migrations")).all()
    assert mark_project(watched_project) == second
