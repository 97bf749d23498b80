"""Names of releases, aliases and files that are safe in paths and URLs, and semantic versions. Pure.

An alias of the main model is a plain name (`champion`); an alias of another model has the name of its model
as a prefix (`tagger/champion`). Each model has its own versions. A new base or template is a major step,
because any answer can change; new data is a minor one; new settings on the same data are a patch.
"""

import re
from typing import NamedTuple

from graftwork.records.errors import UserMistake
from graftwork.records.release import Release

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
RULE = "1 to 64 of a-z, 0-9, dot, dash and underscore, a letter or digit first"
ALIAS = re.compile(rf"(?:{NAME.pattern}/)?{NAME.pattern}")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class AliasParts(NamedTuple):
    """The parts of an alias; `model` is None for the main model."""

    model: str | None
    name: str


def require_name(value: str, *, kind: str) -> str:
    """Return the name or raise. A valid name cannot leave the folder it is used in."""
    if not NAME.fullmatch(value):
        raise UserMistake(
            f"{value!r} cannot be a {kind}",
            why=f"a {kind} is {RULE}",
            fix=f"choose another {kind}",
        )
    return value


def require_alias(value: str) -> str:
    """Return the alias or raise."""
    if not ALIAS.fullmatch(value):
        raise UserMistake(
            f"{value!r} cannot be an alias",
            why=f"an alias is {RULE}; an alias of a specialist starts with the name of its model and a slash",
            fix="write it like `champion` or `tagger/champion`",
        )
    return value


def alias_of_model(alias: str, *, model: str, main: str) -> str:
    """The full name of an alias. Aliases of the main model have no prefix."""
    return alias if model == main or "/" in alias else f"{model}/{alias}"


def split_alias(alias: str) -> AliasParts:
    model, slash, name = require_alias(alias).rpartition("/")
    return AliasParts(model if slash else None, name)


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
    """The version after `newest`, which `before` has."""
    if newest is None or before is None:
        return FIRST
    major, minor, patch = sort_key(newest)
    same_base = (before.base_fingerprint, before.template_fingerprint) == (
        now.base_fingerprint,
        now.template_fingerprint,
    )
    if not same_base:
        return f"{major + 1}.0.0"
    if before.dataset_hash != now.dataset_hash:
        return f"{major}.{minor + 1}.0"
    return f"{major}.{minor}.{patch + 1}"
