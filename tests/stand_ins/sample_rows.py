"""Rows of a dataset for tests to which only the tokens matter."""

from graftwork.records.dataset import Row
from graftwork.records.interaction import Message, Origin


def make_row(name: str, tokens, trained_from: int, *, reply: str = "y", **fields) -> Row:
    """A row whose number, if its name is one, is its line in the log."""
    return Row(
        id=name,
        origin=Origin(file="log.jsonl", line=int(name) + 1 if name.isdigit() else 1),
        messages=(Message(role="user", content="x"),),
        reply=reply,
        tokens=tuple(tokens),
        trained_from=trained_from,
        **fields,
    )
