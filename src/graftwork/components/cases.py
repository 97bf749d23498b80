"""Cases of components: calls with their results, properties, limits, and the file that holds them.

Input: a case file, or a requirement in words. Output: a `CaseFile`; what requirements state as cases, which
cases cover them, and which are hidden from the model that writes the code.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from graftwork.components.read import read_yaml_tree
from graftwork.files.config_text import parse_yaml, read_config_text
from graftwork.grading.checks import say_first
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import UserError

Stage = Literal[1, 2, 3, 4]
Language = Literal["python", "elixir"]
FUNCTION = r"^[a-z_][a-z0-9_]{0,63}$"
MODULE = r"^[A-Za-z_][A-Za-z0-9_.]{0,63}$"
LONGEST_REQUIREMENT = 500
SUFFIX = ".cases.yaml"


class CallCase(Record):
    """Arguments, and the value or the exception that they give."""

    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    gives: Any = None
    raises: str | None = Field(None, pattern=MODULE)
    stage: Stage = 1
    hidden: bool | None = None
    """Whether the case is kept out of prompts. None: every second call of a stage is hidden."""
    covers: tuple[str, ...] = ()
    """Requirements of the node that the case decides, verbatim."""

    @model_validator(mode="before")
    @classmethod
    def _require_outcome(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and ("gives" in fields) == ("raises" in fields):
            raise ValueError("specify either `gives` or `raises`")
        return fields

    @model_validator(mode="after")
    def _is_plain(self) -> Self:
        try:
            json.dumps([self.args, self.named, self.gives], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"values must be plain JSON: {error}") from error
        return self

    @property
    def id(self) -> str:
        content = [self.args, self.named, self.gives, self.raises]
        return f"call-{fingerprint(content)[:10]}"


class InputRule(Record):
    """How values for one parameter are drawn; set exactly one of text, int, float, bool, one_of, list."""

    text: str | None = None
    """Texts over these characters."""
    whole: tuple[int, int] | None = Field(None, alias="int")
    real: tuple[float, float] | None = Field(None, alias="float")
    truth: Literal[True] | None = Field(None, alias="bool")
    one_of: tuple[Any, ...] | None = Field(None, min_length=1)
    items: "InputRule | None" = Field(None, alias="list")
    max: int = Field(12, ge=0, le=1000)
    """The longest text or list."""

    @model_validator(mode="after")
    def _is_one_rule(self) -> Self:
        rules = (self.text, self.whole, self.real, self.truth, self.one_of, self.items)
        if sum(rule is not None for rule in rules) != 1:
            raise ValueError("write one of text, int, float, bool, one_of, list")
        for bounds in (self.whole, self.real):
            if bounds is not None and bounds[0] > bounds[1]:
                raise ValueError(f"the range {bounds[0]} to {bounds[1]} is empty")
        return self


class PropertyCase(Record):
    """A property of every input: drawn inputs, and what is checked on each result."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")
    inputs: tuple[InputRule, ...] = ()
    """One rule for each parameter; without them values are drawn by the types of the spec."""
    count: int = Field(20, ge=1, le=200)
    holds: str | None = Field(None, max_length=1000)
    """A Python expression over the parameters, `result` and `error`, the name of an exception or None."""
    idempotent: bool = False
    """Whether applying the function to its own result changes nothing."""
    raises_only: tuple[str, ...] | None = None
    """The only exceptions that it may raise; empty: none."""
    inverse: str | None = None
    """The id of a component that turns the result back into the first argument."""
    stage: Stage = 4
    hidden: bool = True
    covers: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _checks_something(self) -> Self:
        if not (self.holds or self.idempotent or self.raises_only is not None or self.inverse):
            raise ValueError("write what is checked: holds, idempotent, raises_only or inverse")
        if self.holds:
            try:
                compile(self.holds.strip(), "holds", "eval")
            except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
                raise ValueError(f"`holds` is not a Python expression: {error}") from error
        return self

    @property
    def id(self) -> str:
        return f"property-{self.name}"


class ComponentLimits(Record):
    """Limits on all calls of a component together."""

    events: int | None = Field(None, ge=1)
    """Executed lines."""
    memory_kib: int | None = Field(None, ge=1)
    """Peak of allocated memory."""


