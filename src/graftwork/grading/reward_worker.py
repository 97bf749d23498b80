"""The process that grades answers for training: `python -m graftwork.grading.reward_worker`.

In: a RewardSpec, then one JSON object a line: a metric, a case, a text, what is known of the answer. Out: a
line for each: a grade, or why there is none. What reward functions print goes to standard error.
"""

import json
import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from graftwork.grading.answers import AnswerFields
from graftwork.grading.checks import GradeCheck
from graftwork.grading.code import RememberingRunner
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.grading.rewards import RewardSpec, grade_part
from graftwork.process.sandbox import SandboxResult, SandboxSettings, open_sandbox
from graftwork.process.worker import stop_with_parent
from graftwork.records.errors import GraftError
from graftwork.records.report import Case

MEMORY_BYTES = 4 * 2**30
"""What reward functions may allocate."""


def make_context(spec: RewardSpec) -> GradeContext:
    checks = [GradeCheck.model_validate(check) for check in spec.checks]
    return GradeContext(
        fields=AnswerFields.model_validate(spec.fields),
        checks={check.name: check for check in checks},
        folder=Path(spec.folder),
        sandbox=_LazyRunner(SandboxSettings.model_validate(spec.sandbox)),
    )


class _LazyRunner:
    """The sandbox, opened by the first reward that runs code."""

    def __init__(self, settings: SandboxSettings) -> None:
        self._settings = settings

    @cached_property
    def _runner(self) -> RememberingRunner:
        return RememberingRunner(open_sandbox(self._settings))

    def compile(self, source: str) -> SandboxResult:
        return self._runner.compile(source)

    def test(self, source: str, tests: str) -> SandboxResult:
        return self._runner.test(source, tests)

    def run(self, source: str, files: dict[str, str]) -> SandboxResult:
        return self._runner.run(source, files)


def answer(asked: dict[str, Any], context: GradeContext) -> dict[str, Any]:
    try:
        given = grade_part(
            asked["metric"],
            Case.model_validate(asked["case"]),
            asked["text"],
            context=context,
            evidence=asked["evidence"],
        )
    except CannotGrade as error:
        return {"failed": str(error)}
    except GraftError as error:
        return {"failed": error.what}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    return {"grade": given}


def main() -> int:
    import resource

    stop_with_parent()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    # Replies have a descriptor of their own: a reward function cannot answer for itself by printing.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    context = make_context(RewardSpec.from_json(sys.stdin.readline()))
    replies.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line), context)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
