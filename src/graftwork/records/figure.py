"""A number that admits its uncertainty: value, range and unit."""

from typing import Self

from pydantic import model_validator

from graftwork.records.base import Record


class Figure(Record):
    """A computed or measured number with the range that it is expected to lie in."""

    value: float
    low: float
    high: float
    unit: str = ""

    @model_validator(mode="after")
    def _range_holds_value(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"the range {self.low}..{self.high} must hold the value {self.value}")
        return self

    @classmethod
    def exact(cls, value: float, unit: str = "") -> Self:
        return cls(value=value, low=value, high=value, unit=unit)

    @classmethod
    def about(cls, value: float, *, down: float, up: float, unit: str = "") -> Self:
        """`value` with a range of `value * down` to `value * up`."""
        return cls(value=value, low=value * down, high=value * up, unit=unit)

    def holds(self, actual: float) -> bool:
        return self.low <= actual <= self.high
