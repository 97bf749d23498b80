"""What a step is: what it needs, what it depends on, what it makes, and when it is up to date.

A step is done again only when the fingerprint of its inputs has changed or its output is gone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from graftwork.coordinate.workplace import Workplace
from graftwork.records.base import Record, fingerprint

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Made:
    """The outputs of the steps that ran before, by name."""

    outputs: dict[str, Record]

    def get(self, step: str, kind: type[R]) -> R:
        output = self.outputs[step]
        if not isinstance(output, kind):
            raise TypeError(f"step {step} made a {type(output).__name__}, not a {kind.__name__}")
        return output


@dataclass(frozen=True)
class Step:
    name: str
    title: str
    needs: tuple[str, ...]
    makes: type[Record]
    depends_on: Callable[[Workplace, Made], Any]
    """The settings and outside things that, changed, make the step's output wrong."""
    do: Callable[[Workplace, Made], Record]
    identity: Callable[[Any], str] = Record.fingerprint
    """What later steps see of the output: two outputs of one identity are the same to them."""
    still_there: Callable[[Workplace, Any], bool] = lambda _work, _output: True

    def fingerprint_of(self, work: Workplace, made: Made, identities: dict[str, str]) -> str:
        needed = {name: identities[name] for name in self.needs}
        return fingerprint({"step": self.name, "on": self.depends_on(work, made), "needs": needed})
