"""An adapter that may be served: content-addressed, with its whole lineage."""

from typing import Any

from graftwork.records.base import Record
from graftwork.records.verdict import Decision


class ReleaseFile(Record):
    path: str
    sha256: str
    size: int


class Release(Record):
    """The manifest of a release. Its id is the hash of everything below but the id itself."""

    id: str
    project: str
    base: str
    base_fingerprint: str
    template_fingerprint: str
    adapter_hash: str
    dataset_hash: str
    plan_hash: str
    report_hash: str
    verdict_hash: str
    decision: Decision
    run_id: str
    parent: str | None
    created_at: str
    files: tuple[ReleaseFile, ...]
    settings: dict[str, Any]
    versions: dict[str, str]


class AliasMove(Record):
    """One move of an alias: who, when, why, from where to where."""

    alias: str
    release_id: str
    previous: str | None
    who: str
    when: str
    why: str
    forced: bool = False
    rollback: bool = False
