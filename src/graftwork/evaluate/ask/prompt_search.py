"""`python -m graftwork.evaluate.ask.prompt_search JOB.json`: an instruction for the base, improved by gepa.

Input: training and validation cases, a first instruction, a budget of answers. Output: `prompt.json`, the
prompt that does best on the validation cases; the first one if nothing is better. No test case is ever asked.
The package `gepa` is imported here and nowhere else.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graftwork.engines.endpoint import EndpointEngine
from graftwork.engines.interface import DecodingSettings, MeasuringEngine
from graftwork.engines.local import open_engine, settle, source_of
from graftwork.evaluate.cases import read_cases
from graftwork.evaluate.settings import EvaluateSettings, choose_success
from graftwork.evaluate.subjects import parse_subject
from graftwork.files.disk import write_atomic
from graftwork.grading.checks import grade
from graftwork.grading.interface import GradeContext
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker
from graftwork.records.base import Record
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.interaction import Message
from graftwork.records.release import PROMPT_FILE, PromptVariant
from graftwork.records.report import Case, EvalJob

GEPA = "gepa"
COMPONENT = "instruction"
REFLECTION_TOKENS = 1024
SEED = 0
SHOWN_CHARACTERS = 2000

AskAll = Callable[[str, Sequence[Case]], list[str]]
"""The model's answers to these cases with this instruction."""
GradeOne = Callable[[Case, str], float]
Propose = Callable[[str], str]
"""A language model's answer to a request to improve an instruction."""


class PromptSearchJob(Record):
    """The worker's job. The first `training` cases of the job's file are for proposals."""

    folder: str
    job: EvalJob
    """The base with its settings; its worked examples are part of the prompt."""
    training: int
    instruction: str
    rows: tuple[str, ...] = ()
    settings: EvaluateSettings
    project_folder: str


