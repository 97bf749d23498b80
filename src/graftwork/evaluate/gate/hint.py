"""One suggestion, and how much it could explain."""

from typing import NamedTuple


class Hint(NamedTuple):
    """`cases` is how many answers the cause accounts for: what the hints are ranked by."""

    cases: float
    text: str
