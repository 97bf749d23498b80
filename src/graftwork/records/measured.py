"""A share that was measured on held-out cases."""

from graftwork.records.base import Record


class MeasuredShare(Record):
    """A mean of values from 0 to 1 over `n` cases, with its 95 % interval, clustered by session."""

    value: float
    low: float
    high: float
    n: int
