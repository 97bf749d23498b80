"""The training process: `python -m graftwork.train.worker_process JOB_FILE`.

Input: a TrainJob, or a TrainBatch of several. Output: what the training worker leaves in each run's folder.
Training and evaluation do not import each other: here the metrics become training's evaluator.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.evaluate.cases import choose_cases, draw_cases
from graftwork.grading.answers import AnswerFields
from graftwork.grading.metrics import LOWER_IS_BETTER, METRICS, TRUNCATED
from graftwork.grading.rewards import RewardQuestion, RewardRunner, RewardSpec
from graftwork.process.worker import run_worker
from graftwork.records.dataset import Row
from graftwork.records.report import Case
from graftwork.records.run import TrainBatch, TrainJob
from graftwork.text.redact import hide_in_tracebacks
from graftwork.train.callbacks import TrainingEvaluator
from graftwork.train.distributed.launch import is_main_process, leave
from graftwork.train.multi_run import train_many
from graftwork.train.rollouts.project import job_prompts, read_eval_cases
from graftwork.train.worker import job_settings, train

if TYPE_CHECKING:
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.generate.generator import Generated

TOGETHER = 4
"""Cases asked in one batch. Batches are always cut the same way: the other rows of a batch can change the
last bit of a row's logits, and so its answer.
"""


class GradedAnswers:
    """An evaluator that generates greedily like the evaluation, and grades by the same functions."""

    _together = TOGETHER

    def __init__(self, template: "ChatTemplate", *, fields: AnswerFields, max_new_tokens: int) -> None:
        self._template = template
        self._fields = fields
        self._longest = max_new_tokens

    def choose(self, rows: Sequence[Row], *, metric: str, most: int) -> list[Row]:
        # Whether a metric applies depends only on the case: the reference serves to find out.
        return [row for row in rows if self._grade(metric, row, row.reply, "stop") is not None][:most]

    def smaller_is_better(self, metric: str) -> bool:
        return metric in LOWER_IS_BETTER

    def evaluate(
        self, model: Any, rows: Sequence[Row], *, metric: str, seconds: float, progress: Callable[[], None]
    ) -> tuple[float, ...]:
        from graftwork.model.generate.generator import Generator, Sampling
        from graftwork.model.load import eval_mode

        until = time.monotonic() + seconds
        answered: list[tuple[Row, Generated]] = []
        with eval_mode(model):
            generator = Generator(model, stop_tokens=[self._template.eos])
            for batch in _cut(rows, together=self._together):
                in_time = _Watch(progress, until=None if not answered else until)
                replies = generator.generate(
                    [self._template.prompt(row.messages) for row in batch],
                    Sampling(max_new_tokens=self._longest),
                    on_token=in_time,
                )
                if in_time.over:
                    break
                answered += zip(batch, replies, strict=True)
                if time.monotonic() >= until:
                    break
        return tuple(self._grade_replies(metric, answered))

    def _grade_replies(self, metric: str, answered: "Sequence[tuple[Row, Generated]]") -> list[float]:
        grades = (
            self._grade(metric, row, self._template.decode(reply.tokens), reply.finish_reason)
            for row, reply in answered
        )
        return [0.0 if grade is None else grade for grade in grades]

    def _grade(self, metric: str, row: Row, text: str, finish_reason: str) -> float | None:
        if metric == TRUNCATED:
            return float(finish_reason == "length")
        return METRICS[metric](choose_cases([row])[0], text, self._fields)


class RewardedAnswers(GradedAnswers):
    """An evaluator whose grades are the rewards of the run, on cases that it does not train on."""

    _together = 16

    def __init__(
        self, template: "ChatTemplate", *, cases: Sequence[Case], spec: RewardSpec, max_new_tokens: int
    ) -> None:
        super().__init__(template, fields=AnswerFields(), max_new_tokens=max_new_tokens)
        self._cases = {case.id: case for case in cases}
        self._spec = spec

    def choose(self, rows: Sequence[Row], *, metric: str, most: int) -> list[Row]:
        return [self._row(case) for case in draw_cases(tuple(self._cases.values()), most=most)]

    def smaller_is_better(self, metric: str) -> bool:
        return False

    def _row(self, case: Case) -> Row:
        prompt = self._template.prompt(case.messages)
        return Row.model_construct(
            id=case.id,
            origin=case.origin,
            messages=case.messages,
            reply=case.reference,
            tokens=tuple(prompt),
            trained_from=len(prompt),
        )

    def _grade_replies(self, metric: str, answered: "Sequence[tuple[Row, Generated]]") -> list[float]:
        questions = [
            RewardQuestion(
                row.id,
                self._cases[row.id],
                self._template.decode(reply.tokens),
                truncated=reply.finish_reason == "length",
            )
            for row, reply in answered
        ]
        with RewardRunner(self._spec) as runner:
            # A reward that fails says nothing about the model: such an evaluation is not compared.
            return [
                math.nan if graded.reward is None else graded.reward for graded in runner.grade_all(questions)
            ]


class _Watch:
    """Receives every token: reports progress, and ends a batch that exceeds the time."""

    def __init__(self, progress: Callable[[], None], *, until: float | None) -> None:
        self._progress = progress
        self._until = until
        self.over = False

    def __call__(self, _row: int, _token: int) -> bool:
        self._progress()
        if self._until is not None and time.monotonic() >= self._until:
            self.over = True
        return not self.over


def _cut(rows: Sequence[Row], *, together: int) -> Iterator[Sequence[Row]]:
    """The first row alone, so that even a short evaluation has an answer; then in batches."""
    yield rows[:1]
    for start in range(1, len(rows), together):
        yield rows[start : start + together]


def make_evaluator(job: TrainJob) -> TrainingEvaluator | None:
    """None if the run is judged only by its loss: then no evaluator is needed."""
    evaluation = job.plan.train.get("evaluation")
    if evaluation is None and job.eval_file is None:
        return None
    from graftwork.model.chat.template import ChatTemplate

    if job.eval_file is not None:
        settings, rendering = job_settings(job), job.plan.train.get("rendering", {})
        return RewardedAnswers(
            ChatTemplate.from_folder(Path(job.base_folder), reasoning=bool(rendering.get("reasoning", True))),
            cases=read_eval_cases(job, settings),
            spec=RewardSpec.model_validate({**job.plan.train["rewards"], "folder": job.project_folder}),
            max_new_tokens=settings.rollouts.max_completion_length,
        )
    assert evaluation is not None
    return GradedAnswers(
        ChatTemplate.from_folder(Path(job.base_folder), reasoning=bool(evaluation["reasoning"])),
        fields=AnswerFields.model_validate(evaluation["fields"]),
        max_new_tokens=int(evaluation["max_new_tokens"]),
    )


def train_job(job: TrainJob) -> None:
    train(job, evaluator=make_evaluator(job), cases=job_prompts(job, job_settings(job)))


def train_batch(batch: TrainBatch) -> None:
    train_many(batch, _train_one)


def _train_one(job: TrainJob, load: Callable[[TrainJob], Any], strategy: Any) -> None:
    cases = job_prompts(job, job_settings(job))
    train(job, load=load, evaluator=make_evaluator(job), strategy=strategy, cases=cases)


def main() -> int:
    if "jobs" in json.loads(Path(sys.argv[1]).read_bytes()):
        return run_worker(TrainBatch, lambda batch: Path(batch.folder), train_batch)
    return run_worker(TrainJob, lambda job: Path(job.folder), train_job, first=is_main_process())


if __name__ == "__main__":
    hide_in_tracebacks()
    leave(main())
