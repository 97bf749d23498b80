"""Opens the state database, migrates it to the newest schema, and hands out transactions.

Input: a path (SQLite in WAL mode) or a URL (PostgreSQL). Output: a `Database` at the newest schema, with two
kinds of transaction: `read`, and `write`, of which there is one at a time. Does not know what the tables
mean, nor where the URL came from.

A new database gets its tables at once, an older one by numbered migrations, each applied once: all of it in
one transaction under the write lock, so two processes that open a new database at once make it once, and one
that dies halfway leaves nothing. To change the schema: change `schema`, append a migration here, never edit
an old one. A contract test compares a database with what `schema` declares.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Select,
    create_engine,
    event,
    func,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, DisconnectionError, ProgrammingError

from graftwork.files.disk import explain_os_error, make_folder
from graftwork.records.errors import Busy, Corrupted, EnvironmentFailure, GraftError, UserError, pip_install
from graftwork.store.schema import metadata, schema_migrations
from graftwork.text.redact import hide
from graftwork.version import __version__

# The first word after SQLITE_; extended codes such as SQLITE_READONLY_DIRECTORY share it.
_SQLITE_BUSY = {"BUSY", "LOCKED"}
_SQLITE_DAMAGED = {"NOTADB", "CORRUPT"}
_SQLITE_CLOSED = {"CANTOPEN", "READONLY", "PERM", "AUTH"}
_SQLITE_DISK = {"FULL", "IOERR"}

_POSTGRES_BUSY = {"55P03", "40P01", "57014", "25P03"}
_POSTGRES_FULL = {"53100"}


def explain_driver_error(error: BaseException | None, *, where: str) -> GraftError | None:
    """The expected error that corresponds to this one, if any."""
    if error is None:
        return None
    if hasattr(error, "sqlite_errorname"):
        return _explain_sqlite(_sqlite_code(error), detail=str(error), where=where)
    if hasattr(error, "sqlstate"):
        detail = next(iter(str(error).strip().splitlines()), "it gave no reason")
        state = error.sqlstate
        # Without a state the server never answered; the classes: connection, password, database, shutdown.
        lost = str(state)[:2] in {"08", "28", "3D", "57"}
        if state is None:
            lost = any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)
        return _explain_postgres(state, detail=detail, lost=lost, where=where)
    return None


def redact_driver_error(error: DBAPIError, secrets: Collection[str] = ()) -> None:
    """Reduce a driver's message to its first line, without secrets: further lines may quote whole rows.

    The error itself is changed, for it is logged with the one that it caused.
    """
    original = error.orig
    if original is None or not original.args or not isinstance(original.args[0], str):
        return
    first = hide(next(iter(original.args[0].strip().splitlines()), ""), secrets)
    original.args = (first, *original.args[1:])
    error.args = (f"({type(original).__module__}.{type(original).__name__}) {first}",)


def is_busy(error: BaseException) -> bool:
    """Whether SQLite reports that another process has the file locked."""
    return _sqlite_code(error) in _SQLITE_BUSY


def _sqlite_code(error: BaseException) -> str:
    return str(getattr(error, "sqlite_errorname", "")).removeprefix("SQLITE_").split("_")[0]


def _explain_sqlite(code: str, *, detail: str, where: str) -> GraftError | None:
    if code in _SQLITE_BUSY:
        return _busy(where)
    if code in _SQLITE_DAMAGED:
        return Corrupted(
            "the state database cannot be read",
            why=f"SQLite says: {detail}",
            fix="restore the file from a backup, or move it away to start with an empty one "
            "(release folders are whole without it)",
            where=where,
        )
    if code == "CANTOPEN" and not Path(where).exists():
        return EnvironmentFailure(
            "the state database is gone",
            why="the file was removed or moved away; a new one would be empty, so none is created",
            fix="put it back (mount its disk, restore a backup); running work then continues",
            where=where,
        )
    if code in _SQLITE_CLOSED:
        return EnvironmentFailure(
            "the state database cannot be opened for writing",
            why=f"SQLite says: {detail}",
            fix="change the owner or mode of the file and its folder, or work in another folder",
            where=where,
        )
    if code in _SQLITE_DISK:
        return _disk_full(detail, where)
    return None


def _explain_postgres(state: str | None, *, detail: str, lost: bool, where: str) -> GraftError | None:
    if state in _POSTGRES_BUSY:
        return _busy(where)
    if state in _POSTGRES_FULL:
        return _disk_full(detail, where)
    if lost:
        return EnvironmentFailure(
            "PostgreSQL cannot be reached",
            why=detail,
            fix="check that the server runs and that GRAFT_DATABASE_URL names its host, database, user "
            "and password",
            where=where,
        )
    if state == "42501":
        return EnvironmentFailure(
            "this database user may not do that",
            why=f"PostgreSQL says: {detail}",
            fix="grant it CREATE and USAGE on the schema, or specify a user that has them",
            where=where,
        )
    return None


def _busy(where: str) -> Busy:
    return Busy(
        "another process keeps the state database busy",
        why="it held the write lock for longer than the timeout",
        fix="run the same command again; `graft status` shows what is running",
        where=where,
    )


def _disk_full(detail: str, where: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        "the state could not be written to disk",
        why=f"the database says: {detail}; the change was undone as a whole",
        fix="free some space and run the same command again",
        where=where,
    )


WAIT_SECONDS = 30.0
"""How long a transaction waits for another one before it fails as busy."""
LEAST_IDLE_MS = 20_000
"""PostgreSQL ends a transaction in which nothing happens for longer than this."""

_WRITES = "graft_writes"
_WRITE_LOCK = 0x6772616674  # "graft": the advisory lock that all our writers on PostgreSQL share


@dataclass(frozen=True)
class Database:
    """An open database. Threads may share it; child processes open their own."""

    engine: Engine
    name: str
    """What errors call it: the path, or the URL without what may be secret in it."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What no message repeats."""

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self._explained(), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One writer at a time, from its first statement on: none can deadlock or see stale rows."""
        with self._explained(), self.engine.connect() as plain:
            connection = plain.execution_options(**{_WRITES: True})
            with connection.begin():
                if connection.dialect.name == "postgresql":
                    connection.execute(select(func.pg_advisory_xact_lock(_WRITE_LOCK)))
                yield connection

    def rows(self, query: Select[Any]) -> Sequence[Any]:
        """What one query reads, in a transaction of its own."""
        with self.read() as connection:
            return connection.execute(query).all()

    def scalars(self, query: Select[Any]) -> Sequence[Any]:
        """The first column of each row."""
        with self.read() as connection:
            return connection.scalars(query).all()

    def scalar(self, query: Select[Any]) -> Any:
        """The first column of the first row; None if there is no row."""
        with self.read() as connection:
            return connection.scalar(query)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def count_written_rows(self) -> int:
        """Count the rows ever written to all tables of PostgreSQL: the number changes within seconds after
        every write.
        """
        tables = text(
            "SELECT coalesce(sum(n_tup_ins + n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables "
            "WHERE schemaname = current_schema()"
        )
        with self.read() as connection:
            return int(connection.execute(tables).scalar_one())

    def forget_log(self) -> None:
        """Empty SQLite's write-ahead log, which still holds deleted text; a reader may put it off."""
        if self.is_sqlite:
            with self._explained(), closing(self.engine.raw_connection()) as raw:
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            redact_driver_error(error, self.secrets)
            expected = explain_driver_error(error.orig, where=self.name)
            if expected is None:
                raise
            raise expected from error


