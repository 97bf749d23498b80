"""The verdict that a release carries, with the sentence of each rule.

In: an open project, a release. Out: its verdict, or None where its files are not here, are not what the
manifest promises, or were written by another version: `graft release verify` is who complains of that.
"""

import hashlib

from pydantic import ValidationError

from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.release_store import open_store
from graftwork.records.release import Release
from graftwork.records.verdict import Verdict

VERDICT = "verdict.json"


def read_verdict(work: OpenProject, release: Release) -> Verdict | None:
    promised = next((file.sha256 for file in release.files if file.path == VERDICT), None)
    try:
        body = (open_store(work).folder(release.id) / VERDICT).read_bytes()
        if hashlib.sha256(body).hexdigest() != promised:
            return None
        return Verdict.from_json(body)
    except (OSError, ValidationError):
        return None
