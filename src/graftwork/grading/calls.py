"""Answers that are Python functions, judged from outside the sandbox: arguments go in, plain values come out.

In: calls with what they give. Out: a grade. Expected values never enter the sandbox, and what comes out is
text that is parsed and compared here, by type and value: an answer cannot pass by patching, printing,
exiting or objects that equal everything.
"""

import json
import math
from typing import Any, Self

from pydantic import Field, model_validator

from graftwork.grading.code import extract_code, runner_of
from graftwork.grading.interface import Grade, GradeContext
from graftwork.records.base import Record
from graftwork.records.report import Case

PYTHON_CALLS = "python_calls"
DEEPEST = 20
HARNESS = """
import json, sys

def plain(value, depth=0):
    if depth > 20:
        raise ValueError("too deep")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [plain(item, depth + 1) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: plain(item, depth + 1) for key, item in value.items()}
    raise TypeError("not a plain value: " + kind.__name__)

write, dump, calls = sys.stdout.write, json.dumps, json.loads(CALLS)
import answer
found = []
for call in calls:
    try:
        function = getattr(answer, call["call"])
        found.append({"value": plain(function(*call["args"], **call["named"]))})
    except BaseException as error:
        found.append({"raises": type(error).__name__})
write("\\n" + dump(found) + "\\n")
sys.stdout.flush()
"""


class PythonCall(Record):
    """One call and what it gives: a value, or the name of the exception that it raises."""

    call: str
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    gives: Any = None
    raises: str | None = None


class PythonCalls(Record):
    """What the check `python_calls` takes."""

    calls: tuple[PythonCall, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _values_are_plain(self) -> Self:
        json.dumps([call.model_dump() for call in self.calls], allow_nan=False)
        return self


def grade_python_calls(_case: Case, text: str, context: GradeContext) -> Grade:
    """1 if every call gives what it should, else 0."""
    parameters: PythonCalls = context.parameters
    given = run_calls(extract_code(text), parameters.calls, context)
    return float(given is not None and all(map(is_right, parameters.calls, given)))


def run_calls(
    source: str, calls: tuple[PythonCall, ...], context: GradeContext
) -> list[dict[str, Any]] | None:
    """What each call gave; None if the answer did not get to its end or sent anything else."""
    asked = json.dumps([call.model_dump(include={"call", "args", "named"}) for call in calls])
    result = runner_of(context).run(f"CALLS = {asked!r}\n{HARNESS}", {"answer.py": source})
    if not result.ok:
        return None
    lines = result.stdout.strip().splitlines()
    try:
        # NaN and the infinities stay floats, which equal nothing that is expected.
        found = json.loads(lines[-1], parse_constant=float) if lines else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, list) or len(found) != len(calls):
        return None
    return found if all(isinstance(item, dict) for item in found) else None


def is_right(call: PythonCall, given: dict[str, Any]) -> bool:
    if call.raises is not None:
        return given.get("raises") == call.raises
    return "value" in given and same_value(given["value"], call.gives)


def same_value(given: Any, expected: Any, depth: int = 0) -> bool:
    """Equal in type and value; lists and tuples are alike, and floats may differ in the last digits."""
    if depth > DEEPEST:
        return False
    if isinstance(expected, tuple | list):
        alike = isinstance(given, list) and len(given) == len(expected)
        return alike and all(same_value(a, b, depth + 1) for a, b in zip(given, expected, strict=True))
    if isinstance(expected, dict):
        alike = isinstance(given, dict) and given.keys() == expected.keys()
        return alike and all(same_value(given[key], expected[key], depth + 1) for key in expected)
    if isinstance(expected, float) and type(given) in (int, float):
        try:
            return math.isclose(given, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:  # an integer that no float reaches
            return False
    return type(given) is type(expected) and given == expected