class ProjectTable:
    """What the database keeps of one project. Threads may share it."""

    def __init__(self, database: Database, *, project: str) -> None:
        self._database = database
        self._project = project


def open_database(target: str | Path, *, wait_seconds: float = WAIT_SECONDS) -> Database:
    """Open `target`, a path or a URL, create it if it is new, and migrate it to the newest schema."""
    url = _url_of(target)
    if url.get_backend_name() == "sqlite":
        database = _open_sqlite(url, wait_seconds)
    else:
        database = _open_postgresql(url, wait_seconds)
    try:
        migrate(database)
    except BaseException:
        database.close()
        raise
    return database


def find_server(target: str) -> tuple[str, int] | None:
    """Host and port of the server in a URL; None for a file, a socket or an unreadable URL."""
    try:
        url = _url_of(target)
    except UserError:
        return None
    return (url.host, url.port or 5432) if url.host else None


def _url_of(target: str | Path) -> URL:
    if isinstance(target, Path):
        return URL.create("sqlite", database=str(target))
    # What a mistyped URL holds may be a password: no message repeats it, nor the error that quotes it.
    try:
        url = make_url(target)
    except (ArgumentError, ValueError):
        raise _unreadable("it is not of the form dialect://user:password@host/database") from None
    if "@" in (url.host or ""):
        raise _unreadable("there is more than one @ in it: in a password, it is written %40")
    if url.drivername in {"postgres", "postgresql"}:
        url = url.set(drivername="postgresql+psycopg")
    if url.drivername not in {"sqlite", "postgresql+psycopg"}:
        raise UserError(
            f"Graftwork keeps no state in {url.drivername}",
            why="it is made for SQLite and PostgreSQL",
            fix="write sqlite:///path/to/state.db or postgresql://user:password@host/database",
        )
    if url.drivername == "sqlite" and (url.query or url.database in {None, "", ":memory:"}):
        raise UserError(
            "the SQLite URL must name a file and nothing else",
            why="state has to outlive this process",
            fix="write sqlite:///path/to/state.db",
            where=url.set(query={}).render_as_string(hide_password=True),
        )
    return url


