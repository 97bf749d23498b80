"""Step: say what training will take, before anything is loaded.

The plan is what a run is known by: the same plan is the same run. It names the run of the main model, not the
bytes it produces, so that all models can be planned before the first is trained.
"""

import math
import shutil
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.costmodel.cpu_step import (
    MEMORY_SHARE,
    TrunkTokens,
    choose_kept,
    packed_bytes,
)
from graftwork.data.project import PreparedData
from graftwork.files.dataset import iterate_rows, read_rows
from graftwork.files.disk import folder_digest
from graftwork.model.adapter_shape import AdapterShape, require_names
from graftwork.model.base import note_on_weights
from graftwork.model.probe import probe_device
from graftwork.model.shape import linear_names, read_shape
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.plan.estimate import COMPUTED, SPEED, PlanInputs, learned_memory, make_plan
from graftwork.plan.project import (
    as_plain,
    gpu_rates,
    plan_passes,
    plan_rollouts,
    plan_streamed,
    plan_tuning,
)
from graftwork.process.machine import machine_memory
from graftwork.process.preload import is_supported
from graftwork.project.open_project import OpenProject, load_template, timestamp
from graftwork.project.settings import FROM_MAIN
from graftwork.records.base import GIB, Figure, fingerprint
from graftwork.records.dataset import Row
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.plan import CpuStepPlan, DeviceFacts, ModelShape, Plan, Workload
from graftwork.records.run import TrainOutcome
from graftwork.train.callbacks import STEPS_BEFORE_CRASH
from graftwork.train.engine_choice import choose_precision, has_amx_here, streams_layers, why_plain_step
from graftwork.train.objectives.epochs import choose_training_rows, plan_steps, shared_tokens
from graftwork.train.objectives.pairs import Render, make_pairs, render_with, require_pairs
from graftwork.train.rollouts.project import name_rewards, rollout_rows
from graftwork.train.run_folder import ADAPTER, OUTCOME
from graftwork.train.settings import LOSS, REWARD, TrainSettings


class StartAdapter(NamedTuple):
    """An adapter to continue from. `identity` is part of what makes the run what it is."""

    folder: Path
    identity: dict[str, str]


def plan_identity(plan: Plan) -> str:
    """What will be trained, without the estimates."""
    return fingerprint([plan.base_fingerprint, plan.dataset_hash, plan.dtype, plan.train])


def run_id_of(plan: Plan) -> str:
    """The same plan means the same run, so it is resumed."""
    return plan_identity(plan)[:12]


def note_done(work: OpenProject, run_id: str) -> TrainOutcome:
    """Record that a run is done: its outcome is in its folder, wherever it was trained."""
    outcome = TrainOutcome.from_json((work.project.runs / run_id / OUTCOME).read_bytes())
    work.runs.update(run_id, state="done", when=timestamp(), outcome=outcome.model_dump(mode="json"))
    return outcome


def starts_from_main(work: OpenProject) -> bool:
    return work.settings.train.start_from == FROM_MAIN


def find_start_adapter(work: OpenProject) -> StartAdapter | None:
    """The adapter that this model's training starts from, if one is configured."""
    start_from = work.settings.train.start_from
    if start_from is None:
        return None
    if start_from == FROM_MAIN:
        planned = work.ledger.get("plan")
        if planned is None:
            raise UserError(
                "the main model is not planned yet",
                why=f"the model {work.model} starts from its adapter",
                fix="`graft train --all` trains the main model first",
            )
        run_id = run_id_of(Plan.model_validate(planned.output))
        return StartAdapter(work.project.runs / run_id / ADAPTER, {"run": run_id})
    folder = (work.project.root / start_from).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"there is no adapter to start from at {start_from}",
            fix=f"set `train.start_from` to `{FROM_MAIN}` or to a PEFT folder",
            where=str(folder),
        )
    return StartAdapter(folder, {"adapter": folder_digest(folder)})


