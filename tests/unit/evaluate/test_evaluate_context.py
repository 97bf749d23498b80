"""A sandbox is opened where code is graded, and only there."""

from types import SimpleNamespace

import pytest

from graftwork.evaluate.project import Grading
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case


def sandbox_for(settings, check):
    asked = (Message(role="user", content="Write add."),)
    case = Case(id="1", origin=Origin(file="x", line=1), messages=asked, reference="", checks=(check,))
    work = SimpleNamespace(settings=SimpleNamespace(evaluate=settings))
    return Grading(work, [case]).sandbox


@pytest.mark.parametrize("check", [{"metric": "python_tests", "tests": "pass"}, {"python_tests": "pass"}])
def test_a_case_that_brings_tests_gets_a_sandbox_in_full_and_in_brief(check):
    settings = EvaluateSettings.model_validate({"sandbox": {"mode": "off"}})
    assert sandbox_for(settings, check) is not None


def test_other_checks_need_none():
    assert sandbox_for(EvaluateSettings(), {"contains": "python_tests"}) is None
