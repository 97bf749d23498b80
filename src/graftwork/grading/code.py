"""Answers that are Python: whether they parse, whether they pass their tests.

In: a case, the text of an answer, a sandbox. Out: a grade. The code is taken out of its fences, and is
neither compiled nor run anywhere but in the sandbox; without one there is no grade. Tests come with the
case: `checks: [{"python_tests": "assert add(1, 2) == 3"}]`.
"""

import re
from collections.abc import Collection
from typing import Protocol

from graftwork.grading.interface import CannotGrade, Grade, GradeContext
from graftwork.process.sandbox import CodeJob, Sandbox, SandboxResult, run_jobs
from graftwork.records.base import Record
from graftwork.records.report import Case

CODE_COMPILES = "code_compiles"
CODE_PASSES = "code_passes"
PYTHON_TESTS = "python_tests"
_FENCE = re.compile(r"^[ \t]{0,3}(?P<mark>`{3,}|~{3,})[ \t]*(?P<word>[\w+.-]*)[^\n`]*$")
_PYTHON = frozenset({"python", "python3", "py", "py3"})
_LOOKS_LIKE_PYTHON = re.compile(r"^(?:async def|def|class|import|from)\s+\w", re.M)


class PythonTests(Record):
    """What the check `python_tests` takes."""

    tests: str
    """Python that is run behind the answer, in its names: assert what must hold."""


class CodeRunner(Protocol):
    """What answers are run by: the sandbox itself, or one that remembers."""

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
    """Whether it is Python. None where the case does not ask for code."""
    if not asks_for_code(case):
        return None
    return float(runner_of(context).compile(extract_code(text)).ok)


def grade_code_passes(case: Case, text: str, context: GradeContext) -> Grade:
    """Whether all tests of the case hold. None where it brings none."""
    found = find_tests(case)
    return _passes(text, found, context) if found else None


def grade_python_tests(_case: Case, text: str, context: GradeContext) -> Grade:
    """One check by its own tests."""
    parameters: PythonTests = context.parameters
    return _passes(text, (parameters.tests,), context)


def find_tests(case: Case) -> tuple[str, ...]:
    """The Python tests among the checks that a case brings along, written in full or in brief."""
    found = []
    for check in case.checks:
        tests = check.get("tests") if check.get("metric") == PYTHON_TESTS else check.get(PYTHON_TESTS)
        if isinstance(tests, dict):
            tests = tests.get("tests")
        if isinstance(tests, str):
            found.append(tests)
    return tuple(found)


def asks_for_code(case: Case) -> bool:
    """By the case alone: it brings tests, or the reply that the log holds is Python."""
    fenced = _fenced_blocks(case.reference)
    has_calls = any("python_calls" in (check.get("metric"), *check) for check in case.checks)
    if find_tests(case) or has_calls or any(word in _PYTHON for word, _ in fenced):
        return True
    return not fenced and _LOOKS_LIKE_PYTHON.match(case.reference.lstrip()) is not None


def extract_code(text: str, *, languages: Collection[str] = _PYTHON) -> str:
    """What is fenced as this language, one block behind the other; else what is fenced; else all of it."""
    blocks = _fenced_blocks(text)
    named = [code for word, code in blocks if word in languages]
    unnamed = [code for word, code in blocks if not word]
    if named or unnamed:
        return "\n".join(named or unnamed)
    return text


def _passes(text: str, tests: tuple[str, ...], context: GradeContext) -> float:
    """Each set of tests in a box of its own: none can spoil what the next one finds."""
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
        found = _FENCE.match(line)
        if not mark and found:
            mark, word, lines = found["mark"], found["word"].lower(), []
        elif mark and found and not found["word"] and found["mark"].startswith(mark):
            blocks.append((word, "\n".join(lines)))
            mark = ""
        elif mark:
            lines.append(line)
    if mark:
        blocks.append((word, "\n".join(lines)))
    return blocks
