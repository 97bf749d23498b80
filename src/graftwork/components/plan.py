"""Components: nodes of a tree and their cases, with everything that generation needs, in the order to build.

In: a tree and its case file. Out: components, dependencies before what uses them. A node is a component if it
is a leaf or has cases. A cycle, or two components of one name, is a UserError that names the nodes. Types
are read as specifications write them, in words of several languages: `list(string)`, `String.t()`.
"""

import json
import keyword
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from graftwork.components.read import read_spec, read_yaml_tree
from graftwork.components.tree import (
    SpecNode,
    SpecTree,
    dependencies_of,
    metadata_of,
    parameters_of,
    requirements_of,
    snake_case,
)
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
    """Whether the case is kept out of prompts. None: every second call of a stage is."""
    covers: tuple[str, ...] = ()
    """Requirements of the node that the case decides, as they are written there."""

    @model_validator(mode="before")
    @classmethod
    def _require_outcome(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and ("gives" in fields) == ("raises" in fields):
            raise ValueError("give `gives` or `raises`, one of them")
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
    """Something that holds for every input: drawn inputs, and what is checked on each result."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")
    inputs: tuple[InputRule, ...] = ()
    """One rule for each parameter; without them values are drawn by the types of the spec."""
    count: int = Field(20, ge=1, le=200)
    holds: str | None = Field(None, max_length=1000)
    """A Python expression over the parameters, `result` and `error`, the name of an exception or None."""
    idempotent: bool = False
    """Whether the function gives its own result back for it."""
    raises_only: tuple[str, ...] | None = None
    """The exceptions that it may raise; empty: none."""
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
    """What all calls of a component together may use."""

    events: int | None = Field(None, ge=1)
    """Lines that are executed."""
    memory_kib: int | None = Field(None, ge=1)
    """The peak of what it allocates."""


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
    """The case that a requirement states, or None if it states none that can be run.

    `functions` are the names of the component: a call of anything else states no case of it.
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
    """The cases, and those that requirements state which no case covers yet."""
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
    """Requirements by the id of the case that decides them."""
    covers = {call.id: call.covers for call in cases.calls}
    return covers | {rule.id: rule.covers for rule in cases.properties}


def hidden_ids(cases: ComponentCases) -> frozenset[str]:
    """Cases that no prompt shows: those marked so, else every second call of a stage."""
    hidden = {rule.id for rule in cases.properties if rule.hidden}
    for stage in (1, 2, 3, 4):
        calls = [call for call in cases.calls if call.stage == stage]
        for number, call in enumerate(calls):
            if call.hidden if call.hidden is not None else number % 2 == 1:
                hidden.add(call.id)
    return frozenset(hidden)


Kind = Literal["str", "int", "float", "bool", "bytes", "list", "dict", "none", "any", "union", "literal"]

PYTHON_WORDS: dict[str, Kind] = {
    "str": "str", "int": "int", "float": "float", "bool": "bool", "bytes": "bytes", "list": "list",
    "dict": "dict", "tuple": "list", "None": "none", "any": "any", "Any": "any",
}  # fmt: skip
_OTHER_WORDS: dict[Kind, tuple[str, ...]] = {
    "str": (
        "string", "text", "String.t()", "string.t()", "char", "charlist", "binary", "bitstring", "path",
        "datetime", "date", "uuid", "url", "atom", "symbol",
    ),
    "int": ("integer", "non_neg_integer", "pos_integer", "neg_integer"),
    "float": ("number", "double", "decimal"),
    "bool": ("boolean",),
    "dict": ("map", "object", "struct", "hash", "keyword", "keyword_list"),
    "list": ("array",),
    "none": ("nil", "null", "void"),
    "any": ("json", "term", "unknown"),
}  # fmt: skip
OTHER_WORDS: dict[str, Kind] = {word: kind for kind, words in _OTHER_WORDS.items() for word in words}
"""Words of Elixir, JSON Schema and others. `binary` is text here: cases are JSON, which has no bytes."""
_OPTIONAL = re.compile(r"^optional[(\[](.*)[)\]]$", re.I)
_OF = re.compile(r"^(?P<outer>list|array|tuple|List|Array|\w+)[(\[<](?P<inner>.*)[)\]>]$")
_ATOM = re.compile(r"^:\w+[?!]?$")
_QUOTED = re.compile(r"""^(["'])(.*)\1$""")
_NUMBER = re.compile(r"^-?\d+(?:\.\d+)?$")


class Shape(NamedTuple):
    """A type. `of` are the parts of a union or the item of a list; `values` those of a literal."""

    kind: Kind
    of: tuple["Shape", ...] = ()
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "union":
            return " | ".join(map(str, self.of))
        if self.kind == "literal":
            return f"Literal[{', '.join(map(repr, self.values))}]"
        if self.kind == "list" and self.of:
            return f"list[{self.of[0]}]"
        return {"none": "None", "any": "object"}.get(self.kind, self.kind)


def read_type(text: str) -> tuple[Shape | None, tuple[str, ...]]:
    """The type, None if no Python type is known, and the words of other languages in it."""
    foreign: list[str] = []
    return _read(text.strip(), foreign), tuple(dict.fromkeys(foreign))


def _read(text: str, foreign: list[str]) -> Shape | None:
    parts = _split(text, "|")
    if len(parts) > 1:
        shapes = [_read(part, foreign) for part in parts]
        return _union([shape for shape in shapes if shape is not None]) if all(shapes) else None
    if text.endswith("?") and len(text) > 1:
        foreign.append(text)
        return _or_none(_read(text[:-1].strip(), foreign))
    return _read_word(text, foreign) or _read_outer(text, foreign)


def _read_word(text: str, foreign: list[str]) -> Shape | None:
    if _ATOM.match(text):
        foreign.append(text)
        return Shape("literal", values=(text[1:],))
    if quoted := _QUOTED.match(text):
        return Shape("literal", values=(quoted[2],))
    if _NUMBER.match(text):
        return Shape("literal", values=(float(text) if "." in text else int(text),))
    if text in PYTHON_WORDS:
        return Shape(PYTHON_WORDS[text])
    if word := OTHER_WORDS.get(text) or OTHER_WORDS.get(text.lower()):
        foreign.append(text)
        return Shape(word)
    return None


def _read_outer(text: str, foreign: list[str]) -> Shape | None:
    """A type with others inside: list(string), [string], Optional[int], {:ok, term}."""
    if optional := _OPTIONAL.match(text):
        return _or_none(_read(optional[1].strip(), foreign))
    if text.startswith(("{", "[")) and text.endswith(("}", "]")):
        foreign.append(text)
        item = _read(text[1:-1].strip(), foreign) if text.startswith("[") and len(text) > 2 else None
        return Shape("list", (item,) if item is not None else ())
    match = _OF.match(text)
    if match is None:
        return None
    outer, inner = match["outer"], _split(match["inner"], ",")
    if "[" not in text or not text.startswith(("list", "dict", "tuple")):
        foreign.append(outer)
    kind = PYTHON_WORDS.get(outer) or OTHER_WORDS.get(outer.lower())
    if kind == "list":
        item = _read(inner[0], foreign) if inner[0] else None
        return Shape("list", (item,) if item is not None and len(inner) == 1 else ())
    return Shape(kind) if kind is not None else None


def _or_none(shape: Shape | None) -> Shape | None:
    return _union([shape, Shape("none")]) if shape is not None else None


def _split(text: str, mark: str) -> list[str]:
    """At this mark outside of brackets and quotes."""
    depth, quote, parts, current = 0, "", [], ""
    for letter in text:
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{<") - (letter in ")]}>")
        if letter == mark and depth <= 0 and not quote:
            parts.append(current.strip())
            current = ""
        else:
            current += letter
    return [*parts, current.strip()]


