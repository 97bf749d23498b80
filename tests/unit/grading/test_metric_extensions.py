"""Metrics of installed packages are found by entry point and graded like built-in ones."""

from importlib import metadata

import pytest
from pydantic import ValidationError

from graftwork.evaluate.settings import EvaluateSettings
from graftwork.grading import metrics
from graftwork.grading.checks import GradeCheck, against_reference, grade
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

CASE = Case(
    id="c", origin=Origin(file="f", line=1), messages=(Message(role="user", content="q"),), reference="abcd"
)


class ShareOfLength:
    scored = True
    against_reference = True

    def grade(self, case, answer, context):
        if answer == "broken":
            raise CannotGrade("no length")
        return min(1.0, len(answer) / len(case.reference))


class Incomplete:
    def grade(self, case, answer, context):
        return 1.0


length, incomplete = ShareOfLength(), Incomplete()


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    known = [
        metadata.EntryPoint(name, f"{__name__}:{value}", "graftwork.metrics")
        for name, value in (("length", "length"), ("incomplete", "incomplete"), ("token_f1", "length"))
    ]

    def entry_points(*, group, name=None):
        return [
            extension for extension in known if group == extension.group and name in (None, extension.name)
        ]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    metrics.find_extension.cache_clear()
    yield
    metrics.find_extension.cache_clear()


def test_a_metric_of_a_package_is_named_in_the_settings_and_grades():
    settings = EvaluateSettings(metrics=("json_valid", "length"))
    assert settings.graded == ("json_valid", "length")
    context = GradeContext()
    assert grade("length", CASE, "ab", context=context) == 0.5
    assert metrics.is_scored("length")
    assert against_reference("length", context)


def test_a_metric_of_a_package_that_fails_gives_no_grade_and_is_reported():
    context = GradeContext()
    assert grade("length", CASE, "broken", context=context) is None
    assert context.failed[0].reason == "no length"


def test_a_check_can_use_a_metric_of_a_package_with_a_threshold():
    check = GradeCheck.model_validate({"name": "long", "metric": "length", "at_least": 0.5})
    assert not check.scored
    assert check.grade(CASE, "ab", GradeContext()) == 1.0
    assert check.grade(CASE, "a", GradeContext()) == 0.0


def test_a_built_in_metric_cannot_be_replaced_by_a_package():
    assert metrics.find_extension("token_f1") is None
    assert grade("token_f1", CASE, "abcd", context=GradeContext()) == 1.0


def test_an_unknown_metric_is_refused_and_an_incomplete_one_is_named():
    with pytest.raises(ValidationError, match="there is no metric lenght"):
        EvaluateSettings(metrics=("lenght",))
    with pytest.raises(EnvironmentFailure, match="has no scored, against_reference"):
        EvaluateSettings(metrics=("incomplete",))