def _unreadable(why: str) -> UserError:
    return UserError(
        "the database URL cannot be read",
        why=why,
        fix="write sqlite:///path/to/state.db or postgresql://user:password@host/database",
    )


def _open_sqlite(url: URL, wait_seconds: float) -> Database:
    path = Path(str(url.database))
    try:
        make_folder(path.parent)
        # Created if it is missing, for its owner only. SQLite's log files get the same mode.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise explain_os_error(error, path) from error
    _turn_on_wal(path, wait_seconds)
    # Never created here: lost state must not come back as an empty database.
    where = f"file:{quote(str(path))}?mode=rw"
    engine = create_engine(
        url,
        hide_parameters=True,
        creator=lambda: sqlite3.connect(where, uri=True, timeout=wait_seconds, check_same_thread=False),
    )

    @event.listens_for(engine, "checkout")
    def _look(_raw: Any, record: Any, _proxy: Any) -> None:
        """Reconnect if the file was removed or replaced: writes to it would be lost."""
        if _identity(path) != record.info["file"]:
            raise DisconnectionError("the database file was replaced")

    @event.listens_for(engine, "connect")
    def _prepare(raw: Any, record: Any) -> None:
        record.info["file"] = _identity(path)
        raw.isolation_level = None  # we begin transactions ourselves; sqlite3 would begin them late
        raw.execute("PRAGMA foreign_keys = ON")
        # Under WAL, FULL waits for the disk at each commit: an alias that was moved stays moved.
        raw.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        # A transaction that reads first and writes later can fail with BUSY at once, without waiting.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return Database(engine=engine, name=str(path))


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file it is, regardless of its name; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _turn_on_wal(path: Path, wait_seconds: float) -> None:
    """WAL is a property of the file. Turning it on needs exclusive access to the file, and SQLite's timeout
    does not cover that: two first openers have to try again."""
    deadline = time.monotonic() + wait_seconds
    mode = None
    while mode is None:
        try:
            with closing(sqlite3.connect(path, timeout=wait_seconds)) as raw:
                mode = raw.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.Error as error:
            if is_busy(error) and time.monotonic() < deadline:
                time.sleep(0.01)
                continue
            expected = explain_driver_error(error, where=str(path))
            if expected is None:
                raise
            raise expected from error
    if mode != "wal":
        raise EnvironmentFailure(
            "this file system cannot hold the state database",
            why=f"SQLite cannot keep a write-ahead log there (journal mode stays {mode!r})",
            fix="put the project on a local disk, or set GRAFT_DATABASE_URL to a PostgreSQL database",
            where=str(path),
        )


