"""Names that can become a folder or a URL without harm."""

import re

from graftwork.records.errors import UserMistake

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
RULE = "1 to 64 of a-z, 0-9, dot, dash and underscore, a letter or digit first"


def require_name(value: str, *, kind: str) -> str:
    """Give the name back, or refuse it. A name that passes cannot leave the folder it is used in."""
    if not NAME.fullmatch(value):
        raise UserMistake(
            f"{value!r} cannot be a {kind}",
            why=f"a {kind} is {RULE}",
            fix=f"choose another {kind}",
        )
    return value
