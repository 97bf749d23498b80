"""A place in a text, from its first character to the one behind its last."""

from typing import NamedTuple


class Span(NamedTuple):
    start: int
    end: int
