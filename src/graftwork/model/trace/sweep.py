"""One decoder at any number of layers and tokens, from four traces of a few layers. Instant after that.

What is held in a phase grows by a plane: a constant, so much a layer, so much a token, so much for both.
Phases are fitted apart, because the peak changes from one to another. Holds where all layers keep what
backward needs or none does, from the shorter of the two traced lengths on.
"""

from typing import Any

from graftwork.model.trace.memory import trace_run
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake
from graftwork.records.fit import PlainSetup

FEW, MORE = 2, 4
"""Layers that are traced."""


class Plane(Record):
    """constant + layer · L + token · T + both · L · T, in bytes."""

    constant: float
    layer: float
    token: float
    both: float

    def at(self, layers: int, tokens: int) -> float:
        return self.constant + self.layer * layers + self.token * tokens + self.both * layers * tokens


class Sweep(Record):
    """The planes of a setting by phase."""

    phases: dict[str, Plane]

    def peak(self, *, layers: int, tokens: int) -> float:
        """The most that is held with so many layers and tokens a row."""
        return max(plane.at(layers, tokens) for plane in self.phases.values())


def trace_sweep(config: dict[str, Any], setup: PlainSetup, *, lengths: tuple[int, int]) -> Sweep:
    """Trace few and more layers at two lengths."""
    layers = config["num_hidden_layers"]
    if setup.checkpointed not in (0, layers):
        raise UserMistake(
            f"{setup.checkpointed} of {layers} layers compute again",
            why="a sweep holds where all of them do or none",
            fix="trace this setting whole",
        )
    corners = {
        (count, tokens): _phases(config, setup, count, tokens)
        for count in (FEW, MORE)
        for tokens in sorted(lengths)
    }
    names = corners[FEW, min(lengths)]
    return Sweep(phases={name: _fit(name, corners, sorted(lengths)) for name in names if name != "setup"})


def _phases(config: dict[str, Any], setup: PlainSetup, layers: int, tokens: int) -> dict[str, float]:
    again = layers if setup.checkpointed else 0
    changed = {"tokens": tokens, "adapted_layers": layers, "checkpointed": again}
    return trace_run({**config, "num_hidden_layers": layers}, setup.model_copy(update=changed)).phases


def _fit(name: str, corners: dict[tuple[int, int], dict[str, float]], lengths: list[int]) -> Plane:
    short, long = lengths
    few = [corners[FEW, tokens][name] for tokens in lengths]
    more = [corners[MORE, tokens][name] for tokens in lengths]
    a_layer = [(b - a) / (MORE - FEW) for a, b in zip(few, more, strict=True)]
    both = (a_layer[1] - a_layer[0]) / (long - short)
    layer = a_layer[0] - both * short
    token = (few[1] - few[0]) / (long - short) - both * FEW
    return Plane(
        constant=few[0] - layer * FEW - token * short - both * FEW * short,
        layer=layer,
        token=token,
        both=both,
    )
