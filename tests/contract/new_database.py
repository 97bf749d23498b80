"""An empty database of the kind that a test asks for."""

import itertools
from pathlib import Path

import psycopg
import pytest

_numbers = itertools.count(1)


def new_database(kind: str, *, request: pytest.FixtureRequest, folder: Path) -> str:
    """The URL of a database that nobody has opened. PostgreSQL is started when first asked for."""
    if kind == "sqlite":
        return f"sqlite:///{folder / 'state.db'}"
    server = str(request.getfixturevalue("postgres_server"))
    name = f"test_{next(_numbers)}"
    with psycopg.connect(
        server.format(database="postgres").replace("+psycopg", ""), autocommit=True
    ) as admin:
        admin.execute(f"CREATE DATABASE {name}")
    return server.format(database=name)
