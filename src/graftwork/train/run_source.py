"""Where the rows of a run's steps come from, by its objective.

In: a job, its settings and training rows. Out: the rows that an engine is prepared for, and the batch source
with its callbacks once the engine exists. Supervised runs take their rows as they are.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.grading.rewards import RewardSpec
from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.records.report import Case
from graftwork.records.run import TrainJob
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.objectives import BatchSource
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.objectives.pairs import PairOrder, ReplyPair, make_pairs, require_pairs
from graftwork.train.rollouts.preflight import make_canaries, split_checks, uses_checks
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.grading.reward_runner import RewardRunner
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.train.engine import TrainingEngine


@dataclass(frozen=True)
class RunMaterial:
    """What a run is trained on, before the engine exists."""

    settings: TrainSettings
    rows: Sequence[Row]
    engine_rows: Sequence[Row]
    """Every row that an engine may see, or rows of the same beginning and length."""
    pairs: Sequence[ReplyPair] = ()
    prompts: "Mapping[str, tuple[Case, list[int]]]" = field(default_factory=dict)
    """Cases to answer with the tokens of their prompts, by id."""
    audit: "Mapping[str, Case]" = field(default_factory=dict)
    template: "ChatTemplate | None" = None
    spec: RewardSpec | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class RunSource:
    batches: BatchSource
    callbacks: Sequence[TrainingCallback] = field(default_factory=tuple)


def gather_material(
    job: TrainJob, settings: TrainSettings, rows: Sequence[Row], cases: Sequence[Case] = ()
) -> RunMaterial:
    if settings.objective == "sft":
        return RunMaterial(settings, rows, rows)
    if settings.objective == "grpo":
        return _gather_prompts(job, settings, rows, cases)
    pairs, audit = make_pairs(rows, make_render(job))
    require_pairs(audit.pairs, rows=len(rows))
    samples = [row for pair in pairs for row in pair]
    return RunMaterial(settings, rows, samples, pairs=pairs, notes=audit.notes())


def open_source(
    material: RunMaterial,
    engine: "TrainingEngine",
    *,
    folder: Path,
    report: Callable[[str], None],
    progress: Callable[..., None],
    stopped: Callable[[], bool],
) -> RunSource:
    settings = material.settings
    if settings.objective == "sft":
        return RunSource(EpochOrder(material.rows, settings=settings))
    for note in material.notes:
        report(note)
    if settings.objective == "grpo":
        return _open_rollouts(
            material, engine, folder=folder, report=report, progress=progress, stopped=stopped
        )
    pairs = material.pairs
    if settings.objective == "dpo":
        from graftwork.train.reference import add_reference

        samples = add_reference(
            [row for pair in pairs for row in pair],
            engine,
            folder=folder,
            progress=lambda _done, _count: progress("reference"),
        )
        pairs = [ReplyPair(*samples[at : at + 2]) for at in range(0, len(samples), 2)]
    return RunSource(PairOrder(pairs, settings=settings))


def _gather_prompts(
    job: TrainJob, settings: TrainSettings, rows: Sequence[Row], cases: Sequence[Case]
) -> RunMaterial:
    template = _open_template(job)
    limit = settings.rollouts.max_tokens
    checks = settings.reward_checks
    spec = RewardSpec.model_validate({**job.plan.train["rewards"], "folder": job.project_folder})
    share = checks.audit_share if uses_checks(spec) else 0.0
    split = {case.id: split_checks(case, share=share, seed=settings.seed) for case in cases}
    canaries = make_canaries(cases, count=checks.canaries, seed=settings.seed)
    asked = [*(rewarding for rewarding, _ in split.values()), *canaries]
    prompts = {case.id: (case, template.prompt(case.messages)) for case in asked}
    if not prompts:
        raise UserMistake(
            "there are no prompts to answer",
            why=f"`{settings.rollouts.source}` holds none",
            fix="set `rl` of the model under `models:` to a share of its rows, or name a JSONL file of cases",
            where="train.rollouts.source",
        )
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
        for case, tokens in prompts.values()
    ]
    supervised = rows if settings.mix.sft else ()
    return RunMaterial(
        settings,
        supervised,
        [*longest, *supervised],
        prompts=prompts,
        audit={name: audit for name, (_, audit) in split.items() if audit is not None},
        template=template,
        spec=spec,
    )


def _open_rollouts(
    material: RunMaterial,
    engine: "TrainingEngine",
    *,
    folder: Path,
    report: Callable[[str], None],
    progress: Callable[..., None],
    stopped: Callable[[], bool],
) -> RunSource:
    from graftwork.grading.reward_runner import RewardRunner
    from graftwork.train.loop import StepInterrupted
    from graftwork.train.reference import StartWeights
    from graftwork.train.rollouts.episodes import EpisodeJournal
    from graftwork.train.rollouts.sampling import RolloutSampler
    from graftwork.train.rollouts.source import RolloutParts, RolloutSource

    settings, template = material.settings, material.template
    assert template is not None
    assert material.spec is not None

    def move(doing: str) -> None:
        progress(doing)
        if stopped():
            raise StepInterrupted

    start = StartWeights(engine) if settings.method != "full" else None
    grader = RewardRunner(material.spec)
    source = RolloutSource(
        RolloutParts(
            settings=settings,
            prompts=material.prompts,
            sampler=RolloutSampler(
                engine.model,
                settings=settings.rollouts,
                seed=settings.seed,
                end_of_turn=template.eos,
                decode=template.decode,
            ),
            grader=grader,
            journal=EpisodeJournal(folder),
            reference=None if start is None else start.log_probabilities,
            supervised=material.rows,
            audit=material.audit,
            report=report,
            progress=move,
        )
    )
    return RunSource(source, (source, _EndsGrader(grader)))


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


def make_render(job: TrainJob) -> "Callable[[Row, str], tuple[tuple[int, ...], int]]":
    """Renders another reply to a row's prompt, as the dataset was rendered."""
    template = _open_template(job)

    def render(row: Row, reply: str) -> tuple[tuple[int, ...], int]:
        rendered = template.render(row.messages, reply)
        return tuple(rendered.tokens), rendered.trained_from

    return render
