"""Answers that are code: parsed and tested in the sandbox alone, and success cannot be feigned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.checks import grade
from graftwork.grading.code import (
    PythonTests,
    RememberingRunner,
    asks_for_code,
    extract_code,
    find_tests,
    grade_code_compiles,
    grade_code_passes,
    grade_python_tests,
)
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.grading.reward_audit import PROGRAMS
from graftwork.process.sandbox import (
    CodeJob,
    Limits,
    Sandbox,
    SandboxResult,
    SandboxSettings,
    open_sandbox,
    why_not,
)
from graftwork.process.sandbox.run import WAYS
from graftwork.records.errors import EnvironmentFailure
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


FEIGNED["equals everything"] = PROGRAMS["equals everything"].format(name="add")
FEIGNED["walks frames to the nonce"] = PROGRAMS["walks frames to the nonce and its channel"].format(
    name="add"
)


@pytest.mark.parametrize("source", FEIGNED.values(), ids=FEIGNED.keys())
def test_success_cannot_be_feigned(context, source):
    assert grade_code_passes(CASE, source, context) == 0.0


USES = {
    "arguments change in place": (
        "def sort(x): x.sort(); return x",
        "a = [3, 1]; given = sort(a); assert a == [1, 3]; assert given is a",
    ),
    "objects": (
        "class P:\n  def __init__(self, x): self.x = x\n  def __eq__(self, other): return self.x == other.x\n"
        "  def __add__(self, n): return P(self.x + n)",
        "p = P(1); assert isinstance(p, P); assert p + 2 == P(3); p.x = 7; assert p.x == 7",
    ),
    "errors of its own": (
        "class E(ValueError):\n  def __init__(self, code): super().__init__('bad'); self.code = code\n"
        "def f(): raise E(5)",
        "try: f()\nexcept E as e: assert (e.code, str(e)) == (5, 'bad')\nelse: assert False",
    ),
    "functions both ways": (
        "def twice(f): return lambda *a: f(f(*a))",
        "assert twice(lambda x: x + 1)(1) == 3; assert twice(str)(1) == '1'",
    ),
    "generators and printing": (
        "def count(n):\n  print('counting')\n  yield from range(n)",
        "import contextlib, io\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n"
        "  assert list(count(3)) == [0, 1, 2]\nassert b.getvalue() == 'counting\\n'",
    ),
    "values of the library": (
        "import collections, decimal\nP = collections.namedtuple('P', 'x y')\n"
        "def f(): return [decimal.Decimal('1.1'), collections.Counter('aab'), P(1, 2)]",
        "from decimal import Decimal\nassert f() == [Decimal('1.1'), {'a': 2, 'b': 1}, (1, 2)]",
    ),
    "names that change": (
        "items = []\ndef add(x): items.append(x)",
        "from unittest import mock\nimport answer\nadd(3); assert items == answer.items == [3]\n"
        "with mock.patch.object(answer, 'items', []): add(1)\nassert items == [3]",
    ),
}


@pytest.mark.parametrize(("source", "tests"), USES.values(), ids=USES.keys())
def test_tests_use_an_answer_from_their_own_process_as_if_it_were_theirs(context, source, tests):
    case = make_case({"python_tests": tests})
    assert grade_code_passes(case, source, context) == 1.0
    assert grade_code_passes(case, "def other(): pass", context) == 0.0


def test_an_answer_gets_neither_globals_nor_frames_of_a_function_of_the_tests(context):
    case = make_case({"python_tests": "assert peek(lambda: 1) == []\nassert peek(x for x in 'ab') == []"})
    source = (
        "def peek(given):\n  names = ['__globals__', '__code__', '__class__', 'gi_frame', '__self__']\n"
        "  return [n for n in names[:2] + names[3:] if hasattr(given, n)]"
    )
    assert grade_code_passes(case, source, context) == 1.0


def test_tests_that_cannot_run_apart_from_the_answer_give_no_grade(context):
    case = make_case({"python_tests": "class Mine(Base): pass"})
    with pytest.raises(CannotGrade, match="cannot inherit"):
        grade_code_passes(case, "class Base: pass", context)


@pytest.mark.parametrize("metric", ["code_compiles", "code_passes", "task_success", "python_calls"])
def test_a_sandbox_that_could_not_run_is_an_error_for_every_metric(tmp_path, metric, context):
    (tmp_path / "shut").mkdir(mode=0)
    kind = context.sandbox.kind
    sandbox = Sandbox(kind, Limits(), packages=(str(tmp_path / "shut"),))
    broken = GradeContext(sandbox=RememberingRunner(sandbox))
    calls = {"python_calls": [{"call": "add", "args": [1, 2], "gives": 3}]}
    case = make_case(calls if metric == "python_calls" else {"python_tests": TESTS})
    name = "task_success" if metric == "python_calls" else metric
    with pytest.raises(EnvironmentFailure, match="could not be made"):
        grade(name, case, RIGHT, context=broken)
    assert broken.failed == []


def test_a_sandbox_is_tried_with_the_packages_and_limits_that_it_will_have(tmp_path):
    (tmp_path / "module.py").touch(mode=0)
    settings = SandboxSettings(packages=(str(tmp_path),))
    with pytest.raises(EnvironmentFailure) as refused:
        open_sandbox(settings)
    assert "cannot read" in refused.value.why


def test_a_link_that_leads_out_of_the_box_does_not_stop_the_sandbox(tmp_path):
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "site.py").symlink_to(tmp_path / "elsewhere.py")
    (tmp_path / "elsewhere.py").touch(mode=0)
    for folder in (tmp_path, tmp_path / "packages"):
        folder.chmod(0o755)
    assert open_sandbox(SandboxSettings(packages=(str(tmp_path / "packages"),)))


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
    for grader in (grade_code_compiles, grade_code_passes):
        with pytest.raises(CannotGrade, match="no sandbox"):
            grader(CASE, RIGHT, GradeContext())


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
    remembering = GradeContext(sandbox=runner)
    grades = [grade_code_passes(case, text, remembering) for case, text in answers]
    assert grades == [1.0, 0.0, 1.0, None]
