"""Own metrics: loaded from the project alone, by name, and never able to stop an evaluation."""

import os

import pytest

from graftwork.grading.checks import GradeCheck, grade, require_gradable
from graftwork.grading.interface import GradeContext
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

CASE = Case(
    id="case-7",
    origin=Origin(file="log.jsonl", line=1),
    messages=(Message(role="user", content="q"),),
    reference="six",
)


@pytest.fixture
def context(tmp_path):
    def make(metric, source=None, file="own.py"):
        if source is not None:
            path = tmp_path / "project" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        (tmp_path / "project").mkdir(exist_ok=True)
        check = GradeCheck.model_validate({"name": "mine", "metric": metric})
        return GradeContext(checks={"mine": check}, folder=tmp_path / "project")

    return make


@pytest.mark.parametrize(
    ("metric", "file"),
    [
        ("own.py:good", "own.py"),
        ("metrics/own.py:good", "metrics/own.py"),
        ("metrics.own:good", "metrics/own.py"),
        ("own:good", "own.py"),
        ("own:good", "own/__init__.py"),
    ],
)
def test_a_function_is_found_by_file_or_module(context, metric, file):
    made = context(metric, "def good(case, text):\n    return text == case.reference\n", file)
    assert grade("mine", CASE, "six", context=made) == 1.0
    assert grade("mine", CASE, "five", context=made) == 0.0
    assert made.failed == []


def test_a_function_may_be_anything_that_a_module_may_hold(context):
    source = (
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Length:\n"
        "    most: int\n"
        "    def __call__(self, case, text):\n"
        "        return None if not case.reference else min(1.0, len(text) / self.most)\n"
        "length = Length(4)\n"
    )
    made = context("own.py:length", source)
    assert grade("mine", CASE, "ab", context=made) == 0.5
    assert grade("mine", CASE.model_copy(update={"reference": ""}), "ab", context=made) is None


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        ("    return 1 / 0", "own.py:2: ZeroDivisionError"),
        ("    return helper()\ndef helper():\n    raise KeyError('x')", "own.py:4: KeyError"),
        ("    return 'yes'", "gave 'yes': a grade must be"),
        ("    return 1.5", "gave 1.5"),
        ("    return float('nan')", "gave nan"),
        ("    return text.missing", "own.py:2: AttributeError"),
    ],
)
def test_an_error_names_metric_case_and_line_and_the_evaluation_goes_on(context, body, reported):
    made = context("own.py:bad", f"def bad(case, text):\n{body}\n")
    assert grade("mine", CASE, "x", context=made) is None
    [failed] = made.failed
    assert (failed.metric, failed.case_id) == ("mine", "case-7")
    assert reported in failed.reason


@pytest.mark.parametrize(
    ("source", "reported", "line"),
    [
        ("def good(case, text)\n    return 1\n", "SyntaxError", ":1"),
        ("x = 1\nimport no_such_module_here\n", "ModuleNotFoundError", ":2"),
        ("x = 1\n\nraise SystemExit(3)\n", "SystemExit", ":3"),
        ("def other(case, text):\n    return 1\n", "no function good", ""),
    ],
)
def test_a_file_that_cannot_be_loaded_is_reported_before_anything_is_asked(context, source, reported, line):
    with pytest.raises(UserError, match=reported) as caught:
        require_gradable(context("own.py:good", source))
    assert caught.value.where.endswith(f"own.py{line}")
    assert caught.value.fix


def test_nothing_outside_the_project_is_loaded(context, tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("raise AssertionError('loaded')\n")
    for metric in ("../outside.py:f", f"{outside}:f"):
        with pytest.raises(UserError, match="outside the project"):
            require_gradable(context(metric))
    (tmp_path / "project" / "link.py").symlink_to(outside)
    with pytest.raises(UserError, match="outside the project"):
        require_gradable(context("link.py:f"))
    with pytest.raises(UserError, match="no file"):
        require_gradable(context("missing.py:f"))


def test_an_installed_module_is_not_taken_for_one_of_the_project(context):
    with pytest.raises(UserError, match="no file"):
        require_gradable(context("json:loads"))


def test_a_changed_file_is_read_again_and_nothing_is_left_next_to_it(context, tmp_path):
    made = context("own.py:f", "def f(case, text):\n    return 0\n")
    assert grade("mine", CASE, "x", context=made) == 0.0
    path = tmp_path / "project" / "own.py"
    written = path.stat()
    path.write_text("def f(case, text):\n    return 1\n")
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert grade("mine", CASE, "x", context=made) == 1.0
    assert sorted(file.name for file in path.parent.iterdir()) == ["own.py"]
