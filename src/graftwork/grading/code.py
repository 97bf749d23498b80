"""Answers that are Python: whether they parse, pass their tests and return the correct values for calls.

Input: a case, the text of an answer, a sandbox. Output: a grade. The code is taken out of its fences, and is
neither compiled nor run anywhere but in the sandbox; without one there is no grade. Tests and calls come with
the case: `checks: [{"python_tests": "assert add(1, 2) == 3"}]`. The values that calls must give never enter
the sandbox, and what comes out is parsed and compared here, by type and value: an answer cannot pass by
patching, printing, exiting or objects that equal everything.
"""

import json
import math
import re
from collections.abc import Collection
from typing import Any, Protocol, Self

from pydantic import Field, model_validator

from graftwork.grading.interface import CannotGrade, Grade, GradeContext
from graftwork.process.sandbox import CodeJob, Sandbox, SandboxResult, run_jobs
from graftwork.records.base import Record
from graftwork.records.report import Case

CODE_COMPILES = "code_compiles"
CODE_PASSES = "code_passes"

PYTHON_CALLS = "python_calls"
DEEPEST = 20
PYTHON_TESTS = "python_tests"
_FENCE = re.compile(r"^[ \t]{0,3}(?P<mark>`{3,}|~{3,})[ \t]*(?P<word>[\w+.-]*)[^\n`]*$")
_PYTHON = frozenset({"python", "python3", "py", "py3"})
_LOOKS_LIKE_PYTHON = re.compile(r"^(?:async def|def|class|import|from)\s+\w", re.M)
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


class PythonTests(Record):
    """Parameters of the check `python_tests`."""

    tests: str
    """Python that is run after the answer, in its names: assert what must hold."""


class PythonCall(Record):
    """One call and its expected result: a value, or the name of the exception that it raises."""

    call: str
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    gives: Any = None
    raises: str | None = None