def _open_postgresql(url: URL, wait_seconds: float) -> Database:
    # Apart from the URL, which libraries print: the password, and all options, of which any may hold one.
    plain = url.set(query={key: value for key, value in url.query.items() if key in {"host", "port"}})
    options: dict[str, Any] = {key: value for key, value in url.query.items() if key not in plain.query}
    secrets = tuple(value for value in options.values() if isinstance(value, str) and not value.isdigit())
    if url.password is not None:
        plain = URL.create(**{**plain._asdict(), "password": None})
        options.setdefault("password", str(url.password))
        secrets = (*secrets, str(url.password))
    name = plain.render_as_string(hide_password=True)
    try:
        engine = create_engine(
            plain,
            pool_pre_ping=True,
            hide_parameters=True,
            connect_args={"connect_timeout": 10, **options},
        )
    except ArgumentError:
        raise _unreadable("a port in it is not a number") from None
    except ModuleNotFoundError as error:
        raise EnvironmentFailure(
            "the PostgreSQL driver is not installed",
            why=f"Python finds no module {error.name}",
            fix=pip_install("postgres"),
            where=name,
        ) from error

    @event.listens_for(engine, "connect")
    def _prepare(raw: Any, _record: Any) -> None:
        wait_ms = int(wait_seconds * 1000)
        raw.execute(f"SET lock_timeout = {wait_ms}")
        # A writer that froze in mid-transaction must not hold the others for good; one on a busy machine may
        # be held up for seconds.
        idle_ms = max(2 * wait_ms, LEAST_IDLE_MS)
        raw.execute(f"SET idle_in_transaction_session_timeout = {idle_ms}")
        raw.commit()

    database = Database(engine=engine, name=name, secrets=secrets)
    try:
        with database.read():
            pass
    except ProgrammingError as error:
        # It can only be about an option in the URL: no statement was sent yet.
        raise UserError(
            "PostgreSQL cannot be queried with this URL",
            why=f"the driver says: {error.orig}",
            fix="correct or remove the option after the question mark",
            where=name,
        ) from error
    return database


@dataclass(frozen=True)
class Migration:
    """Frozen SQL that both databases understand, for databases of the schema before it."""

    number: int
    name: str
    statements: tuple[str, ...] = ()


MIGRATIONS: tuple[Migration, ...] = (Migration(1, "first schema"),)


def migrate(database: "Database", *, migrations: tuple[Migration, ...] = MIGRATIONS) -> tuple[int, ...]:
    """Migrate the database to the newest schema. Returns the numbers of the applied migrations."""
    with database.read() as connection:
        # The usual case, a database that is up to date, must not wait for the write lock.
        if not _missing(connection, migrations, where=database.name):
            return ()
    with database.write() as connection:
        # Another process may have done it while this one waited.
        missing = _missing(connection, migrations, where=database.name)
        is_new = len(missing) == len(migrations)
        if is_new:
            metadata.create_all(connection, checkfirst=False)
        for migration in missing:
            for statement in () if is_new else migration.statements:
                connection.exec_driver_sql(statement)
            applied = {"number": migration.number, "name": migration.name, "applied_by": __version__}
            connection.execute(schema_migrations.insert().values(applied))
    return tuple(m.number for m in missing)


def _missing(
    connection: Connection, migrations: tuple[Migration, ...], *, where: str
) -> tuple[Migration, ...]:
    applied: frozenset[int] = frozenset()
    if inspect(connection).has_table(schema_migrations.name):
        applied = frozenset(connection.scalars(select(schema_migrations.c.number)))
    newest = migrations[-1].number
    if max(applied, default=0) > newest:
        raise EnvironmentFailure(
            "the database was written by a newer Graftwork",
            why=f"it is at migration {max(applied)}; version {__version__} knows migrations up to {newest}",
            fix="upgrade Graftwork here, or use another database (GRAFT_DATABASE_URL, or another folder)",
            where=where,
        )
    return tuple(m for m in migrations if m.number not in applied)
