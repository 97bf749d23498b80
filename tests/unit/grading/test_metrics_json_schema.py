"""JSON Schema: known cases, keyword by keyword, and nothing skipped in silence."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.matching import PatternTooSlow, fits, require_schema

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("schema", "fitting", "not_fitting"),
    [
        ({"type": "integer"}, [1, 1.0, -3, 10**400], [1.5, "1", True, None]),
        ({"type": "number"}, [1, 1.5], [False, "1"]),
        ({"type": ["string", "null"]}, ["", None], [0, {}]),
        ({"type": "boolean"}, [True], [1, "true"]),
        (True, [None, 1], []),
        (False, [], [None, 1]),
        ({"enum": [1, "a", None, [2]]}, [1, 1.0, "a", None, [2]], [True, "b", [3], 0]),
        ({"const": False}, [False], [0, None, "false"]),
        ({"const": {"a": [1]}}, [{"a": [1.0]}], [{"a": [True]}, {"a": [1], "b": 1}]),
        ({"required": ["a"]}, [{"a": None}, [], "x"], [{}, {"b": 1}]),
        ({"properties": {"a": {"type": "string"}}}, [{}, {"a": "x"}, {"b": 1}, 3], [{"a": 1}]),
        (
            {"properties": {"a": True}, "patternProperties": {"^x_": True}, "additionalProperties": False},
            [{"a": 1}, {"x_y": 1}, {}],
            [{"b": 1}],
        ),
        ({"additionalProperties": {"type": "integer"}}, [{"z": 1}], [{"z": "1"}]),
        ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
        ({"dependentRequired": {"card": ["address"]}}, [{}, {"card": 1, "address": 2}], [{"card": 1}]),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"minProperties": 1, "maxProperties": 2}, [{"a": 1}, []], [{}, {"a": 1, "b": 2, "c": 3}]),
        ({"items": {"type": "integer"}}, [[], [1, 2], "x"], [["1"], [1, None]]),
        ({"prefixItems": [{"type": "string"}], "items": False}, [[], ["a"]], [["a", 1], [1]]),
        ({"items": [{"type": "string"}], "additionalItems": False}, [["a"]], [["a", 1], [1]]),
        ({"minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"uniqueItems": True}, [[1, True], [], [{"a": 1}, {"a": 2}]], [[1, 1.0], [{"a": [1]}, {"a": [1]}]]),
        ({"contains": {"const": 1}}, [[0, 1]], [[], [0]]),
        ({"contains": {"const": 1}, "minContains": 0, "maxContains": 1}, [[], [1]], [[1, 1]]),
        ({"minLength": 2, "maxLength": 3}, ["ab", "äöü", 5], ["a", "abcd"]),
        ({"pattern": "^[A-Z]{2}-\\d+$"}, ["AB-12", 7], ["ab-12", "AB-"]),
        ({"pattern": "b"}, ["abc"], ["ac"]),
        ({"minimum": 1, "maximum": 3}, [1, 3, 2.5, "9"], [0.99, 4]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 3}, [2], [1, 3]),
        ({"multipleOf": 0.01}, [0.07, 19.99, 3], [0.075]),
        ({"multipleOf": 2}, [4, 10**400], [3, 4.5]),
        ({"allOf": [{"minimum": 1}, {"maximum": 3}]}, [2], [0, 4]),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, ["x", 5], [1]),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, [4, 9], [6, 5]),
        ({"not": {"type": "null"}}, [0, ""], [None]),
        (
            {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}},
            [{"a": 1, "b": 1}, {"c": 1}],
            [{"a": 1}, {}],
        ),
        (
            {"$defs": {"a/b": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a~1b"}}},
            [{"x": 1}],
            [{"x": "1"}],
        ),
        (
            {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}},
            [{"kids": [{"kids": []}]}],
            [{"kids": [{"kids": [3]}]}],
        ),
        (
            {"title": "t", "description": "d", "$schema": "https://json-schema.org/draft/2020-12/schema"},
            [1],
            [],
        ),
    ],
)
def test_values_fit_a_schema_as_the_standard_says(schema, fitting, not_fitting):
    require_schema(schema)
    for value in fitting:
        assert fits(value, schema), value
    for value in not_fitting:
        assert not fits(value, schema), value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"typ": "object"}, "did you mean type"),
        ({"format": "email"}, "keyword format is not known"),
        ({"properties": {"a": {"minimun": 3}}}, "#/properties/a: .* did you mean minimum"),
        ({"type": "int"}, "must be of object"),
        ({"type": []}, "#/type"),
        ({"required": "a"}, "a list of keys"),
        ({"minLength": -1}, "whole number"),
        ({"minimum": "3"}, "a number"),
        ({"multipleOf": 0}, "a number"),
        ({"anyOf": []}, "a list of schemas"),
        ({"enum": 3}, "a list of values"),
        ({"pattern": "("}, "not a regular expression"),
        ({"$ref": "#/$defs/a"}, "no such part"),
        ({"$ref": "https://example.org/s.json"}, "only references within"),
        ({"$ref": "#"}, "leads back to itself"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}}, "leads back"),
        ({"$schema": "https://example.org/own"}, "json-schema.org"),
        ({"items": 3}, "must be a schema"),
        ("object", "must be a schema"),
    ],
)
def test_a_schema_that_is_not_understood_is_refused_with_the_place_and_a_hint(schema, message):
    with pytest.raises(ValueError, match=message):
        require_schema(schema)


def test_a_deeply_nested_value_is_validated_against_a_recursive_schema():
    schema = {"items": {"$ref": "#"}}
    require_schema(schema)
    for depth in (50, 900):
        assert fits(json.loads("[" * depth + "]" * depth), schema)
        assert not fits(
            json.loads("[" * depth + "1" + "]" * depth), {"type": "array", "items": {"$ref": "#"}}
        )


def test_a_schema_whose_references_double_at_every_step_is_validated_at_once():
    parts = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(22)}
    schema = {"$defs": {**parts, "d22": {"type": "string"}}, "$ref": "#/$defs/d0"}
    require_schema(schema)
    assert fits("x", schema)
    assert not fits(1, schema)


def test_a_slow_pattern_in_a_schema_is_reported_and_not_taken_for_a_mismatch():
    schema = {"properties": {"a": {"pattern": r"(a|aa)+$"}}}
    require_schema(schema)
    with pytest.raises(PatternTooSlow):
        fits({"a": "a" * 80 + "b"}, schema)
    assert fits({"a": "aa"}, schema)


def test_patterns_of_a_schema_have_the_syntax_of_python():
    assert fits("Ä1", {"pattern": r"^(?P<letter>\w)\d\Z"})


@given(json_values)
def test_a_value_fits_a_schema_of_itself_and_not_its_negation(value):
    require_schema({"const": value, "enum": [value]})
    assert fits(value, {"const": value, "enum": [value]})
    assert not fits(value, {"not": {"const": value}})
    assert fits(value, {"anyOf": [False, True]})
    assert not fits(value, {"oneOf": [True, True]})
    assert fits([value, value], {"uniqueItems": False})
    assert not fits([value, value], {"uniqueItems": True})