class ComponentCases(Record):
    """The cases of one node."""

    function: str | None = Field(None, pattern=FUNCTION)
    """The name of the function; by default the name of the node in snake case."""
    imports: tuple[str, ...] = ()
    """Modules of the standard library that the component may import."""
    calls: tuple[CallCase, ...] = ()
    properties: tuple[PropertyCase, ...] = ()
    limits: ComponentLimits = ComponentLimits()

    @field_validator("calls")
    @classmethod
    def _calls_agree(cls, calls: tuple[CallCase, ...]) -> tuple[CallCase, ...]:
        by_arguments: dict[str, CallCase] = {}
        for call in calls:
            key = fingerprint([call.args, call.named])
            if key in by_arguments and by_arguments[key].id != call.id:
                raise ValueError(
                    f"two calls with the arguments {json.dumps(call.args)} give different values"
                )
            by_arguments[key] = call
        return calls

    @field_validator("properties")
    @classmethod
    def _names_differ(cls, properties: tuple[PropertyCase, ...]) -> tuple[PropertyCase, ...]:
        names = [rule.name for rule in properties]
        if len(set(names)) != len(names):
            raise ValueError("two properties have the same name")
        return properties


class CaseFile(Record):
    """A file of cases."""

    format: Literal[1] = 1
    language: Language = "python"
    package: str | None = Field(None, pattern=FUNCTION)
    """The name of the package of components; by default that of the root in snake case."""
    components: dict[str, ComponentCases] = {}


def cases_path(spec: Path) -> Path:
    """Where the cases of a spec are: `converter.tiki` has `converter.cases.yaml`."""
    return spec.with_name(spec.name.partition(".")[0] + SUFFIX)


def read_cases(path: Path) -> CaseFile:
    """The file of cases; empty if there is none."""
    if not path.is_file():
        return CaseFile()
    text = read_config_text(path)
    content = parse_yaml(text, where=str(path)).content
    try:
        return CaseFile.model_validate(content or {})
    except ValidationError as error:
        location = [str(part) for part in error.errors(include_url=False)[0]["loc"]]
        raise UserError(
            f"the cases are wrong: {say_first(error)}",
            fix="docs/components.md shows the format of cases",
            where=f"{path}:{read_yaml_tree(text, where=str(path)).root.line_of(*location)}",
        ) from error


_CALL = re.compile(
    r"^\s*(?P<name>[A-Za-z_]\w*)\s*\((?P<args>.*)\)\s*"
    r"(?P<how>==|->|returns|gives|raises)\s*(?P<value>.+?)\s*$"
)
_KNOWN = (
    (re.compile(r"\bidempotent\b"), {"name": "idempotent", "idempotent": True}),
    (
        re.compile(r"\b(?:never raises?|must not raise|must not crash|without crashing)\b"),
        {"name": "never_raises", "raises_only": ()},
    ),
)


def case_from_requirement(text: str, functions: Collection[str]) -> CallCase | PropertyCase | None:
    """Return the case that a requirement states, or None if it states none that can be run. `functions` are
    the names of the component: calls of other functions do not count.
    """
    if len(text) > LONGEST_REQUIREMENT:
        return None
    if (match := _CALL.match(text)) and match["name"] in functions:
        try:
            args = json.loads(f"[{match['args']}]")
            if match["how"] == "raises":
                return CallCase(args=tuple(args), raises=match["value"], covers=(text,))
            return CallCase(args=tuple(args), gives=json.loads(match["value"]), covers=(text,))
        except (ValueError, RecursionError):
            return None
    sentence = text.replace("_", " ").lower()
    for pattern, rule in _KNOWN:
        if pattern.search(sentence):
            return PropertyCase.model_validate({**rule, "covers": (text,)})
    return None


def with_requirements(
    cases: ComponentCases, requirements: list[str], functions: Collection[str]
) -> ComponentCases:
    """Return the cases, and those stated by requirements that no case covers yet."""
    calls, properties = list(cases.calls), list(cases.properties)
    covered = covered_by(cases)
    for text in requirements:
        case = case_from_requirement(text, functions) if text not in covered else None
        if isinstance(case, CallCase) and case.id not in {call.id for call in calls}:
            calls.append(case)
        elif isinstance(case, PropertyCase) and case.name not in {rule.name for rule in properties}:
            properties.append(case)
    return cases.model_copy(update={"calls": tuple(calls), "properties": tuple(properties)})


def covered_by(cases: ComponentCases) -> set[str]:
    return {text for covers in case_covers(cases).values() for text in covers}


def case_covers(cases: ComponentCases) -> dict[str, tuple[str, ...]]:
    """Return the requirements by the id of the case that decides them."""
    covers = {call.id: call.covers for call in cases.calls}
    return covers | {rule.id: rule.covers for rule in cases.properties}


def hidden_ids(cases: ComponentCases) -> frozenset[str]:
    """Return the cases that no prompt shows: those marked so, else every second call of a stage."""
    hidden = {rule.id for rule in cases.properties if rule.hidden}
    for stage in (1, 2, 3, 4):
        calls = [call for call in cases.calls if call.stage == stage]
        for number, call in enumerate(calls):
            if call.hidden if call.hidden is not None else number % 2 == 1:
                hidden.add(call.id)
    return frozenset(hidden)