class PythonCalls(Record):
    """Parameters of the check `python_calls`."""

    calls: tuple[PythonCall, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _values_are_plain(self) -> Self:
        json.dumps([call.model_dump() for call in self.calls], allow_nan=False)
        return self


class CodeRunner(Protocol):
    """Runs answers: the sandbox itself, or a cache over it."""

    def compile(self, source: str) -> SandboxResult: ...

    def test(self, source: str, tests: str) -> SandboxResult: ...

    def run(self, source: str, files: dict[str, str]) -> SandboxResult: ...


class RememberingRunner:
    """A sandbox that runs no answer twice."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._known: dict[CodeJob, SandboxResult] = {}
        self._ran: dict[tuple[str, tuple[tuple[str, str], ...]], SandboxResult] = {}

    def compile(self, source: str) -> SandboxResult:
        return self._result(CodeJob(source))

    def test(self, source: str, tests: str) -> SandboxResult:
        return self._result(CodeJob(source, tests))

    def run(self, source: str, files: dict[str, str]) -> SandboxResult:
        key = (source, tuple(sorted(files.items())))
        if key not in self._ran:
            self._ran[key] = self._sandbox.run(source, files=files)
        return self._ran[key]

    def _result(self, job: CodeJob) -> SandboxResult:
        if job not in self._known:
            self._known[job] = next(run_jobs([job], sandbox=self._sandbox, at_once=1))
        return self._known[job]


def grade_code_compiles(case: Case, text: str, context: GradeContext) -> Grade:
    """Whether it is Python. None if the case does not ask for code."""
    if not asks_for_code(case):
        return None
    return float(runner_of(context).compile(extract_code(text)).ok)


def grade_code_passes(case: Case, text: str, context: GradeContext) -> Grade:
    """Whether all tests of the case pass. None if it has none."""
    tests = find_tests(case)
    return _passes(text, tests, context) if tests else None


def grade_python_tests(_case: Case, text: str, context: GradeContext) -> Grade:
    """One check by its own tests."""
    parameters: PythonTests = context.parameters
    return _passes(text, (parameters.tests,), context)


def grade_python_calls(_case: Case, text: str, context: GradeContext) -> Grade:
    """1 if every call gives the expected result, else 0."""
    parameters: PythonCalls = context.parameters
    returned = run_calls(extract_code(text), parameters.calls, context)
    return float(returned is not None and all(map(is_right, parameters.calls, returned)))


def run_calls(
    source: str, calls: tuple[PythonCall, ...], context: GradeContext
) -> list[dict[str, Any]] | None:
    """The result of each call; None if the answer did not get to its end or sent anything else."""
    calls_json = json.dumps([call.model_dump(include={"call", "args", "named"}) for call in calls])
    result = runner_of(context).run(f"CALLS = {calls_json!r}\n{HARNESS}", {"answer.py": source})
    if not result.ok:
        return None
    lines = result.stdout.strip().splitlines()
    try:
        # NaN and the infinities stay floats, which equal nothing that is expected.
        returned = json.loads(lines[-1], parse_constant=float) if lines else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(returned, list) or len(returned) != len(calls):
        return None
    return returned if all(isinstance(item, dict) for item in returned) else None


def is_right(call: PythonCall, returned: dict[str, Any]) -> bool:
    if call.raises is not None:
        return returned.get("raises") == call.raises
    return "value" in returned and same_value(returned["value"], call.gives)


def same_value(returned: Any, expected: Any, depth: int = 0) -> bool:
    """Return whether two values are equal in type and value; lists and tuples are
    interchangeable, and floats may differ in the last digits.
    """
    if depth > DEEPEST:
        return False
    if isinstance(expected, tuple | list):
        same_length = isinstance(returned, list) and len(returned) == len(expected)
        return same_length and all(
            same_value(a, b, depth + 1) for a, b in zip(returned, expected, strict=True)
        )
    if isinstance(expected, dict):
        same_length = isinstance(returned, dict) and returned.keys() == expected.keys()
        return same_length and all(same_value(returned[key], expected[key], depth + 1) for key in expected)
    if isinstance(expected, float) and type(returned) in (int, float):
        try:
            return math.isclose(returned, expected, rel_tol=1e-9, abs_tol=1e-12)
        except OverflowError:  # an integer that no float reaches
            return False
    return type(returned) is type(expected) and returned == expected


def find_tests(case: Case) -> tuple[str, ...]:
    """The Python tests among the checks of a case, in the long or the short form."""
    programs = []
    for check in case.checks:
        tests = check.get("tests") if check.get("metric") == PYTHON_TESTS else check.get(PYTHON_TESTS)
        if isinstance(tests, dict):
            tests = tests.get("tests")
        if isinstance(tests, str):
            programs.append(tests)
    return tuple(programs)


def asks_for_code(case: Case) -> bool:
    """Only by the case: it has tests, or the logged reply is Python."""
    fenced = _fenced_blocks(case.reference)
    has_calls = any("python_calls" in (check.get("metric"), *check) for check in case.checks)
    if find_tests(case) or has_calls or any(word in _PYTHON for word, _ in fenced):
        return True
    return not fenced and _LOOKS_LIKE_PYTHON.match(case.reference.lstrip()) is not None


def extract_code(text: str, *, languages: Collection[str] = _PYTHON) -> str:
    """Extract the blocks fenced as this language; else all fenced blocks; else the whole text."""
    blocks = _fenced_blocks(text)
    in_language = [code for word, code in blocks if word in languages]
    unnamed = [code for word, code in blocks if not word]
    if in_language or unnamed:
        return "\n".join(in_language or unnamed)
    return text


def _passes(text: str, tests: tuple[str, ...], context: GradeContext) -> float:
    """Each set of tests runs in its own sandbox: none can affect the next."""
    runner, source = runner_of(context), extract_code(text)
    for test in tests:
        result = runner.test(source, test)
        if result.reason == "unsupported":
            raise CannotGrade(f"the tests cannot run apart from the answer: {result.stderr}")
        if not result.ok:
            return 0.0
    return 1.0


def runner_of(context: GradeContext) -> CodeRunner:
    if context.sandbox is None:
        raise CannotGrade("there is no sandbox to run the code in, and it runs nowhere else")
    runner: CodeRunner = context.sandbox
    return runner


def _fenced_blocks(text: str) -> list[tuple[str, str]]:
    """The language and the content of every fence; one that is never closed goes to the end."""
    blocks: list[tuple[str, str]] = []
    lines: list[str] = []
    mark = word = ""
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if not mark and fence:
            mark, word, lines = fence["mark"], fence["word"].lower(), []
        elif mark and fence and not fence["word"] and fence["mark"].startswith(mark):
            blocks.append((word, "\n".join(lines)))
            mark = ""
        elif mark:
            lines.append(line)
    if mark:
        blocks.append((word, "\n".join(lines)))
    return blocks
