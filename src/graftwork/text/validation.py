"""The errors of pydantic in plain words.

In: one error of a ValidationError. Out: what the value must be, without its name: "must be a whole number".
Does not know where the value is.
"""

import re
from collections.abc import Mapping
from typing import Any

_WORDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "dict_type": "must be keys and values",
    "mapping_type": "must be keys and values",
    "model_type": "must be keys and values",
    "model_attributes_type": "must be keys and values",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "extra_forbidden": "unknown key",
    "missing": "is missing",
}


def explain_error(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, in words of ours."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("string_too_short", "too_short") and context.get("min_length") == 1:
        return "must not be empty"
    if kind in _WORDS:
        # Limits as one writes them: 1 and not 1.0.
        limits = {
            key: f"{limit:.15g}" if isinstance(limit, float) else limit for key, limit in context.items()
        }
        return _WORDS[kind].format(**limits)
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub(r"^(Input|String|Value|Tuple|List|Dictionary) should\b", "must", message)
