"""Where the rows of a run's steps come from, by its objective.

In: a job, its settings and training rows. Out: the rows that an engine is prepared for, and the batch source
with its callbacks once the engine exists. Supervised runs take their rows as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.records.dataset import Row
from graftwork.records.run import TrainJob
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.objectives import BatchSource
from graftwork.train.objectives.epochs import EpochOrder
from graftwork.train.objectives.pairs import PairOrder, ReplyPair, make_pairs, require_pairs
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.train.engine import TrainingEngine


@dataclass(frozen=True)
class RunMaterial:
    """What a run is trained on, before the engine exists."""

    settings: TrainSettings
    rows: Sequence[Row]
    engine_rows: Sequence[Row]
    """Every row that an engine may see, or rows of the same beginning and length."""
    pairs: Sequence[ReplyPair] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class RunSource:
    batches: BatchSource
    callbacks: Sequence[TrainingCallback] = field(default_factory=tuple)


def gather_material(job: TrainJob, settings: TrainSettings, rows: Sequence[Row]) -> RunMaterial:
    if settings.objective == "sft":
        return RunMaterial(settings, rows, rows)
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
    progress: Callable[[str, int, int], None],
    stopped: Callable[[], bool],
) -> RunSource:
    settings = material.settings
    if settings.objective == "sft":
        return RunSource(EpochOrder(material.rows, settings=settings))
    for note in material.notes:
        report(note)
    pairs = material.pairs
    if settings.objective == "dpo":
        from graftwork.train.reference import add_reference

        samples = add_reference(
            [row for pair in pairs for row in pair],
            engine,
            folder=folder,
            progress=lambda done, count: progress("log-probabilities of the start", done, count),
        )
        pairs = [ReplyPair(*samples[at : at + 2]) for at in range(0, len(samples), 2)]
    return RunSource(PairOrder(pairs, settings=settings))


def make_render(job: TrainJob) -> "Callable[[Row, str], tuple[tuple[int, ...], int]]":
    """Renders another reply to a row's prompt, as the dataset was rendered."""
    from graftwork.model.chat.template import ChatTemplate

    rendering = job.plan.train.get("rendering", {})
    template = ChatTemplate.from_folder(
        Path(job.base_folder), reasoning=bool(rendering.get("reasoning", True))
    )

    def render(row: Row, reply: str) -> tuple[tuple[int, ...], int]:
        rendered = template.render(row.messages, reply)
        return tuple(rendered.tokens), rendered.trained_from

    return render
