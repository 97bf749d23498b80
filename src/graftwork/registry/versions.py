"""Semantic versions of releases, one row of them a model. Pure.

In: the newest version and what changed since. Out: the next version, by rule: another base or template is a
major step, for answers can change everywhere; other data is a minor one; other settings on the same data
are a patch.
"""

import re

from graftwork.records.errors import UserMistake
from graftwork.records.release import Release

FIRST = "1.0.0"
VERSION = re.compile(r"(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})\.(0|[1-9]\d{0,8})")


def require_version(text: str) -> str:
    if not VERSION.fullmatch(text):
        raise UserMistake(
            f"{text!r} is not a version",
            why="a version is three numbers with dots between them",
            fix="write it like 1.4.0",
        )
    return text


def sort_key(version: str) -> tuple[int, int, int]:
    major, minor, patch = (int(part) for part in version.split("."))
    return major, minor, patch


def next_version(newest: str | None, *, before: Release | None, now: Release) -> str:
    """The version behind `newest`; `before` is the release that has it."""
    if newest is None or before is None:
        return FIRST
    major, minor, patch = sort_key(newest)
    same_ground = (before.base_fingerprint, before.template_fingerprint) == (
        now.base_fingerprint,
        now.template_fingerprint,
    )
    if not same_ground:
        return f"{major + 1}.0.0"
    if before.dataset_hash != now.dataset_hash:
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch + 1}"
