"""Which engine trains a run: the card's, the processor's, or the plain one that knows every decoder.

In: a job, a loaded base with what is to be learned, its rows. Out: an engine that is ready for its first
step, and a word about how it will work. All of them come to the same loss.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from graftwork.costmodel.card_memory import describe_tuning
from graftwork.model.shape import read_shape
from graftwork.records.dataset import Row
from graftwork.records.plan import PlainStep, Tuning
from graftwork.records.run import TrainJob
from graftwork.train.crew import Crew
from graftwork.train.engine import Engine
from graftwork.train.settings import TrainSettings


def make_engine(
    job: TrainJob,
    model: Any,
    learned: Sequence[nn.Parameter],
    rows: Sequence[Row],
    *,
    settings: TrainSettings,
    crew: Crew,
    shares: bool,
    pulse: Callable[..., None],
    say: Callable[[str], None],
) -> Engine:
    """`shares` says that this run shares its steps with others: then only the plain way will do."""
    if job.plan.tuning is not None and not shares:
        return _on_card(job, job.plan.tuning, model, learned, rows, settings=settings, pulse=pulse, say=say)
    planned = job.plan.plain
    return Engine(
        model,
        learned,
        settings=settings,
        loss=None if shares else _own_loss(job, model, rows, settings, say),
        crew=crew,
        pulse=pulse,
        # What an earlier attempt had to change, before what was planned.
        micro_rows=job.plan.train.get("micro_rows") or (planned.micro_rows if planned else None),
        checkpointing=not shares and _computes_again(settings, planned),
    )


def _computes_again(settings: TrainSettings, planned: PlainStep | None) -> bool:
    """Whether blocks keep only their input: as asked for, else as the plan found it to be needed."""
    if settings.checkpointing == "auto":
        return planned is not None and planned.checkpointed
    return settings.checkpointing == "on"


def _on_card(
    job: TrainJob,
    tuning: Tuning,
    model: Any,
    learned: Sequence[nn.Parameter],
    rows: Sequence[Row],
    *,
    settings: TrainSettings,
    pulse: Callable[..., None],
    say: Callable[[str], None],
) -> Engine:
    from graftwork.train.gpu.engine import CardEngine
    from graftwork.train.gpu.furnish import furnished_of

    engine = CardEngine(
        model,
        learned,
        settings=settings,
        furnished=furnished_of(model),
        tuning=tuning,
        shape=read_shape(Path(job.base_folder)),
        pulse=pulse,
    )
    begun = time.perf_counter()
    word = describe_tuning(engine.settle(rows))
    done = "compiled and measured" if engine.tuning.compiled else "measured"
    say(f"{word}; {done} in {time.perf_counter() - begun:.0f} s")
    return engine


def _own_loss(
    job: TrainJob,
    model: Any,
    rows: Sequence[Row],
    settings: TrainSettings,
    say: Callable[[str], None],
) -> Any:
    """A faster way to the same loss, where there is one for this model and device."""
    from graftwork.train.cpu.choose import processor_way
    from graftwork.train.mixed import mixed_loss

    if settings.strategy != "single":
        # The written-out ways read weights that a crew may hold in parts.
        return None
    # Where blocks are asked to compute again, it is the plain way that does so.
    again = settings.checkpointing == "on"
    way = None if again else processor_way(model, rows, settings=settings, folder=Path(job.folder))
    if way is None:
        return mixed_loss(model, settings, dtype=job.plan.dtype)
    say(way[1])
    return way[0].summed_loss
