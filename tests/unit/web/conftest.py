"""A project for the page, made once; the page served in a thread, and a browser that has signed in."""

import shutil
import sqlite3
from pathlib import Path

import pytest
from served_page import serve


@pytest.fixture(scope="session", autouse=True)
def user_state(tmp_path_factory):
    """Keys of pages are kept in the user's state; tests have one of their own."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def made_project(embedded_base, tmp_path_factory) -> Path:
    """Not to be changed: tests that change it take a copy."""
    from web_project import make_project

    folder = tmp_path_factory.mktemp("web") / "shop"
    make_project(folder)
    return folder


@pytest.fixture
def shop(made_project, tmp_path) -> Path:
    """A copy that a test may change."""
    left_out = shutil.ignore_patterns("state.db*")  # its logs come and go with the page that reads it
    folder = Path(shutil.copytree(made_project, tmp_path / "shop", ignore=left_out))
    source = sqlite3.connect(made_project / ".graft" / "state.db")
    with sqlite3.connect(folder / ".graft" / "state.db") as database:
        source.backup(database)
        source.close()
        for table, column in (("runs", "folder"), ("runs", "outcome"), ("steps", "output")):
            change = f"UPDATE {table} SET {column} = replace({column}, ?, ?)"
            database.execute(change, (str(made_project), str(folder)))
    database.close()
    return folder


@pytest.fixture(scope="session")
def empty_project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("web") / "empty"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "a.jsonl").write_text('{"prompt": "a question?", "completion": "an answer."}\n')
    (folder / "graft.yaml").write_text("project: empty\nbase: small\ndata: {logs: [logs/a.jsonl]}\n")
    return folder


@pytest.fixture(scope="session")
def page(made_project):
    """The project's page, which only shows."""
    with serve(made_project) as served:
        yield served


@pytest.fixture
def acting(shop):
    """A copy's page where actions are allowed."""
    with serve(shop, allow_actions=True) as served:
        served.folder = shop
        yield served
