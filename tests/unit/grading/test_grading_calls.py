"""Functions judged from outside the sandbox, and the catalogue of answers that cheat."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.checks import GradeCheck
from graftwork.grading.code import (
    PythonCall,
    RememberingRunner,
    asks_for_code,
    is_right,
    run_calls,
    same_value,
)
from graftwork.grading.interface import GradeContext
from graftwork.grading.reward_audit import PROGRAMS, TEXTS, function_name, hacks_for
from graftwork.process.sandbox import SandboxSettings, open_sandbox
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

CALLS = [
    {"call": "add", "args": [1, 2], "gives": 3},
    {"call": "add", "args": [2, 5], "gives": 7},
    {"call": "add", "args": ["a", "b"], "gives": "ab"},
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def make_case(**checks):
    return Case(
        id="add",
        origin=Origin(file="f", line=1),
        messages=(Message(role="user", content="Write add(a, b)."),),
        reference="def add(a, b):\n    return a + b\n",
        checks=(checks,) if checks else (),
    )


@pytest.fixture(scope="module")
def context():
    try:
        return GradeContext(sandbox=RememberingRunner(open_sandbox(SandboxSettings())))
    except EnvironmentFailure:
        pytest.skip("no way to shut code in works here")


def grade_by_calls(text, context):
    check = GradeCheck.model_validate({"python_calls": CALLS})
    return check.grade(make_case(python_calls=CALLS), text, context)


def test_right_functions_pass_and_wrong_ones_do_not(context):
    assert grade_by_calls("def add(a, b):\n    return a + b\n", context) == 1.0
    assert (
        grade_by_calls("```python\ndef add(x, y):\n    print('hello')\n    return x + y\n```", context) == 1.0
    )
    assert grade_by_calls("def add(a, b):\n    return a - b\n", context) == 0.0
    assert grade_by_calls("def sub(a, b):\n    return a + b\n", context) == 0.0


@pytest.mark.parametrize(
    "name", ["equals everything", "int that equals everything", "prints results", "patched json"]
)
def test_answers_that_cheat_get_nothing_by_calls(context, name):
    assert grade_by_calls(PROGRAMS[name].format(name="add"), context) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_of_the_catalogue_passes_by_calls(context, name):
    assert grade_by_calls(PROGRAMS[name].format(name="add"), context) == 0.0


def test_exceptions_can_be_what_a_call_gives(context):
    calls = (
        PythonCall(call="half", args=(1,), raises="ValueError"),
        PythonCall(call="half", args=(4,), gives=2),
    )
    source = "def half(n):\n    if n % 2:\n        raise ValueError('odd')\n    return n // 2\n"
    given = run_calls(source, calls, context)
    assert [is_right(call, found) for call, found in zip(calls, given, strict=True)] == [True, True]


@given(VALUES)
def test_a_value_is_the_same_as_itself(value):
    assert same_value(value, value)


@given(VALUES, VALUES)
def test_values_of_other_types_are_not_the_same(a, b):
    if same_value(a, b):
        assert a == b
        assert type(a) is type(b)


def test_numbers_are_compared_by_type():
    assert not same_value(True, 1)
    assert not same_value(1, True)
    assert not same_value(1.0, 1)
    assert same_value(1, 1.0)
    assert same_value([0.1 + 0.2], (0.3,))
    assert not same_value(None, 0.0)


def test_a_number_beyond_floats_is_wrong_and_no_failure_of_the_reward():
    """A reward that fails does not count: such an answer would escape its 0."""
    assert not same_value(10**400, 1.5)
    assert not same_value([-(10**400)], [0.0])
    assert same_value(10**300, 1e300)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_no_number_is_not_taken_for_nothing(context, value):
    (given,) = run_calls(f"def f():\n    return float({value!r})\n", (PythonCall(call="f"),), context)
    assert not is_right(PythonCall(call="f", gives=None), given)
    assert not is_right(PythonCall(call="f", gives=0.0), given)


def test_the_catalogue_has_at_least_twenty_hacks_and_leaves_out_the_reference():
    code = list(hacks_for(make_case(python_calls=CALLS)))
    assert len(code) >= 40
    assert len({hack.name for hack in code}) == len(code)
    text = make_case().model_copy(update={"reference": "I cannot answer this question.", "checks": ()})
    names = {hack.name for hack in hacks_for(text)}
    assert "refuses" not in names
    assert len(names) == len(TEXTS)


def test_the_function_of_a_case_is_found():
    assert function_name(make_case(python_calls=CALLS)) == "add"
    assert function_name(make_case(python_tests="assert not twice(2) == 5")) == "add"
    assert asks_for_code(make_case(python_calls=CALLS).model_copy(update={"reference": ""}))
