"""An empty database of the kind that a test asks for."""

from pathlib import Path

import psycopg
import pytest

BOTH = ("sqlite", "postgresql")
on_both_databases = pytest.mark.parametrize("database_url", BOTH, indirect=True)
"""On PostgreSQL in `make test` too: what depends on its locks, its types or its SQL."""


def new_database(kind: str, *, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of an empty database. PostgreSQL is started when it is first asked for."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'state.db'}"
    url = str(request.getfixturevalue("postgres_server"))
    # An empty schema is as good as a new database, and no template has to be copied for it.
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as admin:
        admin.execute("DROP SCHEMA public CASCADE")
        admin.execute("CREATE SCHEMA public")
    return url
