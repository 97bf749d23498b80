"""The tables as the queries see them, declared once.

SQLAlchemy `Table` objects. Knows nothing of connections.

Times are ISO strings from the caller. `seq` is the order of insertion: it decides what is
newest, because clocks of several machines do not agree.
"""

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)


class JsonText(TypeDecorator[Any]):
    """JSON kept as text: the same characters come back, on both databases.

    PostgreSQL's own JSON types refuse NUL and half surrogate pairs, which logs do hold: the one is
    escaped by `json`, the other becomes a question mark.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json_text(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def json_text(value: Any) -> str:
    """The text that `JsonText` keeps for a value; a search for text has to look for this form."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def _seq() -> Column[int]:
    """A number that grows and is never used twice."""
    return Column("seq", BigInteger().with_variant(Integer(), "sqlite"), Identity(), primary_key=True)


metadata = MetaData()

schema_migrations = Table(
    "schema_migrations",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("applied_by", Text, nullable=False),
)

steps = Table(
    "steps",
    metadata,
    Column("project", Text, nullable=False),
    Column("step", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("output", JsonText, nullable=False),
    Column("finished_at", Text, nullable=False),
    Column("seconds", Float, nullable=False),
    PrimaryKeyConstraint("project", "step"),
)

runs = Table(
    "runs",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("folder", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("updated_at", Text, nullable=False),
    Column("plan", JsonText, nullable=False),
    Column("outcome", JsonText),
    Column("error", JsonText),
    UniqueConstraint("project", "id"),
    sqlite_autoincrement=True,
)

releases = Table(
    "releases",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("body", JsonText, nullable=False),
    # What is listed and searched, taken from the body so that none has to be read for it.
    Column("model", Text),
    Column("version", Text),
    Column("base", Text),
    Column("decision", Text),
    Column("run_id", Text),
    Column("dataset_hash", Text),
    Column("parent", Text),
    Column("collected_at", Text),
    UniqueConstraint("project", "id"),
    Index("releases_by_version", "project", "model", "version", unique=True),
    sqlite_autoincrement=True,
)

release_tags = Table(
    "release_tags",
    metadata,
    Column("project", Text, nullable=False),
    Column("release_id", Text, nullable=False),
    Column("tag", Text, nullable=False),
    PrimaryKeyConstraint("project", "release_id", "tag"),
    ForeignKeyConstraint(["project", "release_id"], ["releases.project", "releases.id"]),
)

release_notes = Table(
    "release_notes",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("release_id", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("noted_at", Text, nullable=False),
    Column("text", Text, nullable=False),
    ForeignKeyConstraint(["project", "release_id"], ["releases.project", "releases.id"]),
    Index("release_notes_by_release", "project", "release_id", "seq"),
    sqlite_autoincrement=True,
)

aliases = Table(
    "aliases",
    metadata,
    Column("project", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("release_id", Text, nullable=False),
    PrimaryKeyConstraint("project", "name"),
    ForeignKeyConstraint(["project", "release_id"], ["releases.project", "releases.id"]),
)

alias_moves = Table(
    "alias_moves",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("alias", Text, nullable=False),
    Column("release_id", Text, nullable=False),
    Column("previous", Text),
    Column("who", Text, nullable=False),
    Column("moved_at", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("forced", Boolean, nullable=False),
    Column("rollback", Boolean, nullable=False),
    Column("verdict_hash", Text),
    ForeignKeyConstraint(["project", "release_id"], ["releases.project", "releases.id"]),
    ForeignKeyConstraint(["project", "previous"], ["releases.project", "releases.id"]),
    Index("alias_moves_by_alias", "project", "alias", "seq"),
    sqlite_autoincrement=True,
)

captures = Table(
    "captures",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("captured_at", Text, nullable=False),
    Column("release", Text, nullable=False),
    Column("body", JsonText, nullable=False),
    Column("dealt", Text),
    UniqueConstraint("project", "id"),
    Index("captures_by_release", "project", "release", "seq"),
    Index("captures_in_order", "project", "seq"),
    Index("captures_by_experiment", "project", "dealt", "seq"),
    sqlite_autoincrement=True,
)

feedback = Table(
    "feedback",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("capture_id", Text, nullable=False),
    Column("given_at", Text, nullable=False),
    Column("body", JsonText, nullable=False),
    ForeignKeyConstraint(["project", "capture_id"], ["captures.project", "captures.id"]),
    Index("feedback_by_capture", "project", "capture_id", "seq"),
    Index("feedback_in_order", "project", "seq"),
    sqlite_autoincrement=True,
)

looks = Table(
    "looks",
    metadata,
    Column("cases_hash", Text, nullable=False),
    Column("number", Integer, nullable=False),
    Column("subject", Text, nullable=False),
    Column("looked_at", Text, nullable=False),
    Column("who", Text),
    PrimaryKeyConstraint("cases_hash", "number"),
)

look_questions = Table(
    "look_questions",
    metadata,
    # Which questions a test set asks, by hash: sets that share them wear together, whatever they are called.
    Column("cases_hash", Text, nullable=False),
    Column("question", Text, nullable=False),
    PrimaryKeyConstraint("cases_hash", "question"),
    Index("look_questions_by_question", "question"),
)

reviews = Table(
    "reviews",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("item", Text, nullable=False),
    Column("who", Text, nullable=False),
    Column("reviewed_at", Text, nullable=False),
    Column("action", Text, nullable=False),
    # Whether the decision has become feedback on a capture.
    Column("applied", Boolean, nullable=False),
    Column("body", JsonText, nullable=False),
    Index("reviews_by_item", "project", "item", "seq"),
    sqlite_autoincrement=True,
)

api_keys = Table(
    "api_keys",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("name", Text, nullable=False),
    # SHA-256 of the secret, which is stored nowhere.
    Column("digest", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("revoked_at", Text),
    Column("body", JsonText, nullable=False),
    UniqueConstraint("project", "id"),
    UniqueConstraint("digest"),
    sqlite_autoincrement=True,
)

residuals = Table(
    "residuals",
    metadata,
    _seq(),
    Column("run_id", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("base", Text, nullable=False),
    Column("recorded_at", Text, nullable=False),
    Column("body", JsonText, nullable=False),
    UniqueConstraint("run_id"),
    Index("residuals_by_machine", "device", "base", "seq"),
    sqlite_autoincrement=True,
)

fleet_keys = Table(
    "fleet_keys",
    metadata,
    Column("project", Text, nullable=False),
    # What this ledger's jobs are called at providers.
    Column("ledger", Text, nullable=False),
    PrimaryKeyConstraint("project"),
)

fleet_jobs = Table(
    "fleet_jobs",
    metadata,
    _seq(),
    Column("project", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("place", Text, nullable=False),
    Column("run_id", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("body", JsonText, nullable=False),
    UniqueConstraint("project", "id"),
    sqlite_autoincrement=True,
)