def plan_for(
    work: OpenProject,
    outputs: StepOutputs,
    device: DeviceFacts,
    *,
    ahead: "WorkAhead | None" = None,
    forked: bool = False,
) -> Plan:
    """Plan the run on this device, which may be another machine's. Raises if it does not fit. `forked`: its
    process is forked from one with the imports done.
    """
    prepared = outputs.get("prepare", PreparedData)
    dataset, settings = prepared.dataset, work.settings.train
    shape = read_shape(Path(work.base.folder))
    dtype = choose_precision(
        settings.precision, kind=device.kind, amx=has_amx_here(), capability=device.capability
    )
    work_ahead = ahead or measure_work(work, prepared, shape)
    work_ahead = work_ahead._replace(load=plan_rollouts(work, device, shape, work_ahead.load, dtype))
    if device.kind == "cpu":
        work_ahead = _as_on_cpu(work, work_ahead, shape, device=device, dtype=dtype)
    rates = gpu_rates(work, device, shape)
    tuning = plan_tuning(work, device, shape, work_ahead.load, rates=rates)
    streamed = plan_streamed(work, device, shape, work_ahead.load, dtype, rates=rates)
    plain = as_plain(streamed) if streamed is not None else None
    if tuning is None and streamed is None:
        plain = plan_passes(work, device, shape, work_ahead.load, dtype, rates=rates)
    # Earlier runs of the same kind on this machine: how fast they were, and what they took.
    recent = work.residuals.recent(device=device.name, base=kind_of_run(work))
    plan = make_plan(
        PlanInputs(
            base=work.base.name,
            base_fingerprint=work.base.revision,
            dataset_hash=dataset.content_hash,
            shape=shape,
            work=work_ahead.load,
            device=device,
            settings=work.settings.plan,
            dtype=dtype,
            train={
                "settings": settings.what_is_learned(),
                "adapter": describe_adapter(settings, shape),
                **_started_from(work),
                **_evaluation_during(work),
                **_rendering(work),
                **name_rewards(work),
                # In other bits another adapter is learned: another run.
                **({} if tuning is None else {"weights": [tuning.form, tuning.head]}),
            },
            learned=tuple(record.actual for record in recent if record.name == SPEED),
            # A corrected peak says nothing about the estimate.
            learned_memory=learned_memory([record for record in recent if record.name == COMPUTED]),
            tuning=tuning,
            plain=plain,
            streamed=streamed,
            rates=rates,
            forked=forked,
            repeated_steps=repeated_steps(settings),
        )
    )
    # Stages and weights decide how rows fill the batches: the steps are counted, not estimated.
    counted = {"steps": Figure.exact(work_ahead.steps, "steps")}
    plan = plan.model_copy(update={**counted, "base_note": note_on_weights(work.base.name)})
    if not plan.fits:
        raise NegativeResult(
            "the run does not fit the limits",
            why="; ".join(plan.notes[1:]),
            fix="change the settings that the reason names",
        )
    return plan


def repeated_steps(settings: TrainSettings) -> int | None:
    """Steps repeated after a rehearsed crash; None if none is rehearsed."""
    if not settings.run.rehearse_crash:
        return None
    return min(STEPS_BEFORE_CRASH, settings.checkpoint_every - 1)


class WorkAhead(NamedTuple):
    """Work of a run; the same on every device."""

    load: Workload
    steps: int
    trunk: TrunkTokens
    """Tokens that frozen blocks would have to read."""


def _as_on_cpu(
    work: OpenProject, ahead: WorkAhead, shape: ModelShape, *, device: DeviceFacts, dtype: str
) -> WorkAhead:
    """The work with the options of the step that is written for CPUs, if the run uses that step."""
    settings = work.settings.train
    if why_plain_step(settings, shape, device="cpu", precision=dtype) is not None:
        return ahead
    adapted = ahead.load.adapted_layers
    memory = machine_memory().get("limit", device.memory_gib) * GIB
    step = CpuStepPlan(
        packed=packed_bytes(shape, adapted=adapted, method=settings.method) <= memory * MEMORY_SHARE,
        kept=choose_kept(
            shape,
            ahead.trunk,
            adapted=adapted,
            memory_bytes=memory,
            disk_bytes=shutil.disk_usage(work.project.root).free,
            threads=device.threads,
        ),
        distinct_tokens=ahead.trunk.distinct,
        restarted=repeated_steps(settings) is not None,
    )
    return ahead._replace(load=ahead.load.model_copy(update={"cpu_step": step}))


