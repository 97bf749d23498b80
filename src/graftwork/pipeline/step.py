"""The definition of a step: its dependencies, inputs and outputs, and when it is up to date.

A step is done again only when the fingerprint of its inputs has changed or its output is gone.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from graftwork.model.base import is_ready
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import GraftError
from graftwork.text.wording import truncate

R = TypeVar("R", bound=Record)


def name_inputs(work: OpenProject, step: str) -> str:
    """The ledger's name for the inputs of a step when it was last done, part by part."""
    return f"{name_entry(work, step)}.inputs"


@dataclass(frozen=True)
class StepOutputs:
    """The outputs of the steps that ran before, by name."""

    outputs: dict[str, Record]

    def get(self, step: str, kind: type[R]) -> R:
        output = self.outputs[step]
        if not isinstance(output, kind):
            raise TypeError(f"step {step} made a {type(output).__name__}, not a {kind.__name__}")
        return output


_NEEDED = "result of "


@dataclass(frozen=True)
class StepInputs:
    """What a step depends on: one fingerprint of all, and each part by its name, as text."""

    fingerprint: str
    parts: dict[str, str]

    def changes_since(self, before: dict[str, str]) -> tuple[str, ...]:
        """Each part that changed, as text."""
        changes = []
        for name in dict.fromkeys((*before, *self.parts)):
            old_value, new_value = before.get(name), self.parts.get(name)
            if old_value == new_value:
                continue
            if name.startswith(_NEEDED):
                changes.append(f"`{name.removeprefix(_NEEDED)}` made another result")
            elif old_value is None or new_value is None:
                changes.append(f"{name} is {'new' if old_value is None else 'gone'}")
            elif len(old_value) == len(new_value) == _HASH_LENGTH:
                changes.append(f"{name} has changed")
            else:
                changes.append(
                    f"{name} was {truncate(old_value, _LONGEST_SHOWN)} "
                    f"and is {truncate(new_value, _LONGEST_SHOWN)}"
                )
        return tuple(changes)


_HASH_LENGTH = 64
_LONGEST_SHOWN = 40
MOST_REASONS = 3


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The leaves of nested mappings by their dotted names; a list is one leaf."""
    if isinstance(value, dict) and value:
        for key, inside in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), inside)
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


@dataclass(frozen=True)
class PipelineStep:
    name: str
    title: str
    needs: tuple[str, ...]
    makes: type[Record]
    depends_on: Callable[[OpenProject, StepOutputs], Any]
    """The settings and external inputs that make the step's output stale when they change."""
    do: Callable[[OpenProject, StepOutputs], Record]
    identity: Callable[[Any], str] = Record.fingerprint
    """What later steps see of the output: two outputs with the same identity are equal to them."""
    still_there: Callable[[OpenProject, Any], bool] = lambda _work, _output: True
    input_names: tuple[str, ...] = ()
    """Names of the items of `depends_on`, for messages about changes."""

    def inputs_of(self, work: OpenProject, outputs: StepOutputs, identities: dict[str, str]) -> "StepInputs":
        """Return the current inputs of the step's output."""
        needed = {name: identities[name] for name in self.needs}
        on = self.depends_on(work, outputs)
        digest = fingerprint({"step": self.name, "on": on, "needs": needed})
        if isinstance(on, list) and len(on) == len(self.input_names):
            named_parts = zip(self.input_names, on, strict=True)
        else:
            named_parts = zip((self.input_names or (self.name,))[:1], (on,), strict=True)
        parts = {key: value for name, part in named_parts for key, value in _flatten(name, part)}
        return StepInputs(digest, {**parts, **{f"{_NEEDED}{name}": i for name, i in needed.items()}})


READ_THE_BASE = ("audit", "prepare")
"""Steps whose inputs include the base's revision: reading it would fetch the base first."""


_OTHER_VERSION = "it was done by another version of graftwork"


def _read_output(step: PipelineStep, stored: dict[str, Any]) -> Record | None:
    """What a step made; None if another version stored it, so that it is done again."""
    try:
        return step.makes.model_validate(stored)
    except ValidationError:
        return None


class StepWalk:
    """Goes through the steps in order: what is up to date, and what later steps depend on."""

    def __init__(self, work: OpenProject) -> None:
        self._work = work
        self.outputs = StepOutputs({})
        self._identities: dict[str, str] = {}

    def take(self, step: PipelineStep, output: Record) -> None:
        """Later steps use this output."""
        self.outputs.outputs[step.name] = output
        self._identities[step.name] = step.identity(output)

    def inputs_of(self, step: PipelineStep) -> StepInputs:
        return step.inputs_of(self._work, self.outputs, self._identities)

    def find_fresh(self, step: PipelineStep, inputs: StepInputs) -> Record | None:
        """The last output of the step, if it is up to date."""
        last = self._work.ledger.get(name_entry(self._work, step.name))
        if last is None or last.fingerprint != inputs.fingerprint:
            return None
        output = _read_output(step, last.output)
        return output if output is not None and step.still_there(self._work, output) else None

    def is_fresh(self, step: PipelineStep) -> bool:
        return self.find_fresh(step, self.inputs_of(step)) is not None

    def take_if_fresh(self, step: PipelineStep) -> tuple[str, ...]:
        """Return the last output of the step, or raise why none is up to date. Runs nothing."""
        open_needs = [name for name in step.needs if name not in self._identities]
        if open_needs:
            return tuple(f"`{name}` has to be done before it" for name in open_needs)
        base, root = self._work.settings.base, self._work.project.root
        if step.name in READ_THE_BASE and not is_ready(base, project_folder=root):
            return ("the base model is not on this machine yet",)
        try:
            inputs = self.inputs_of(step)
            output = self.find_fresh(step, inputs)
        except ValueError:
            return (_OTHER_VERSION,)
        except GraftError as error:
            return (error.what,)
        if output is None:
            return self._explain(step, inputs)
        self.take(step, output)
        return ()

    def _explain(self, step: PipelineStep, inputs: StepInputs) -> tuple[str, ...]:
        ledger = self._work.ledger
        last = ledger.get(name_entry(self._work, step.name))
        last_inputs = ledger.get(name_inputs(self._work, step.name))
        if last is None:
            return ("it was never done",)
        if last.fingerprint == inputs.fingerprint:
            is_readable = _read_output(step, last.output) is not None
            return ("its files are gone" if is_readable else _OTHER_VERSION,)
        changes = inputs.changes_since(last_inputs.output) if last_inputs is not None else ()
        if len(changes) > MOST_REASONS:
            changes = (*changes[:MOST_REASONS], f"and {len(changes) - MOST_REASONS} more changes")
        return changes or ("its settings or inputs have changed",)
