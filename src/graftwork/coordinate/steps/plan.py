"""Step: say what training will take, before anything is loaded."""

import math
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps.prepare import Prepared
from graftwork.coordinate.workplace import Workplace
from graftwork.files.dataset_folder import iterate_rows, read_rows
from graftwork.model.probe import probe_device
from graftwork.model.shape import read_shape
from graftwork.plan.estimate import make_plan
from graftwork.records.base import fingerprint
from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.records.figure import Figure
from graftwork.records.plan import ModelShape, Plan, Workload
from graftwork.train.order import choose_training_rows, plan_steps, shared_tokens
from graftwork.train.settings import ALL_LINEARS, TrainSettings


def _do(work: Workplace, made: Made) -> Plan:
    prepared = made.get("prepare", Prepared)
    dataset, settings = prepared.dataset, work.settings.train
    shape = read_shape(Path(work.base.folder))
    device = probe_device(threads=settings.threads)
    work_ahead = _measure_work(prepared, settings, shape)
    plan = make_plan(
        base=work.base.name,
        base_fingerprint=work.base.revision,
        dataset_hash=dataset.content_hash,
        shape=shape,
        work=work_ahead.load,
        device=device,
        settings=work.settings.plan,
        train={
            "settings": settings.what_is_learned(),
            "adapter": _adapter(settings, shape),
        },
        learned=_learned(work, device.name),
    )
    # Stages and weights decide how rows fill the batches: the steps are counted, not reckoned.
    plan = plan.model_copy(update={"steps": Figure.exact(work_ahead.steps, "steps")})
    if not plan.fits:
        raise AnswerIsNo(
            "the run does not fit the limits",
            why="; ".join(plan.notes[1:]),
            fix="change the settings that the reason names",
        )
    return plan


class _WorkAhead(NamedTuple):
    load: Workload
    steps: int


def _measure_work(prepared: Prepared, settings: TrainSettings, shape: ModelShape) -> _WorkAhead:
    """The rows as often as they will be trained on, by the function that the trainer asks too."""
    folder = Path(prepared.folder)
    rows = choose_training_rows(read_rows(folder, "train"), settings=settings)
    if not rows:
        raise UserMistake(
            "the training split is empty",
            why="every row was dropped, held out or given the weight 0",
            fix="look at `graft data audit`, or lower `data.test` and `data.validation`",
        )
    steps = plan_steps(rows, settings=settings)
    visits = [rows[at] for step in steps for at in step]
    # Epochs differ only where a weight has a fraction; then the whole run counts as one.
    epochs = settings.epochs if all(row.weight.is_integer() for row in rows) else 1
    visits = visits[: len(visits) // epochs]
    checks = islice(iterate_rows(folder, "validation"), settings.validation_rows)
    load = Workload(
        lengths=tuple(len(row.tokens) for row in visits),
        trained_tokens=sum(len(row.tokens) - row.trained_from for row in visits),
        shared_tokens=shared_tokens(rows),
        batch_rows=settings.batch_rows,
        epochs=epochs,
        rank=settings.rank,
        targets=_target_names(settings),
        adapted_layers=len(_layers(settings, shape)),
        validation_tokens=sum(len(row.tokens) for row in checks),
        checkpoints=math.ceil(len(steps) / settings.checkpoint_every),
    )
    return _WorkAhead(load, len(steps))


def _adapter(settings: TrainSettings, shape: ModelShape) -> dict[str, Any]:
    return {
        "rank": settings.rank,
        "alpha": settings.alpha,
        "targets": list(_target_names(settings)),
        "layers": list(_layers(settings, shape)),
    }


def _target_names(settings: TrainSettings) -> tuple[str, ...]:
    return ALL_LINEARS if settings.targets == "all" else settings.targets


def _layers(settings: TrainSettings, shape: ModelShape) -> range:
    return range(shape.layers - min(settings.upper_layers or shape.layers, shape.layers), shape.layers)


def _learned(work: Workplace, device: str) -> tuple[float, ...]:
    """Tokens a second of earlier runs like this one on this machine."""
    key = kind_of_run(work)
    recent = work.residuals.recent(device=device, base=key)
    return tuple(residual.actual for residual in recent if residual.name == "tokens_per_second")


def kind_of_run(work: Workplace) -> str:
    """Runs of the same kind do the same work a token, so that their speeds can be compared."""
    same = work.settings.train.model_dump(
        mode="json", include={"method", "rank", "targets", "upper_layers", "batch_rows", "threads"}
    )
    return fingerprint([work.base.revision, same])


STEP = Step(
    name="plan",
    title="plan the run",
    needs=("prepare",),
    makes=Plan,
    depends_on=lambda work, _made: [
        work.settings.train.what_is_learned(),
        work.settings.plan.model_dump(mode="json"),
    ],
    do=_do,
    # Later steps care for what will be trained, not for how well it was foretold.
    identity=lambda plan: fingerprint([plan.base_fingerprint, plan.dataset_hash, plan.dtype, plan.train]),
)