def _union(shapes: list[Shape]) -> Shape:
    literals = [shape for shape in shapes if shape.kind == "literal"]
    remaining = [shape for shape in shapes if shape.kind != "literal"]
    if literals:
        remaining.insert(0, Shape("literal", values=tuple(v for shape in literals for v in shape.values)))
    unique = list(dict.fromkeys(remaining))
    return unique[0] if len(unique) == 1 else Shape("union", tuple(unique))


def fits(value: Any, shape: Shape) -> bool:
    """Whether a plain value has this shape."""
    if shape.kind == "union":
        return any(fits(value, part) for part in shape.of)
    if shape.kind == "literal":
        return any(type(value) is type(literal) and value == literal for literal in shape.values)
    if shape.kind == "list":
        return isinstance(value, list) and (not shape.of or all(fits(item, shape.of[0]) for item in value))
    if isinstance(value, bool):
        return shape.kind in ("bool", "any")
    return isinstance(value, _PLAIN_TYPES[shape.kind])


_PLAIN_TYPES: dict[str, Any] = {
    "any": object, "none": type(None), "float": (int, float), "int": int, "str": str, "bytes": str,
    "bool": bool, "dict": dict,
}  # fmt: skip


class Component(Record):
    """One function with its module, its interface and its cases."""

    id: str
    name: str
    module: str
    function: str
    description: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    """Names and types as the spec writes them."""
    outputs: tuple[tuple[str, str], ...] = ()
    requirements: tuple[str, ...] = ()
    dependencies: tuple[str, ...] = ()
    """Ids of components that it may call."""
    after: tuple[str, ...] = ()
    """Ids of components that its properties call: they are built first."""
    cases: ComponentCases = ComponentCases()
    line: int = 1

    @property
    def signature(self) -> str:
        typed = [(name, python_type(kind)) for name, kind in self.parameters]
        parameters = ", ".join(f"{name}: {kind}" if kind else name for name, kind in typed)
        result = self.returns
        return f"def {self.function}({parameters})" + (f" -> {result}:" if result else ":")

    @property
    def returns(self) -> str:
        if len(self.outputs) == 1:
            return python_type(self.outputs[0][1])
        return "dict" if self.outputs else ""


