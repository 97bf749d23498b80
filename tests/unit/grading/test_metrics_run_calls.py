"""Own metrics that run tool calls in the sandbox: SQL on a small database, as in docs/evaluation.md."""

import re
from pathlib import Path

import pytest

from graftwork.grading.checks import GradeCheck, grade, require_gradable
from graftwork.grading.code import RememberingRunner
from graftwork.grading.interface import GradeContext
from graftwork.process.sandbox import Limits, Sandbox, why_not
from graftwork.process.sandbox.run import WAYS
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.text.tool_calls import ToolCall, write_call

GUIDE = Path(__file__).parents[3] / "docs" / "evaluation.md"
FILES = ("metrics/run_sql.py", "metrics/rides.sql")
CHECK = {"name": "same_rows", "metric": "metrics/own.py:same_rows", "files": list(FILES), "at_least": 1}
LONG = "SELECT bike FROM rides WHERE minutes > 10"
ORDERED = f"{LONG} ORDER BY bike"


def write_guide(folder: Path) -> None:
    """The files of the guide, each under the name in its first line."""
    for name, text in re.findall(r"```\w+\n(?:#|--) (metrics/\S+)\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    write_guide(folder)
    return folder


@pytest.fixture(scope="module")
def context(project):
    kind = next((way for way in WAYS if not why_not(way)), None)
    if kind is None:
        pytest.skip("no way to shut code in works here")
    check = GradeCheck.model_validate(CHECK)
    limits = Limits(wall_seconds=60, cpu_seconds=2)
    return GradeContext(
        checks={"same_rows": check}, folder=project, sandbox=RememberingRunner(Sandbox(kind, limits))
    )


def call(query: str, name: str = "run_sql") -> str:
    return write_call(ToolCall(name, {"query": query}))


def grade_query(context, reference: str, answer: str):
    case = Case(
        id="c",
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content="Which bikes?"),),
        reference=reference,
    )
    context.failed.clear()
    return grade("same_rows", case, answer, context=context)


@pytest.mark.parametrize(
    ("reference", "answer", "expected"),
    [
        (LONG, "select bike from rides where not minutes <= 10", 1.0),
        (LONG, f"{LONG} ORDER BY bike DESC", 1.0),
        (ORDERED, f"{LONG} ORDER BY bike DESC", 0.0),
        (ORDERED, ORDERED, 1.0),
        (LONG, "SELECT DISTINCT bike FROM rides WHERE minutes > 10", 0.0),
        (LONG, "SELECT bike FROM rides WHERE minutes < 10", 0.0),
        (LONG, "SELECT bike FROM no_such_table", 0.0),
    ],
)
def test_a_query_is_right_if_it_gives_the_same_rows(context, reference, answer, expected):
    assert grade_query(context, call(reference), call(answer)) == expected
    assert not context.failed


@pytest.mark.parametrize(
    "hostile",
    [
        "DROP TABLE rides",
        "DELETE FROM rides",
        "ATTACH DATABASE 'run_sql.py' AS other",
        "PRAGMA writable_schema = ON",
        "WITH RECURSIVE f(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM f) SELECT COUNT(*) FROM f",
        "SELECT hex(zeroblob(900000000))",
        f"{LONG}; DROP TABLE rides",
    ],
)
def test_a_hostile_call_costs_the_attacker_alone(context, project, hostile):
    before = {name: (project / name).read_bytes() for name in FILES}
    assert grade_query(context, call(LONG), call(hostile)) == 0.0
    assert not context.failed
    assert grade_query(context, call(LONG), call(ORDERED)) == 1.0
    assert before == {name: (project / name).read_bytes() for name in FILES}


def test_answers_without_the_call_are_wrong_and_cases_without_one_are_not_graded(context):
    for answer in ("I cannot do that.", call(LONG, "open_ticket"), "<tool_call>{", call(LONG) + call(LONG)):
        assert grade_query(context, call(LONG), answer) == 0.0
    assert grade_query(context, "I only read.", call(LONG)) is None
    assert not context.failed


def test_a_logged_query_that_does_not_run_is_reported_with_the_line_of_the_metric(context):
    assert grade_query(context, call("SELECT x FROM trips"), call(LONG)) is None
    [failed] = context.failed
    assert re.search(r"own\.py:\d+: ValueError: .*no such table: trips", failed.reason)


def test_without_a_sandbox_no_call_is_run(context, project):
    bare = GradeContext(checks=context.checks, folder=project)
    assert grade_query(bare, call(LONG), call(LONG)) is None
    assert "no sandbox" in bare.failed[0].reason


@pytest.mark.parametrize("name", ["../outside.sql", "metrics/missing.sql", "metrics"])
def test_a_file_that_is_not_of_the_project_is_reported_before_anything_is_asked(project, name):
    (project.parent / "outside.sql").write_text("")
    check = GradeCheck.model_validate({**CHECK, "files": [name]})
    with pytest.raises(UserError, match="no file"):
        require_gradable(GradeContext(checks={"same_rows": check}, folder=project))


def test_a_file_that_is_no_text_is_reported_before_anything_is_asked(project):
    (project / "rides.db").write_bytes(b"SQLite format 3\0\xff")
    check = GradeCheck.model_validate({**CHECK, "files": ["rides.db", *FILES]})
    with pytest.raises(UserError, match=r"rides\.db is not text"):
        require_gradable(GradeContext(checks={"same_rows": check}, folder=project))


@pytest.mark.parametrize("name", ["run_sql.py", "arguments.json"])
def test_two_files_of_one_name_are_refused(project, name):
    (project / name).write_text("")
    check = GradeCheck.model_validate({**CHECK, "files": [name, *FILES]})
    with pytest.raises(UserError, match="same name"):
        require_gradable(GradeContext(checks={"same_rows": check}, folder=project))
