"""Inputs that are drawn for properties: by the rules of a case file, else by the types of the spec. Pure.

The same component, property and count give the same inputs on every machine; no prompt shows them.
"""

import random
from typing import Any

from graftwork.components.spec.cases import InputRule, PropertyCase
from graftwork.components.spec.component import Component
from graftwork.components.spec.types import Shape, read_type
from graftwork.records.base import fingerprint

LETTERS = "abcXYZ019 _-,;:.\t\n\"'<>&|#*é"
MOST_TEXT = 16
FREE_DRAWS = 8


def draw_for(component: Component, case: PropertyCase) -> list[list[Any]]:
    """One list of arguments for each draw."""
    source = _source(component, case.id)
    rules = case.inputs
    if rules:
        return [[by_rule(rule, source) for rule in rules] for _ in range(case.count)]
    return [draw_by_types(component, source) for _ in range(case.count)]


def draw_free(component: Component) -> list[list[Any]]:
    """Inputs that no case decides: sources are compared with each other on them."""
    source = _source(component, "free")
    rules = next((case.inputs for case in component.cases.properties if case.inputs), ())
    if rules:
        return [[by_rule(rule, source) for rule in rules] for _ in range(FREE_DRAWS)]
    return [draw_by_types(component, source) for _ in range(FREE_DRAWS)] if component.parameters else []


def _source(component: Component, name: str) -> random.Random:
    return random.Random(fingerprint([component.id, component.function, name]))


def by_rule(rule: InputRule, source: random.Random) -> Any:
    if rule.text is not None:
        length = source.randint(0, rule.max) if rule.text else 0
        return "".join(source.choice(rule.text) for _ in range(length))
    if rule.whole is not None:
        return source.randint(*rule.whole)
    if rule.real is not None:
        return source.uniform(*rule.real)
    if rule.one_of is not None:
        return source.choice(rule.one_of)
    if rule.items is not None:
        return [by_rule(rule.items, source) for _ in range(source.randint(0, rule.max))]
    return source.random() < 0.5


def draw_by_types(component: Component, source: random.Random) -> list[Any]:
    return [by_shape(read_type(kind).shape or Shape("str"), source) for _, kind in component.parameters]


def by_shape(shape: Shape, source: random.Random, depth: int = 0) -> Any:
    match shape.kind:
        case "union":
            return by_shape(source.choice(shape.of), source, depth)
        case "literal":
            return source.choice(shape.values)
        case "list":
            item = shape.of[0] if shape.of else Shape("str")
            return [by_shape(item, source, depth + 1) for _ in range(source.randint(0, max(0, 5 - depth)))]
        case "dict":
            return {name: source.randint(0, 9) for name in source.sample("abcde", source.randint(0, 3))}
        case _:
            return _scalar(shape.kind, source)


def _scalar(kind: str, source: random.Random) -> Any:
    if kind == "int":
        return source.choice((0, 1, -1, source.randint(-1000, 1000)))
    if kind == "float":
        return source.choice((0.0, 1.0, -1.5, round(source.uniform(-1000, 1000), 3)))
    if kind == "bool":
        return source.random() < 0.5
    if kind == "none":
        return None
    return "".join(source.choice(LETTERS) for _ in range(source.randint(0, MOST_TEXT)))