def measure_work(work: OpenProject, prepared: PreparedData, shape: ModelShape) -> WorkAhead:
    """Count the rows as often as they will be trained on, with the trainer's own function."""
    folder, settings = Path(prepared.folder), work.settings.train
    rollouts = None
    if settings.objective == "grpo":
        rows, settings, rollouts = rollout_rows(work, folder)
    else:
        rows = choose_training_rows(read_rows(folder, "train"), settings=settings)
    if settings.objective in ("dpo", "orpo"):
        rows = rows_of_pairs(rows, render_with(load_template(work)))
    if settings.objective == "kto":
        # Both replies of a row that has two.
        rows = [copy for row in rows for copy in (row, row)[: 2 if row.rejected else 1]]
    if not rows:
        raise UserError(
            "the training split is empty",
            why="every row was dropped, held out or given the weight 0",
            fix="check `graft data audit`, or lower `data.test` and `data.validation`",
        )
    if settings.objective in ("dpo", "orpo"):
        settings = settings.model_copy(update={"batch_size": 2 * settings.batch_size})
    checks = islice(iterate_rows(folder, "validation"), settings.validation_rows)
    load = count_work(rows, settings, shape, validation_tokens=sum(len(row.tokens) for row in checks))
    return load._replace(load=load.load.model_copy(update={"rollouts": rollouts}))