class PromptAdapter:
    """Connects gepa to the model and the project's own metric."""

    propose_new_texts = None

    def __init__(self, ask: AskAll, grade_one: GradeOne) -> None:
        self._ask, self._grade = ask, grade_one
        self.answers = 0

    def evaluate(self, batch: list[Case], candidate: dict[str, str], capture_traces: bool = False) -> Any:
        from gepa import EvaluationBatch

        answers = self._ask(candidate[COMPONENT], batch)
        self.answers += len(batch)
        scores = [self._grade(case, answer) for case, answer in zip(batch, answers, strict=True)]
        traces = list(zip(batch, answers, scores, strict=True))
        return EvaluationBatch(
            outputs=answers, scores=scores, trajectories=traces if capture_traces else None
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """What went well and what did not, as text; the reference is that of a training row."""
        examples = [
            {
                "Inputs": _cut(case.messages[-1].content),
                "Generated Outputs": _cut(answer),
                "Feedback": "This answer is right."
                if score >= 1
                else f"This answer scores {score:.2f} of 1. A right answer is: {_cut(case.reference)}",
            }
            for case, answer, score in eval_batch.trajectories or ()
        ]
        return dict.fromkeys(components_to_update, examples)


class _Silent:
    def log(self, message: str) -> None:
        """The worker's heartbeat reports progress; gepa's own lines are not kept."""


def search_instruction(
    adapter: PromptAdapter,
    *,
    first: str,
    training: Sequence[Case],
    validation: Sequence[Case],
    propose: Propose,
    most_answers: int,
    seed: int = 0,
) -> tuple[str, float, float]:
    """Return the best instruction found with this many answers, its score and that of the first one. Scores
    are means over the validation cases. The same answers and seed give the same instruction.
    """
    import gepa

    def reflect(prompt: Any) -> str:
        if isinstance(prompt, str):
            return propose(prompt)
        return propose("\n\n".join(str(turn.get("content", "")) for turn in prompt))

    result = gepa.optimize(
        seed_candidate={COMPONENT: first},
        trainset=list(training),
        valset=list(validation),
        adapter=adapter,
        reflection_lm=reflect,
        max_metric_calls=most_answers,
        logger=_Silent(),
        seed=seed,
        track_best_outputs=False,
    )
    scores = list(result.val_aggregate_scores)
    return str(result.best_candidate[COMPONENT]), float(scores[result.best_idx]), float(scores[0])


def search_prompt(job: PromptSearchJob) -> None:
    """Load the base, search, write the prompt."""
    settings, folder = job.settings, Path(job.folder)
    cases = read_cases(Path(job.job.cases_file))
    eval_job = settle(job.job)
    with Heart(folder) as heart:
        most = settings.prompt.max_answers
        heart.beat("loading the model", 0, most)
        engine = open_engine(eval_job.engine, source_of(eval_job))
        ask = ask_with(engine, eval_job)

        def ask_and_report(instruction: str, batch: Sequence[Case]) -> list[str]:
            answers = ask(instruction, batch)
            heart.beat("optimizing the prompt", min(adapter.answers + len(batch), most), most)
            return answers

        adapter = PromptAdapter(ask_and_report, grade_by(job))
        instruction, score, first_score = search_instruction(
            adapter,
            first=job.instruction,
            training=cases[: job.training],
            validation=cases[job.training :],
            propose=_proposer(settings, engine),
            most_answers=most,
            seed=SEED,
        )
        engine.close()
        prompt = PromptVariant(
            instruction=instruction,
            examples=eval_job.worked_example,
            rows=job.rows,
            optimizer=f"{GEPA}: {first_score:.3f} → {score:.3f} on "
            f"{len(cases) - job.training} validation rows, {adapter.answers} answers",
        )
        write_atomic(folder / PROMPT_FILE, prompt.to_json())
        heart.beat("done", most, most)


def ask_with(engine: MeasuringEngine, job: EvalJob) -> AskAll:
    decoding = DecodingSettings(job.max_new_tokens)

    def ask(instruction: str, cases: Sequence[Case]) -> list[str]:
        prompt = PromptVariant(instruction=instruction, examples=job.worked_example)
        answers: list[str] = []
        for start in range(0, len(cases), job.batch_size):
            batch = cases[start : start + job.batch_size]
            rendered = [engine.render(prompt.apply(case.messages)) for case in batch]
            answers += [reply.text for reply in engine.answer(rendered, decoding)]
        return answers

    return ask


def grade_by(job: PromptSearchJob) -> GradeOne:
    """Return the metric that counts successes; a case that it does not apply to scores 0."""
    settings = job.settings
    metric = choose_success(settings)
    context = GradeContext(
        fields=settings.fields,
        checks={check.name: check for check in settings.checks},
        folder=Path(job.project_folder),
    )
    return lambda case, answer: grade(metric, case, answer, context=context) or 0.0


def _proposer(settings: EvaluateSettings, engine: MeasuringEngine) -> Propose:
    """The endpoint of the settings, else the base itself."""
    reflection = settings.prompt.reflection
    endpoint = parse_subject(reflection).endpoint if reflection is not None else None
    client = EndpointEngine(endpoint) if endpoint is not None else None
    decoding = DecodingSettings(REFLECTION_TOKENS)

    def propose(text: str) -> str:
        messages = (Message(role="user", content=text),)
        if client is not None:
            return client.ask(messages, decoding).text
        return engine.answer([engine.render(messages)], decoding)[0].text

    return propose


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} …"


def require_gepa() -> None:
    """Refuse before a model has answered anything."""
    import importlib.util

    if importlib.util.find_spec(GEPA) is None:
        raise EnvironmentFailure(
            "the package gepa is not installed",
            why="evaluate.prompt.optimizer is gepa",
            fix="pip install gepa, or set evaluate.prompt.optimizer: none",
            where="evaluate.prompt.optimizer",
        )


if __name__ == "__main__":
    sys.exit(run_worker(PromptSearchJob, lambda job: Path(job.folder), search_prompt))
