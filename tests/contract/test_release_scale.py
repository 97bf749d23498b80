"""With a thousand releases as with ten: the same number of queries and of files read."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from registry_workers import make_release, open_work
from sqlalchemy import event
from store_samples import release

from graftwork.records.release import ReleaseQuery
from graftwork.registry.index import find_release
from graftwork.registry.project import promote_release, rollback_alias
from graftwork.store.schema import releases as table

_opened: list[str] = []
_watching: list[bool] = []


def _watch(name: str, arguments: tuple) -> None:
    if _watching and name == "open":
        _opened.append(str(arguments[0]))


@contextmanager
def counted(work) -> Iterator[dict[str, int]]:
    """How many statements and how many openings of the store's files the block takes."""
    found = {"queries": 0, "files": 0}

    def count(*_arguments) -> None:
        found["queries"] += 1

    event.listen(work.database.engine, "before_cursor_execute", count)
    _opened.clear()
    _watching.append(True)
    try:
        yield found
    finally:
        _watching.clear()
        event.remove(work.database.engine, "before_cursor_execute", count)
        found["files"] = sum("releases" in path for path in _opened)


@pytest.fixture(scope="module", autouse=True)
def _audited():
    sys.addaudithook(_watch)


def fill(work, count: int) -> None:
    """Many releases in one statement: how they get in is not the question here."""
    rows = []
    for number in range(count):
        one = release(f"filler {count} {number}")
        fields = {
            "id",
            "model",
            "base",
            "decision",
            "run_id",
            "dataset_hash",
            "parent",
            "created_at",
            "project",
        }
        body = one.model_dump(mode="json")
        rows.append({**one.model_dump(include=fields), "version": f"9.{count}.{number}", "body": body})
    with work.database.write() as connection:
        connection.execute(table.insert(), rows)


def test_list_show_and_promote_cost_the_same_with_many_releases(tmp_path: Path, database_url: str):
    settings = {"project": "cited-answers", "data": {"logs": ["l.jsonl"]}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    work = open_work(tmp_path, database_url)
    first, second = (
        make_release(work, tmp_path / name, weights=name.encode()) for name in ("first", "second")
    )
    promote_release(work, first)
    costs = []
    for count in (10, 990):
        fill(work, count)
        with counted(work) as listing:
            assert len(work.releases.entries(ReleaseQuery())) >= count
        with counted(work) as look:
            work.releases.entry(find_release(work.releases, "champion").id)
        with counted(work) as promotion:
            promote_release(work, second)
        with counted(work) as back:
            rollback_alias(work)
        costs.append((listing, look, promotion, back))
    assert costs[0] == costs[1]
    listing, look, promotion, back = costs[1]
    assert listing["files"] == look["files"] == 0
    assert promotion["files"] > 0
    assert back["files"] > 0
    work.database.close()
