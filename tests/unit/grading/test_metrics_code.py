"""Answers that are code: parsed and tested in the sandbox alone, and success cannot be feigned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.code import (
    CODE_COMPILES,
    CODE_PASSES,
    PythonTests,
    RememberingRunner,
    asks_for_code,
    extract_code,
    find_tests,
    grade_code_compiles,
    grade_code_passes,
    grade_python_tests,
    jobs_for,
)
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.process.sandbox import CodeJob, Limits, Sandbox, SandboxResult, why_not
from graftwork.process.sandbox.run import WAYS
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

RIGHT = "def add(a, b):\n    return a + b"
WRONG = "def add(a, b):\n    return a - b"
TESTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"


def make_case(*checks, reference=f"```python\n{RIGHT}\n```") -> Case:
    return Case(
        id="c1",
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content="Write add."),),
        reference=reference,
        checks=checks,
    )


CASE = make_case({"python_tests": TESTS})


@pytest.fixture(scope="module")
def context():
    kind = next((way for way in WAYS if not why_not(way)), None)
    if kind is None:
        pytest.skip("no way to shut code in works here")
    return GradeContext(sandbox=Sandbox(kind, Limits(wall_seconds=120)))


class StandIn:
    """A runner that counts and runs nothing."""

    def __init__(self, *, ok=True):
        self.asked = []
        self._ok = ok

    def compile(self, source):
        return self._result(CodeJob(source))

    def test(self, source, tests):
        return self._result(CodeJob(source, tests))

    def _result(self, job):
        self.asked.append(job)
        reason = "" if self._ok else "exit"
        return SandboxResult(
            ok=self._ok, exit_code=0, stdout="", stderr="", reason=reason, seconds=0, peak_bytes=0
        )


def test_an_answer_passes_if_all_its_tests_hold(context):
    assert grade_code_passes(CASE, f"Here it is:\n```python\n{RIGHT}\n```\nEnjoy.", context) == 1.0
    assert grade_code_passes(CASE, RIGHT, context) == 1.0
    assert grade_code_passes(CASE, WRONG, context) == 0.0
    assert grade_code_passes(CASE, "I would rather not.", context) == 0.0


def test_an_answer_compiles_if_it_is_python_whatever_it_would_do(context):
    assert grade_code_compiles(CASE, f"```python\n{WRONG}\n1 / 0\n```", context) == 1.0
    assert grade_code_compiles(CASE, "```python\ndef add(a, b:\n```", context) == 0.0
    assert grade_code_compiles(CASE, "raise SystemExit", context) == 1.0
    assert grade_code_compiles(CASE, "(" * 5000 + ")" * 5000, context) == 0.0
    assert grade_code_compiles(CASE, "x = '\0'", context) == 0.0


FEIGNED = {
    "leaves cleanly": "import sys; sys.exit(0)",
    "leaves at once": "import os; print('ok'); os._exit(0)",
    "prints success": WRONG + "\nprint('ok\\nOK\\nAll tests passed')",
    "leaves when it is called": "import sys\ndef add(a, b): sys.exit(0)",
    "leaves at once when it is called": "import os\ndef add(a, b): os._exit(0)",
    "leaves at the end": WRONG + "\nimport atexit, os\natexit.register(os._exit, 0)",
    "leaves when something is raised": WRONG + "\nimport sys, os\nsys.excepthook = lambda *a: os._exit(0)",
    "exec does nothing any more": "import builtins\nbuiltins.exec = lambda *a: None",
    "compile gives something else": WRONG + "\nimport builtins\nkept = compile\n"
    "builtins.compile = lambda *a, **k: kept('', 'x', 'exec')",
    "assertions are no errors": WRONG + "\nimport builtins\nbuiltins.AssertionError = type('E', (), {})",
    "writes to whatever is open": WRONG + "\nimport os\nfor n in range(3, 64):\n"
    "  try: os.write(n, b'\\0\\0\\0\\x02ok')\n  except OSError: pass",
    "looks for the nonce around itself": "import gc, os, re, sys\nseen = str(gc.get_objects())\n"
    "frame = sys._getframe()\nwhile frame:\n  seen += str(frame.f_locals) + str(frame.f_globals)\n"
    "  frame = frame.f_back\nfor n in re.findall('[0-9a-f]{32}', seen):\n"
    "  os.write(3, b'\\0\\0\\0\\x20' + n.encode())\nos._exit(0)",
    "dies": "import os; os.kill(os.getpid(), 9)",
    "replaces what reads and writes": WRONG + "\nimport os, marshal\nos.read = os.write = lambda *a: b''\n"
    "marshal.loads = lambda *a: {'tests': '', 'nonce': 'x'}",
    "a child goes on alone": "import os\nif os.fork(): os._exit(0)",
    "hides tests behind a thread": "import threading, os\n"
    "threading.Thread(target=lambda: os._exit(0)).start()\nwhile True: pass",
}


@pytest.mark.parametrize("source", FEIGNED.values(), ids=FEIGNED.keys())
def test_success_cannot_be_feigned(context, source):
    assert grade_code_passes(CASE, source, context) == 0.0


def test_code_that_guards_its_own_start_is_loaded_not_started(context):
    source = RIGHT + "\nif __name__ == '__main__':\n    print(add(int(input()), 1))"
    assert grade_code_passes(CASE, source, context) == 1.0


def test_dataclasses_and_threads_work_within_the_box(context):
    source = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport asyncio, threading\n"
        "@dataclass\nclass Sum:\n    a: int\n    b: int\n"
        "async def later(a, b): return Sum(a, b).a + b\n"
        "def add(a, b): return asyncio.run(later(a, b))"
    )
    assert grade_code_passes(CASE, source, context) == 1.0


def test_no_code_is_touched_without_a_sandbox():
    for grade in (grade_code_compiles, grade_code_passes):
        with pytest.raises(CannotGrade, match="no sandbox"):
            grade(CASE, RIGHT, GradeContext())


def test_a_metric_applies_by_the_case_alone():
    nothing = make_case(reference="The capital is Paris.")
    assert grade_code_passes(nothing, RIGHT, GradeContext()) is None
    assert grade_code_compiles(nothing, RIGHT, GradeContext()) is None
    assert asks_for_code(make_case(reference="import os\nprint(os.name)"))
    assert asks_for_code(make_case({"python_tests": "assert 1"}, reference="anything"))
    assert not asks_for_code(make_case(reference="```bash\nls\n```"))


def test_tests_are_found_in_full_and_in_brief():
    case = make_case(
        {"python_tests": "assert 1"},
        {"name": "second", "metric": "python_tests", "tests": "assert 2"},
        {"contains": "thanks"},
    )
    assert find_tests(case) == ("assert 1", "assert 2")


def test_every_set_of_tests_must_hold():
    case = make_case({"python_tests": "assert 1"}, {"python_tests": "assert 2"})
    runner = StandIn()
    assert grade_code_passes(case, RIGHT, GradeContext(sandbox=runner)) == 1.0
    assert runner.asked == [CodeJob(RIGHT, "assert 1"), CodeJob(RIGHT, "assert 2")]
    assert grade_code_passes(case, RIGHT, GradeContext(sandbox=StandIn(ok=False))) == 0.0


def test_a_check_is_graded_by_its_own_tests():
    runner = StandIn()
    context = GradeContext(sandbox=runner, parameters=PythonTests(tests="assert 5"))
    assert grade_python_tests(make_case(), RIGHT, context) == 1.0
    assert runner.asked == [CodeJob(RIGHT, "assert 5")]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x = 1", "x = 1"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1"),
        ("```py\nx = 1\n```\n```bash\nrm -r\n```\n```Python\ny = 2\n```", "x = 1\ny = 2"),
        ("```\nx = 1\n```", "x = 1"),
        ("```python\nx = 1", "x = 1"),
        ("~~~python title=x\nx = '''\n```\n'''\n~~~", "x = '''\n```\n'''"),
        ("````python\nx = 1\n```\n````", "x = 1\n```"),
        ("```bash\nls\n```", "```bash\nls\n```"),
        ("", ""),
    ],
)
def test_code_is_taken_out_of_its_fences(text, code):
    assert extract_code(text) == code


@given(st.text(max_size=200))
def test_any_text_gives_some_code(text):
    assert isinstance(extract_code(text), str)
    assert extract_code(f"```python\n{text.replace('`', '').replace('~', '')}\n```") is not None


def test_remembered_answers_get_the_grades_of_their_run(context):
    runner = RememberingRunner(context.sandbox)
    answers = [(CASE, RIGHT), (CASE, WRONG), (CASE, RIGHT), (make_case(reference="Paris"), "Paris")]
    assert jobs_for(*answers[0], metrics=(CODE_PASSES, CODE_COMPILES)) == [
        CodeJob(RIGHT, TESTS),
        CodeJob(RIGHT),
    ]
    remembering = GradeContext(sandbox=runner)
    grades = [grade_code_passes(case, text, remembering) for case, text in answers]
    assert grades == [1.0, 0.0, 1.0, None]
