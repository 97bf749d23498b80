"""Where the rows of a run's steps come from, by its objective.

In: a job, its settings and training rows. Out: the rows that an engine is prepared for, and the batch source
with its callbacks once the engine exists. Supervised runs take their rows as they are.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.disk import Journal
from graftwork.grading.rewards import RewardSpec
from graftwork.grading.score_audit import ScoredReply, audit_scores, require_usable
from graftwork.model.shape import read_shape
from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.records.plan import Plan
from graftwork.records.report import Case
from graftwork.records.run import TrainJob
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.objectives import BatchSource
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.objectives.kto import JudgedOrder, make_judged, require_both_sides
from graftwork.train.objectives.pairs import (
    PairOrder,
    Render,
    ReplyPair,
    make_pairs,
    render_with,
    require_pairs,
)
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.rollouts.environment import Environment
from graftwork.train.rollouts.multi_turn import EpisodeSampler, add_opening
from graftwork.train.rollouts.preflight import (
    describe_too_long,
    find_too_long,
    make_canaries,
    split_checks,
    uses_checks,
)
from graftwork.train.settings import TrainSettings
from graftwork.train.unused_settings import describe_idle

if TYPE_CHECKING:
    from graftwork.grading.reward_runner import RewardRunner
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.rollouts.sampling import RolloutSampler

if TYPE_CHECKING:
    from graftwork.train.engine import TrainingEngine


# Log-probabilities by the model that training starts from, computed once and kept in the run's folder.
# In: samples, an engine before its first step. Out: the samples with their reference. A resumed run reads the
# file and computes what is missing: its checkpoint is restored later.
REFERENCE = "reference.jsonl"
ROWS_TOGETHER = 16


def add_reference(
    samples: Sequence[TrainingSample],
    engine: "TrainingEngine",
    *,
    folder: Path,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[TrainingSample]:
    journal = Journal(folder / REFERENCE)
    known = {line["row"]: tuple(line["values"]) for line in journal.read()}
    rows = list({key_of(sample): sample for sample in samples}.items())
    for at in range(0, len(rows), ROWS_TOGETHER):
        # The rows that share a pass can change the last bit: a resumed run has the same ones together.
        some = rows[at : at + ROWS_TOGETHER]
        if all(key in known for key, _ in some):
            continue
        progress(at, len(rows))
        for (key, _), values in zip(some, engine.log_probabilities([row for _, row in some]), strict=True):
            if key in known:
                # Computed next to other rows before: a resumed run must find the same bits.
                continue
            known[key] = tuple(values.float().tolist())
            journal.append({"row": key, "values": list(known[key])})
    return [sample.model_copy(update={"reference": known[key_of(sample)]}) for sample in samples]


def open_judged(
    samples: Sequence[TrainingSample],
    engine: "TrainingEngine",
    settings: TrainSettings,
    *,
    folder: Path,
    progress: Callable[..., None],
) -> JudgedOrder:
    """The batch source of KTO: replies, and prompts with the replies of others, by the model of the start."""

    def add(rows: Sequence[TrainingSample]) -> list[TrainingSample]:
        return add_reference(rows, engine, folder=folder, progress=lambda _done, _all: progress("reference"))

    def now(rows: Sequence[TrainingSample]) -> list[float]:
        found = []
        for at in range(0, len(rows), ROWS_TOGETHER):
            values = engine.log_probabilities(rows[at : at + ROWS_TOGETHER])
            found += [float(value.float().sum()) for value in values]
        return found

    def start(rows: Sequence[TrainingSample]) -> list[float]:
        return [sum(known[key_of(row)]) for row in rows]

    judged = add(samples)
    order = JudgedOrder(judged, settings=settings, now=now, start=start)
    crossed = [row for step in range(1, order.steps + 1) for row in order.mismatched(step)]
    known = {key_of(row): row.reference or () for row in add(crossed)}
    return order


class StartWeights:
    """The trained tensors as they are before the first step; log-probabilities by them at any later time.

    Values are exchanged in place: the tensors keep their addresses, and no second model is held.
    """

    def __init__(self, engine: "TrainingEngine") -> None:
        self._engine = engine
        self._start = {name: tensor.detach().clone() for name, tensor in engine.learned().items()}

    def log_probabilities(self, rows: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        import torch

        learned = self._engine.learned()
        kept = {name: tensor.detach().clone() for name, tensor in learned.items()}
        with torch.no_grad():
            try:
                for name, tensor in learned.items():
                    tensor.copy_(self._start[name])
                found = self._engine.log_probabilities(rows)
            finally:
                for name, tensor in learned.items():
                    tensor.copy_(kept[name])
        return [tuple(values.float().tolist()) for values in found]


def key_of(sample: TrainingSample) -> str:
    return hashlib.sha256(repr((sample.tokens, sample.trained_from)).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class RunMaterial:
    """What a run is trained on, before the engine exists."""

    settings: TrainSettings
    rows: Sequence[Row]
    engine_rows: Sequence[Row]
    """Every row that an engine may see, or rows of the same beginning and length."""
    pairs: Sequence[ReplyPair] = ()
    judged: Sequence[TrainingSample] = ()
    """Good and bad replies."""
    prompts: "Mapping[str, tuple[Case, list[int]]]" = field(default_factory=dict)
    """Cases to answer with the tokens of their prompts, by id."""
    played: "Mapping[str, Case]" = field(default_factory=dict)
    """The cases that an environment plays, by id: without what it says first."""
    audit: "Mapping[str, Case]" = field(default_factory=dict)
    template: "ChatTemplate | None" = None
    spec: RewardSpec | None = None
    environment: Environment | None = None
    adapter: "Mapping[str, object]" = field(default_factory=dict)
    """The shape of the adapter, as the plan has it."""
    base: str = ""
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
    if settings.objective == "kto":
        return _gather_judged(settings, rows, pairs)
    require_pairs(audit.pairs, rows=len(rows))
    samples = [row for pair in pairs for row in pair]
    return RunMaterial(settings, rows, samples, pairs=pairs, notes=[*describe_idle(settings), *audit.notes()])


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
    if settings.objective == "kto":
        return RunSource(open_judged(material.judged, engine, settings, folder=folder, progress=progress))
    pairs = material.pairs
    if settings.objective == "dpo":
        samples = add_reference(
            [row for pair in pairs for row in pair],
            engine,
            folder=folder,
            progress=lambda _done, _count: progress("reference"),
        )
        pairs = [ReplyPair(*samples[at : at + 2]) for at in range(0, len(samples), 2)]
    return RunSource(PairOrder(pairs, settings=settings))


def _gather_judged(settings: TrainSettings, rows: Sequence[Row], pairs: Sequence[ReplyPair]) -> RunMaterial:
    least = settings.preferences.least_score
    notes = list(describe_idle(settings))
    if least is not None:
        found = audit_scores([ScoredReply.of_row(row) for row in rows if row.reward is not None])
        require_usable(found)
        notes.append(found.describe())
    judged = make_judged(rows, pairs, least_score=least)
    require_both_sides(judged)
    good = sum(row.part == "chosen" for row in judged)
    notes.append(f"{good} good and {len(judged) - good} bad replies")
    return RunMaterial(settings, rows, judged, judged=judged, notes=notes)


def _gather_prompts(
    job: TrainJob, settings: TrainSettings, rows: Sequence[Row], cases: Sequence[Case]
) -> RunMaterial:
    template = _open_template(job)
    settings = with_prompts_at_once(settings, job.plan)
    limit = settings.rollouts.longest_answer
    checks = settings.reward_checks
    spec = RewardSpec.model_validate({**job.plan.train["rewards"], "folder": job.project_folder})
    share = checks.audit_share if uses_checks(spec) else 0.0
    split = {case.id: split_checks(case, share=share, seed=settings.seed) for case in cases}
    environment = make_environment(job, settings, spec)
    # An environment or a task set decides by itself what is right: a canary is none of its prompts.
    decided = environment is not None or settings.rollouts.taskset is not None
    count = 0 if decided else checks.canaries
    canaries = make_canaries(cases, count=count, seed=settings.seed)
    asked = [*(rewarding for rewarding, _ in split.values()), *canaries]
    played = {} if environment is None else {case.id: case for case in asked}
    if environment is not None:
        opened = environment.open(asked)
        asked = [
            case.model_copy(update={"messages": add_opening(case, first)})
            for case, first in zip(asked, opened, strict=True)
        ]
    prompts = {case.id: (case, template.prompt(case.messages)) for case in asked}
    if not prompts:
        raise UserMistake(
            "there are no prompts to answer",
            why=f"`{settings.rollouts.source}` holds none",
            fix="set `rl` of the model under `models:` to a share of its rows, or name a JSONL file of cases",
            where="train.rollouts.source",
        )
    lengths = {name: len(tokens) for name, (_, tokens) in prompts.items()}
    positions = read_shape(Path(job.base_folder)).max_positions
    too_long = find_too_long(lengths, longest_answer=limit, positions=positions)
    prompts = {name: known for name, known in prompts.items() if name not in set(too_long)}
    notes = describe_idle(settings)
    if too_long:
        notes = [*notes, describe_too_long(too_long, lengths, positions=positions)]
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
        played=played,
        audit={name: audit for name, (_, audit) in split.items() if audit is not None},
        template=template,
        spec=spec,
        environment=environment,
        adapter=job.plan.train.get("adapter", {}),
        base=job.plan.base,
        notes=notes,
    )


def with_prompts_at_once(settings: TrainSettings, plan: Plan) -> TrainSettings:
    """The settings with what the plan found room for, unless they state it themselves."""
    if settings.rollouts.prompts_at_once is not None or plan.prompts_at_once is None:
        return settings
    rollouts = settings.rollouts.model_copy(update={"prompts_at_once": plan.prompts_at_once})
    return settings.model_copy(update={"rollouts": rollouts})


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
    from graftwork.train.rollouts.episodes import EpisodeJournal
    from graftwork.train.rollouts.source import AnswerSampler, RolloutParts, RolloutSource

    settings, template = material.settings, material.template
    assert template is not None
    assert material.spec is not None

    def move(doing: str) -> None:
        progress(doing)
        if stopped():
            raise StepInterrupted

    start = StartWeights(engine) if settings.method != "full" else None
    grader = RewardRunner(material.spec)
    sampler: AnswerSampler
    sampler = writer = _open_writer(material, engine, folder=folder)
    if material.environment is not None:
        sampler = EpisodeSampler(
            writer,
            material.environment,
            template,
            settings=settings.rollouts,
            cases=material.played,
            seed=settings.seed,
        )
    source = RolloutSource(
        RolloutParts(
            settings=settings,
            prompts=material.prompts,
            sampler=sampler,
            grader=grader,
            journal=EpisodeJournal(folder),
            reference=None if start is None else start.log_probabilities,
            now=_log_probabilities_of(engine) if settings.rollouts.endpoint is not None else None,
            supervised=material.rows,
            audit=material.audit,
            report=report,
            progress=move,
        )
    )
    return RunSource(source, (source, _EndsGrader(grader)))


def _open_writer(material: RunMaterial, engine: "TrainingEngine", *, folder: Path) -> "RolloutSampler":
    """Who writes the answers: the model in training, or an endpoint."""
    from graftwork.train.rollouts.endpoint import EndpointSampler
    from graftwork.train.rollouts.sampling import RolloutSampler

    settings, template = material.settings, material.template
    assert template is not None
    rollouts, end = settings.rollouts, template.eos
    if rollouts.endpoint is None:
        return RolloutSampler(
            engine.model,
            settings=rollouts,
            seed=settings.seed,
            end_of_turn=end,
            decode=template.decode,
            recorded=next(engine.model.parameters()).is_cuda,
            token_pass=engine.token_pass(),
        )
    return EndpointSampler(
        rollouts.endpoint,
        settings=rollouts,
        seed=settings.seed,
        end_of_turn=end,
        decode=template.decode,
        folder=folder,
        save=_adapter_writer(material, engine),
    )


def _adapter_writer(material: RunMaterial, engine: "TrainingEngine") -> "Callable[[Path], None] | None":
    """Writes the adapter as it is now, in the form that servers load; None if all weights are trained."""
    if material.settings.method == "full":
        return None
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import save_adapter

    shape = AdapterShape.model_validate(material.adapter)

    def write(folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        save_adapter(engine.model, folder, shape=shape, base=material.base)

    return write


def _log_probabilities_of(
    engine: "TrainingEngine",
) -> "Callable[[Sequence[TrainingSample]], list[tuple[float, ...]]]":
    def now(rows: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        return [tuple(values.float().tolist()) for values in engine.log_probabilities(rows)]

    return now


def make_environment(job: TrainJob, settings: TrainSettings, spec: RewardSpec) -> Environment | None:
    """The environment of the run's episodes; it has the limits of generated code."""
    named = settings.rollouts.environment
    if named is None:
        return None
    from graftwork.process.sandbox import SandboxSettings

    limits = SandboxSettings.model_validate(spec.sandbox)
    return Environment(named, folder=Path(job.project_folder), sandbox=limits)


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
