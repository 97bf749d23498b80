"""The process that grades answers for training: `python -m graftwork.grading.reward_worker`.

Input: a RewardSpec, then one JSON object per line: a metric, a case, a text, what is known of the answer.
Output: a line for each: a grade, or why there is none. What reward functions print goes to standard error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from graftwork.files.disk import PRIVATE_UMASK
from graftwork.grading.answers import AnswerFields
from graftwork.grading.checks import GradeCheck
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.grading.rewards import RewardSpec, grade_part, rank_answers
from graftwork.process.sandbox import Sandbox, SandboxResult, SandboxSettings, open_sandbox
from graftwork.process.worker import stop_with_parent
from graftwork.records.errors import GraftError
from graftwork.records.report import Case

MEMORY_BYTES = 4 * 2**30
"""Memory limit of reward functions."""
CODE_SHARE = 0.8
"""Share of the time for a question that the code of an answer may take. Code that hangs is a wrong answer: it
must end before this process itself counts as hanging.
"""


def make_context(spec: RewardSpec) -> GradeContext:
    checks = [GradeCheck.model_validate(check) for check in spec.checks]
    return GradeContext(
        fields=AnswerFields.model_validate(spec.fields),
        checks={check.name: check for check in checks},
        folder=Path(spec.folder),
        sandbox=_TimedRunner(SandboxSettings.model_validate(spec.sandbox), seconds=CODE_SHARE * spec.seconds),
    )


class _TimedRunner:
    """The sandbox, opened by the first reward that runs code; caches results. All runs of a question share
    its time limit: those that start after it fail.
    """

    def __init__(self, settings: SandboxSettings, *, seconds: float) -> None:
        self._settings, self._seconds = settings, seconds
        self._left: float | None = None
        self._known: dict[tuple[object, ...], SandboxResult] = {}

    @cached_property
    def _sandbox(self) -> Sandbox:
        return open_sandbox(self._settings)

    def begin(self) -> None:
        """Start the next question with its full time. Opening the sandbox does not count."""
        self._left = self._seconds

    def compile(self, source: str) -> SandboxResult:
        return self._once(("compile", source), lambda box: box.compile(source))

    def test(self, source: str, tests: str) -> SandboxResult:
        return self._once(("test", source, tests), lambda box: box.test(source, tests))

    def run(self, source: str, files: dict[str, str]) -> SandboxResult:
        return self._once(("run", source, *sorted(files.items())), lambda box: box.run(source, files=files))

    def _once(self, key: tuple[object, ...], compute: Callable[[Sandbox], SandboxResult]) -> SandboxResult:
        # Runs that failed for want of time are remembered too: the same answer is worth the same again.
        if key not in self._known:
            box = self._sandbox
            if self._left is not None and self._left <= 0:
                self._known[key] = _OUT_OF_TIME
            elif self._left is None:
                self._known[key] = compute(box)
            else:
                limit = min(box.limits.wall_seconds, self._left)
                started = time.monotonic()
                limits = box.limits.model_copy(update={"wall_seconds": limit})
                self._known[key] = compute(replace(box, limits=limits))
                self._left -= time.monotonic() - started
        return self._known[key]


_OUT_OF_TIME = SandboxResult(
    ok=False, exit_code=None, stdout="", stderr="", reason="wall_clock", seconds=0.0, peak_bytes=0
)


def answer(request: dict[str, Any], context: GradeContext) -> dict[str, Any]:
    if isinstance(context.sandbox, _TimedRunner):
        context.sandbox.begin()
    try:
        if "texts" in request:
            case = Case.model_validate(request["case"])
            return {"grades": rank_answers(request["metric"], case, request["texts"], context=context)}
        graded = grade_part(
            request["metric"],
            Case.model_validate(request["case"]),
            request["text"],
            context=context,
            evidence=request["evidence"],
        )
    except CannotGrade as error:
        return {"failed": str(error)}
    except GraftError as error:
        return {"failed": f"{error.what}: {error.fix}" if error.fix else error.what}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:200]}
    return {"grade": graded}


def main() -> int:
    import resource

    stop_with_parent()
    # The same in a check before training as in training, whose worker keeps its files private.
    os.umask(PRIVATE_UMASK)
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
