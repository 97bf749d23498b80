"""Names that can become a folder or a URL without harm.

In: what a user or a manifest calls something. Out: the same, or a refusal. An alias of the main model is a
plain name (`champion`); that of another model stands behind the model's name (`tagger/champion`).
"""

import re
from typing import NamedTuple

from graftwork.records.errors import UserMistake

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
RULE = "1 to 64 of a-z, 0-9, dot, dash and underscore, a letter or digit first"
ALIAS = re.compile(rf"(?:{NAME.pattern}/)?{NAME.pattern}")
FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class AliasParts(NamedTuple):
    """An alias taken apart; `model` is None for the main model."""

    model: str | None
    name: str


def require_name(value: str, *, kind: str) -> str:
    """Give the name back, or refuse it. A name that passes cannot leave the folder it is used in."""
    if not NAME.fullmatch(value):
        raise UserMistake(
            f"{value!r} cannot be a {kind}",
            why=f"a {kind} is {RULE}",
            fix=f"choose another {kind}",
        )
    return value


def require_alias(value: str) -> str:
    """Give the alias back, or refuse it: a name, or a model's name, a slash and a name."""
    if not ALIAS.fullmatch(value):
        raise UserMistake(
            f"{value!r} cannot be an alias",
            why=f"an alias is {RULE}; that of a specialist stands behind its model's name and a slash",
            fix="write it like `champion` or `tagger/champion`",
        )
    return value


def alias_of_model(alias: str, *, model: str, main: str) -> str:
    """What an alias is called in full: the main model's go by their plain names."""
    return alias if model == main or "/" in alias else f"{model}/{alias}"


def take_apart(alias: str) -> AliasParts:
    model, slash, name = require_alias(alias).rpartition("/")
    return AliasParts(model if slash else None, name)