def count_work(
    rows: Sequence[Row], settings: TrainSettings, shape: ModelShape, *, validation_tokens: int
) -> WorkAhead:
    """Count the work of training on these rows."""
    steps = plan_steps(rows, settings=settings)
    visits = [rows[index] for step in steps for index in step]
    # Epochs differ only where a weight has a fraction; then the whole run counts as one.
    epochs = settings.epochs if all(row.weight.is_integer() for row in rows) else 1
    visits = visits[: len(visits) // epochs]
    shared = shared_tokens(rows)
    trunk = TrunkTokens(
        # The last token of a row predicts nothing.
        distinct=sum(len(tokens) - shared - 1 for tokens in {row.tokens for row in rows}),
        visited=sum(len(rows[index].tokens) - shared - 1 for step in steps for index in step),
    )
    # Forward passes besides training: by the start, and for KTO's baseline in every epoch.
    reference_passes = {"dpo": 1, "kto": 1 + 2 * settings.epochs}.get(settings.objective, 0)
    load = Workload(
        lengths=tuple(len(row.tokens) for row in visits),
        trained_tokens=sum(len(row.tokens) - row.trained_from for row in visits),
        shared_tokens=shared,
        most_replies=max(
            sum(len(rows[index].tokens) - rows[index].trained_from for index in step) for step in steps
        ),
        batch_size=settings.batch_size,
        epochs=epochs,
        rank=settings.rank,
        targets=_target_names(settings, shape),
        adapted_layers=len(_layers(settings, shape)),
        method=settings.method,
        experts=settings.experts,
        ranks=_other_ranks(settings),
        validation_tokens=validation_tokens,
        checkpoints=math.ceil(len(steps) / settings.checkpoint_every),
        reference_tokens=reference_passes * sum(len(row.tokens) for row in rows),
    )
    return WorkAhead(load, len(steps), trunk)


def rows_of_pairs(rows: Sequence[Row], render: Render) -> list[Row]:
    """Return two rows for each pair, both of its mean length: batches consist of whole pairs, so the longest
    rows of all are not in one batch.
    """
    pairs, _ = make_pairs(rows, render)
    require_pairs(len(pairs), rows=len(rows))
    half_rows: list[Row] = []
    for pair in pairs:
        total = sum(len(row.tokens) for row in pair)
        for row, length in zip(pair, (total // 2, total - total // 2), strict=True):
            tokens = (*row.tokens, *[row.tokens[-1]] * length)[:length]
            half_rows.append(row.model_copy(update={"tokens": tokens}))
    return half_rows


def describe_adapter(settings: TrainSettings, shape: ModelShape) -> dict[str, Any]:
    """The shape of what is trained: AdapterShape as JSON."""
    adapter = AdapterShape(
        rank=settings.rank,
        alpha=settings.alpha,
        targets=_target_names(settings, shape),
        layers=tuple(_layers(settings, shape)),
        ranks=_other_ranks(settings),
        alphas={name: module.alpha for name, module in settings.modules.items() if module.alpha is not None},
        use_rslora=settings.use_rslora,
        kind="lora" if settings.method == "qlora" else settings.method,
        experts=settings.experts,
    )
    return adapter.model_dump(mode="json", exclude=set() if settings.experts else {"experts"})


def _started_from(work: OpenProject) -> dict[str, dict[str, str]]:
    """What the adapter starts from: a different start makes a different run."""
    start = find_start_adapter(work)
    return {} if start is None else {"started_from": start.identity}


def _evaluation_during(work: OpenProject) -> dict[str, Any]:
    """How answers are generated and graded during training: it decides when a run ends, and with what."""
    during, evaluate = work.settings.train.eval, work.settings.evaluate
    if during.every is None or during.metric in (LOSS, REWARD):
        return {}
    read = evaluate.model_dump(mode="json", include={"max_new_tokens", "fields"})
    return {"evaluation": {**read, "reasoning": work.settings.data.reasoning == "keep"}}


def _rendering(work: OpenProject) -> dict[str, Any]:
    """How replies other than the dataset's are rendered."""
    if work.settings.train.objective == "sft":
        return {}
    return {"rendering": {"reasoning": work.settings.data.reasoning == "keep"}}


def _target_names(settings: TrainSettings, shape: ModelShape) -> tuple[str, ...]:
    """The layers with an adapter, as this base names them."""
    linear = linear_names(shape)
    names = linear if settings.target_modules == "all" else settings.target_modules
    require_names(names, linear, setting="train.target_modules")
    require_names(settings.modules, names, setting="train.modules")
    return names


def _other_ranks(settings: TrainSettings) -> dict[str, int]:
    return {name: module.rank for name, module in settings.modules.items() if module.rank is not None}


def _layers(settings: TrainSettings, shape: ModelShape) -> range:
    return range(shape.layers - min(settings.upper_layers or shape.layers, shape.layers), shape.layers)


def kind_of_run(work: OpenProject) -> str:
    """Runs of the same kind do the same work a token, so that their speeds can be compared."""
    same = work.settings.train.model_dump(
        mode="json",
        include={"method", "rank", "modules", "target_modules", "upper_layers", "batch_size", "threads"},
    )
    if streams_layers(work.settings.train):
        same["offload"] = True
    if work.settings.train.objective != "sft":
        same["objective"] = work.settings.train.objective
    return fingerprint([work.base.revision, same])


STEP = PipelineStep(
    name="plan",
    title="plan the run",
    needs=("prepare",),
    makes=Plan,
    depends_on=lambda work, _outputs: [
        work.settings.train.what_is_learned(),
        work.settings.train.keeping(),
        work.settings.train.distribution(),
        work.settings.plan.model_dump(mode="json"),
        _started_from(work),
        {**_evaluation_during(work), **_rendering(work), **name_rewards(work)},
    ],
    do=lambda work, outputs: plan_for(
        work, outputs, probe_device(threads=work.settings.train.threads), forked=is_supported()
    ),
    # Later steps depend on what will be trained, not on how well it was predicted.
    identity=plan_identity,
    input_names=("train", "train", "train", "plan", "train.start_from", "train"),
)
