"""The batch source of a run, by its objective.

Input: a job, its settings and training rows. Output: the rows that an engine is prepared for, and what opens
the batch source with its callbacks once the engine exists. Supervised runs take their rows as they are.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.disk import Journal
from graftwork.grading.reward_audit import audit_scores, require_usable, scored_rows
from graftwork.grading.rewards import RewardSpec
from graftwork.model.shape import read_shape
from graftwork.process.sandbox import SandboxSettings
from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.records.report import Case
from graftwork.records.run import TrainJob
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.objectives import BatchSource
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.objectives.pairs import (
    PairOrder,
    Render,
    ReplyPair,
    describe_pairs,
    make_pairs,
    render_with,
    require_pairs,
)
from graftwork.train.objectives.preference import JudgedOrder, make_judged, require_both_sides
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.rollouts.measures import (
    describe_too_long,
    find_too_long,
    make_decoys,
    split_checks,
    uses_checks,
)
from graftwork.train.rollouts.multi_turn import Environment, EpisodeSampler, add_opening
from graftwork.train.settings import TrainSettings, describe_idle

if TYPE_CHECKING:
    from graftwork.grading.rewards import RewardRunner
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.rollouts.sampling import RolloutSampler

REFERENCE = "reference.jsonl"
ROWS_TOGETHER = 16


def add_reference(
    samples: Sequence[TrainingSample],
    engine: "TrainingEngine",
    *,
    folder: Path,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[TrainingSample]:
    """The samples with their log-probabilities by the model that training starts from, before the first step.
    They are stored in the run's folder: a resumed run reads them and computes what is missing, before its
    checkpoint is restored.
    """
    journal = Journal(folder / REFERENCE)
    by_key = {line["row"]: tuple(line["values"]) for line in journal.read()}
    rows = list({key_of(sample): sample for sample in samples}.items())
    for start in range(0, len(rows), ROWS_TOGETHER):
        # The rows that share a pass can change the last bit: a resumed run has the same ones together.
        batch = rows[start : start + ROWS_TOGETHER]
        if all(key in by_key for key, _ in batch):
            continue
        progress(start, len(rows))
        for (key, _), values in zip(batch, engine.log_probabilities([row for _, row in batch]), strict=True):
            if key in by_key:
                # Computed next to other rows before: a resumed run must find the same bits.
                continue
            by_key[key] = tuple(values.float().tolist())
            journal.append({"row": key, "values": list(by_key[key])})
    return [sample.model_copy(update={"reference": by_key[key_of(sample)]}) for sample in samples]


class StartWeights:
    """The trained tensors before the first step, for log-probabilities by them at any later time. Values are
    swapped in place: the tensors keep their addresses, and no second model is needed.
    """

    def __init__(self, engine: "TrainingEngine") -> None:
        self._engine = engine
        self._start = {name: tensor.detach().clone() for name, tensor in engine.learned().items()}

    def log_probabilities(self, rows: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        import torch

        learned = self._engine.learned()
        current = {name: tensor.detach().clone() for name, tensor in learned.items()}
        with torch.no_grad():
            try:
                for name, tensor in learned.items():
                    tensor.copy_(self._start[name])
                by_row = self._engine.log_probabilities(rows)
            finally:
                for name, tensor in learned.items():
                    tensor.copy_(current[name])
        return [tuple(values.float().tolist()) for values in by_row]


def key_of(sample: TrainingSample) -> str:
    return hashlib.sha256(repr((sample.tokens, sample.trained_from)).encode()).hexdigest()[:24]


OpenSource = Callable[["TrainingEngine"], tuple[BatchSource, Sequence[TrainingCallback]]]
"""Opens the batch source of a run, with its callbacks, once the engine exists."""


def prepare_source(
    job: TrainJob,
    settings: TrainSettings,
    rows: Sequence[Row],
    cases: Sequence[Case],
    *,
    report: Callable[[str], None],
    progress: Callable[..., None],
    stopped: Callable[[], bool],
) -> tuple[Sequence[Row], OpenSource]:
    """Return every row that the engine may see, or rows with the same prefix and length, and the function
    that opens the source.
    """
    if settings.objective == "sft":
        return rows, lambda _engine: (EpochOrder(rows, settings=settings), ())
    if settings.objective == "grpo":
        rollouts = _RolloutRun(job, settings, rows, cases)
        return rollouts.engine_rows, lambda engine: rollouts.open(
            engine, report=report, progress=progress, stopped=stopped
        )
    pairs, left_out = make_pairs(rows, make_render(job))
    if settings.objective == "kto":
        return _prepare_judged(job, settings, rows, pairs, report=report, progress=progress)
    require_pairs(len(pairs), rows=len(rows))
    samples = [row for pair in pairs for row in pair]

    def open_pairs(engine: "TrainingEngine") -> tuple[BatchSource, Sequence[TrainingCallback]]:
        for note in (*describe_idle(settings), *describe_pairs(pairs, left_out)):
            report(note)
        if settings.objective == "orpo":
            return PairOrder(pairs, settings=settings), ()
        referenced = add_reference(
            samples,
            engine,
            folder=Path(job.folder),
            progress=lambda _done, _count: progress("reference"),
        )
        halves = [ReplyPair(*referenced[index : index + 2]) for index in range(0, len(referenced), 2)]
        return PairOrder(halves, settings=settings), ()

    return samples, open_pairs


def _prepare_judged(
    job: TrainJob,
    settings: TrainSettings,
    rows: Sequence[Row],
    pairs: Sequence[ReplyPair],
    *,
    report: Callable[[str], None],
    progress: Callable[..., None],
) -> tuple[Sequence[Row], OpenSource]:
    """KTO: replies, and prompts with the replies of others, by the initial model."""
    least = settings.preferences.least_score
    notes = list(describe_idle(settings))
    if least is not None:
        scores = audit_scores(scored_rows(rows))
        require_usable(scores)
        notes.append(scores.describe())
    judged = make_judged(rows, pairs, least_score=least)
    require_both_sides(judged)
    good = sum(row.part == "chosen" for row in judged)
    notes.append(f"{good} good and {len(judged) - good} bad replies")

    def open_judged(engine: "TrainingEngine") -> tuple[BatchSource, Sequence[TrainingCallback]]:
        for note in notes:
            report(note)

        def add(samples: Sequence[TrainingSample]) -> list[TrainingSample]:
            return add_reference(
                samples, engine, folder=Path(job.folder), progress=lambda _done, _all: progress("reference")
            )

        def now(samples: Sequence[TrainingSample]) -> list[float]:
            sums = []
            for offset in range(0, len(samples), ROWS_TOGETHER):
                values = engine.log_probabilities(samples[offset : offset + ROWS_TOGETHER])
                sums += [float(value.float().sum()) for value in values]
            return sums

        def start(samples: Sequence[TrainingSample]) -> list[float]:
            return [sum(references[key_of(sample)]) for sample in samples]

        order = JudgedOrder(add(judged), settings=settings, now=now, start=start)
        crossed = [sample for step in range(1, order.steps + 1) for sample in order.mismatched(step)]
        references = {key_of(sample): sample.reference or () for sample in add(crossed)}
        return order, ()

    return judged, open_judged


class _RolloutRun:
    """Prompts and rewards of reinforcement learning. `engine_rows` are as long as prompts and answers can
    become.
    """

    def __init__(
        self, job: TrainJob, settings: TrainSettings, rows: Sequence[Row], cases: Sequence[Case]
    ) -> None:
        self._job = job
        self._settings = settings
        self._template = template = _open_template(job)
        limit = settings.rollouts.longest_answer
        checks = settings.reward_checks
        self._spec = RewardSpec.model_validate({**job.plan.train["rewards"], "folder": job.project_folder})
        share = checks.audit_share if uses_checks(self._spec) else 0.0
        split = {case.id: split_checks(case, share=share, seed=settings.seed) for case in cases}
        self._environment = None
        if settings.rollouts.environment is not None:
            # It has the limits of generated code.
            sandbox = SandboxSettings.model_validate(self._spec.sandbox)
            self._environment = Environment(
                settings.rollouts.environment, folder=Path(job.project_folder), sandbox=sandbox
            )
        # An environment or a task set decides by itself what is right: a decoy is none of its prompts.
        decided = self._environment is not None or settings.rollouts.taskset is not None
        count = 0 if decided else checks.decoys
        decoys = make_decoys(cases, count=count, seed=settings.seed)
        asked_cases = [*(rewarding for rewarding, _ in split.values()), *decoys]
        self._played = {case.id: case for case in asked_cases}
        if self._environment is not None:
            opened = self._environment.open(asked_cases)
            asked_cases = [
                case.model_copy(update={"messages": add_opening(case, *first)})
                for case, first in zip(asked_cases, opened, strict=True)
            ]
        prompts = {case.id: (case, template.prompt(case.messages)) for case in asked_cases}
        if not prompts:
            raise UserError(
                "there are no prompts to answer",
                why=f"`{settings.rollouts.source}` holds none",
                fix="set `rl` of the model under `models:` to a share of its rows, or specify a "
                "JSONL file of cases",
                where="train.rollouts.source",
            )
        lengths = {name: len(tokens) for name, (_, tokens) in prompts.items()}
        positions = read_shape(Path(job.base_folder)).max_positions
        too_long = find_too_long(lengths, longest_answer=limit, positions=positions)
        self._prompts = {name: prompt for name, prompt in prompts.items() if name not in set(too_long)}
        self._notes = list(describe_idle(settings))
        if too_long:
            self._notes.append(describe_too_long(too_long, lengths, positions=positions))
        # As long as prompt and answer can become: an engine is prepared for the longest.
        longest = [
            Row.model_construct(
                id=case.id,
                origin=case.origin,
                messages=case.messages,
                reply="",
                tokens=(*tokens, *[template.eos] * limit),
                trained_from=len(tokens),
                weight=1.0,
                stage=None,
            )
            for case, tokens in self._prompts.values()
        ]
        self._supervised = rows if settings.mix.sft else ()
        self._audit = {name: audit for name, (_, audit) in split.items() if audit is not None}
        self.engine_rows = [*longest, *self._supervised]

    def open(
        self,
        engine: "TrainingEngine",
        *,
        report: Callable[[str], None],
        progress: Callable[..., None],
        stopped: Callable[[], bool],
    ) -> tuple[BatchSource, Sequence[TrainingCallback]]:
        from graftwork.grading.rewards import RewardRunner
        from graftwork.train.loop import StepInterrupted
        from graftwork.train.rollouts.episodes import EpisodeJournal
        from graftwork.train.rollouts.source import AnswerSampler, RolloutSource

        settings = self._settings

        def move(doing: str) -> None:
            progress(doing)
            if stopped():
                raise StepInterrupted

        def now(rows: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
            return [tuple(values.float().tolist()) for values in engine.log_probabilities(rows)]

        for note in self._notes:
            report(note)
        start = StartWeights(engine) if settings.method != "full" else None
        grader = RewardRunner(self._spec)
        sampler: AnswerSampler
        sampler = writer = self._open_writer(engine)
        if self._environment is not None:
            sampler = EpisodeSampler(
                writer,
                self._environment,
                self._template,
                settings=settings.rollouts,
                cases=self._played,
                seed=settings.seed,
            )
        source = RolloutSource(
            settings=settings,
            prompts=self._prompts,
            sampler=sampler,
            grader=grader,
            journal=EpisodeJournal(Path(self._job.folder)),
            reference=None if start is None else start.log_probabilities,
            now=now if settings.rollouts.endpoint is not None else None,
            supervised=self._supervised,
            audit=self._audit,
            report=report,
            progress=move,
        )
        return source, (source, _EndsGrader(grader))

    def _open_writer(self, engine: "TrainingEngine") -> "RolloutSampler":
        """Open the generator of answers: the model in training, or an endpoint."""
        from graftwork.model.adapter_shape import AdapterShape
        from graftwork.model.adapters.peft import save_adapter
        from graftwork.train.rollouts.sampling import EndpointSampler, RolloutSampler, SamplingPasses

        job, settings, template = self._job, self._settings, self._template
        if settings.rollouts.endpoint is None:
            return RolloutSampler(
                engine.model,
                settings=settings.rollouts,
                seed=settings.seed,
                end_of_turn=template.eos,
                decode=template.decode,
                passes=SamplingPasses(
                    prompts_at_once=job.plan.prompts_at_once,
                    recorded=next(engine.model.parameters()).is_cuda,
                    token_pass=engine.token_pass(),
                ),
            )

        def save(folder: Path) -> None:
            """Write the current adapter in the form that servers load."""
            shape = AdapterShape.model_validate(job.plan.train["adapter"])
            folder.parent.mkdir(parents=True, exist_ok=True)
            save_adapter(engine.model, folder, shape=shape, base=job.plan.base)

        return EndpointSampler(
            settings.rollouts.endpoint,
            settings=settings.rollouts,
            seed=settings.seed,
            end_of_turn=template.eos,
            decode=template.decode,
            folder=Path(job.folder),
            save=save if settings.method != "full" else None,
        )


class _EndsGrader(TrainingCallback):
    name = "rewards"

    def __init__(self, grader: "RewardRunner") -> None:
        self._grader = grader

    def on_train_end(self) -> None:
        self._grader.close()


def _open_template(job: TrainJob) -> "ChatTemplate":
    from graftwork.model.chat.template import ChatTemplate

    rendering = job.plan.train.get("rendering", {})
    return ChatTemplate.from_folder(Path(job.base_folder), reasoning=bool(rendering.get("reasoning", True)))


def make_render(job: TrainJob) -> Render:
    return render_with(_open_template(job))
