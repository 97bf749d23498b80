"""A sandbox is opened where code is graded, and only there."""

import pytest

from graftwork.evaluate.project import _open_runner
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case


def a_case(check):
    asked = (Message(role="user", content="Write add."),)
    return Case(id="1", origin=Origin(file="x", line=1), messages=asked, reference="", checks=(check,))


@pytest.mark.parametrize("check", [{"metric": "python_tests", "tests": "pass"}, {"python_tests": "pass"}])
def test_a_case_that_brings_tests_gets_a_sandbox_in_full_and_in_brief(check):
    settings = EvaluateSettings.model_validate({"sandbox": {"mode": "off"}})
    assert _open_runner(settings, [a_case(check)]) is not None


def test_other_checks_need_none():
    assert _open_runner(EvaluateSettings(), [a_case({"contains": "python_tests"})]) is None