class ComponentPlan(Record):
    """All components of a spec, in the order they are built."""

    package: str
    language: Language = "python"
    components: tuple[Component, ...] = ()
    spec_hash: str = ""

    def get(self, identifier: str) -> Component:
        return next(component for component in self.components if component.id == identifier)

    def waves(self) -> list[list[Component]]:
        """Components whose dependencies are all in earlier waves."""
        depth: dict[str, int] = {}
        for component in self.components:
            earlier = (*component.dependencies, *component.after)
            depth[component.id] = 1 + max((depth[identifier] for identifier in earlier), default=-1)
        by_depth: list[list[Component]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
        for component in self.components:
            by_depth[depth[component.id]].append(component)
        return by_depth

    def inverse_of(self, rule: PropertyCase | None) -> Component | None:
        """The component that a property calls on results."""
        return self.get(rule.inverse) if rule is not None and rule.inverse is not None else None


def load_plan(spec: Path, cases: Path | None = None) -> ComponentPlan:
    """The components of a spec file and of the cases next to it."""
    return make_plan(read_spec(spec), read_cases(cases or cases_path(spec)), where=str(spec))


def make_plan(tree: SpecTree, cases: CaseFile, *, where: str) -> ComponentPlan:
    """UserError, with the node and its line, for what no order of building can be found for."""
    _require_ids(tree, cases, where=where)
    nodes = component_nodes(tree, cases)
    uses = dependencies_by_id(tree, cases)
    earlier = dict(uses)
    for node in nodes:
        rules = cases.components.get(node.id, ComponentCases()).properties
        inverses = [rule.inverse for rule in rules if rule.inverse is not None]
        if missing := [identifier for identifier in inverses if identifier not in uses]:
            raise UserError(
                f"a property of {node.id} names the component {missing[0]}, which does not exist",
                fix="specify the id of a component as `inverse`",
                where=f"components.{node.id}.properties",
            )
        earlier[node.id] = (*uses[node.id], *inverses)
    order = sort_by_dependencies(earlier, where=where, lines={node.id: node.line for node in nodes})
    by_id = {node.id: node for node in nodes}
    components = tuple(_to_component(by_id[identifier], uses[identifier], cases) for identifier in order)
    _require_distinct(components, where=where)
    package = cases.package or snake_case(tree.root.name) or "components"
    content = [
        package,
        cases.language,
        [component.model_dump(mode="json", exclude={"line"}) for component in components],
    ]
    return ComponentPlan(
        package=package, language=cases.language, components=components, spec_hash=fingerprint(content)
    )


def component_nodes(tree: SpecTree, cases: CaseFile) -> list[SpecNode]:
    return [node for node in tree.walk() if node.id and (node.is_leaf or node.id in cases.components)]


def resolve_names(tree: SpecTree) -> dict[str, str]:
    """Ids, names and function names of nodes, each with the id it means."""
    by_name: dict[str, str] = {}
    for node in tree.walk():
        for name in (snake_case(node.name), node.name, node.id):
            if name and node.id:
                by_name.setdefault(name, node.id)
    return by_name | {node.id: node.id for node in tree.walk() if node.id}


def _require_ids(tree: SpecTree, cases: CaseFile, *, where: str) -> None:
    """Cases and dependencies name nodes by their ids: each component has one of its own."""
    lines: dict[str, int] = {}
    for node in tree.walk():
        if not node.id and node.is_leaf:
            raise UserError(
                f"the leaf {node.name} has no id" if node.name else "a leaf has no id and no name",
                why="cases and dependencies name components by their ids",
                fix="write an id that no other node has, in quotes",
                where=f"{where}:{node.line}",
            )
        if node.id and node.id in lines:
            raise UserError(
                f"the id {node.id} is used twice: in lines {lines[node.id]} and {node.line}",
                why="cases and dependencies name components by their ids",
                fix="give one of the nodes another id",
                where=f"{where}:{node.line}",
            )
        lines[node.id] = node.line
    if unknown := [identifier for identifier in cases.components if identifier not in lines]:
        raise UserError(
            f"there are cases for {unknown[0]}, which is not a node of the specification",
            fix="correct the id in the cases, in quotes; `graft spec show` lists the nodes",
            where=f"components.{unknown[0]}",
        )


def dependencies_by_id(tree: SpecTree, cases: CaseFile) -> dict[str, tuple[str, ...]]:
    """What each component uses, by id: what it names, else the components directly below it."""
    nodes, by_name = component_nodes(tree, cases), resolve_names(tree)
    identifiers = {node.id for node in nodes}
    dependencies: dict[str, tuple[str, ...]] = {}
    for node in nodes:
        # Its own name means something else that is called the same; its own id is a cycle.
        stated = [name for name, _ in dependencies_of(node) if name in by_name]
        needed = [by_name[name] for name in stated if by_name[name] != node.id or name == node.id]
        if not needed:
            needed = [inner for child in node.children for inner in _components_below(child, identifiers)]
        used = dict.fromkeys(identifier for identifier in needed if identifier in identifiers)
        dependencies[node.id] = (*dependencies.get(node.id, ()), *used)
    return dependencies


def _components_below(node: SpecNode, identifiers: set[str]) -> list[str]:
    if node.id in identifiers:
        return [node.id]
    return [inner for child in node.children for inner in _components_below(child, identifiers)]


def sort_by_dependencies(uses: dict[str, tuple[str, ...]], *, where: str, lines: dict[str, int]) -> list[str]:
    """Dependencies first, otherwise in the order of the file; UserError for a cycle."""
    order: list[str] = []
    remaining = dict(uses)
    while remaining:
        ready = [
            identifier
            for identifier, needed in remaining.items()
            if not any(dependency in remaining for dependency in needed)
        ]
        if not ready:
            cycle = find_cycle(remaining)
            raise UserError(
                describe_cycle(cycle),
                why="a component is built after what it uses, and after the `inverse` of its properties",
                fix="remove one of these dependencies",
                where=f"{where}:{lines.get(cycle[0], 1)}",
            )
        order.append(ready[0])
        del remaining[ready[0]]
    return order


def describe_cycle(cycle: list[str]) -> str:
    if len(cycle) == 2:
        return f"the component {cycle[0]} depends on itself"
    return f"the components {' → '.join(cycle)} depend on each other"


def find_cycle(uses: dict[str, tuple[str, ...]]) -> list[str]:
    """A cycle of these, with its first member again at the end; empty if there is none."""
    path: list[str] = []
    done: set[str] = set()
    for start in uses:
        waiting = [iter([start])]
        path = []
        while waiting:
            dependency = next(waiting[-1], None)
            if dependency is None:
                waiting.pop()
                if path:
                    done.add(path.pop())
            elif dependency in path:
                return [*path[path.index(dependency) :], dependency]
            elif dependency in uses and dependency not in done:
                path.append(dependency)
                waiting.append(iter(uses[dependency]))
    return []


def _to_component(node: SpecNode, dependencies: tuple[str, ...], cases: CaseFile) -> Component:
    component_cases = cases.components.get(node.id, ComponentCases())
    requirements = [text for text, _ in requirements_of(node)]
    function = function_of(node, component_cases)
    return Component(
        id=node.id,
        name=node.name,
        module=function,
        function=function,
        description=describe(node),
        parameters=tuple(
            (to_identifier(parameter.name), parameter.type) for parameter in parameters_of(node, "inputs")
        ),
        outputs=tuple((parameter.name, parameter.type) for parameter in parameters_of(node, "outputs")),
        requirements=tuple(requirements),
        dependencies=dependencies,
        after=tuple(rule.inverse for rule in component_cases.properties if rule.inverse is not None),
        cases=with_requirements(component_cases, requirements, {function, snake_case(node.name)}),
        line=node.line,
    )


def function_of(node: SpecNode, cases: ComponentCases) -> str:
    return cases.function or snake_case(node.name) or snake_case(f"component {node.id}")


def to_identifier(name: str) -> str:
    """A parameter's name as Python can write it: `file path` is file_path, `class` is class_."""
    plain = name if name.isidentifier() else snake_case(name) or "value"
    return f"{plain}_" if keyword.iskeyword(plain) else plain


def describe(node: SpecNode) -> str:
    """The purpose of the node, in the words of the spec."""
    metadata = metadata_of(node)
    listed = metadata.get("responsibilities")
    parts = [metadata.get("description"), *(listed if isinstance(listed, list) else [])]
    text = ". ".join(str(part).replace("_", " ").strip().rstrip(".") for part in parts if part)
    return text or node.body.strip()


def python_type(text: str) -> str:
    """The type in Python syntax; empty if unknown."""
    shape, _ = read_type(text)
    return str(shape) if shape is not None and shape.kind != "any" else ""


def result_shape(component: Component) -> Shape | None:
    """The shape of a result: one output is the value itself, several are a dictionary."""
    if len(component.outputs) == 1:
        return read_type(component.outputs[0][1])[0]
    return Shape("dict") if component.outputs else None


def _require_distinct(components: tuple[Component, ...], *, where: str) -> None:
    by_module: dict[str, Component] = {}
    for component in components:
        if keyword.iskeyword(component.function):
            raise UserError(
                f"the component {component.id} is called {component.function}, which is a word of Python",
                why="its function and its module have this name",
                fix=f"give it another name, or `function` under components.{component.id} in the cases",
                where=f"{where}:{component.line}",
            )
        namesake = by_module.setdefault(component.module, component)
        if namesake is not component:
            raise UserError(
                f"the components {namesake.id} and {component.id} are both called {component.module}",
                why="each becomes a module of the package",
                fix="give one of them another name, or `function` in the cases",
                where=f"{where}:{component.line}",
            )
