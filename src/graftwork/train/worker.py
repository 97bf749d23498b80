"""Training one run, in the process that `worker_process.py` starts with an evaluator.

Input: a TrainJob. Output: `adapter/` and `outcome.json` in the run's folder; during the run a heartbeat, a
journal of steps and checkpoints. Needs torch, transformers, safetensors and pydantic, and imports them when
it trains.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graftwork.files.dataset import read_rows
from graftwork.files.disk import Journal, folder_digest, write_atomic
from graftwork.process import clock
from graftwork.process.heartbeat import Heart
from graftwork.process.machine import peak_allocated_gib
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.plan import Plan
from graftwork.records.report import Case
from graftwork.records.run import TrainingEvaluation, TrainJob, TrainOutcome
from graftwork.text.redact import hide_in_tracebacks
from graftwork.train.callbacks import (
    CrashRehearsal,
    DeadlineCallback,
    DivergenceCallback,
    EvaluationCallback,
    HeartbeatCallback,
    TrainingCallback,
    TrainingEvaluator,
    find_best_step,
    read_evaluations,
)
from graftwork.train.checkpoints import CheckpointStore, ReadOnlyCheckpointStore, open_checkpoint_store
from graftwork.train.distributed.launch import SilentHeartbeat, is_main_process, leave, threads_per_process
from graftwork.train.engine_choice import starts_on_host
from graftwork.train.objectives.epochs import choose_training_rows
from graftwork.train.run_folder import (
    ADAPTER,
    ATTEMPTS,
    CHECKPOINTS,
    MESSAGES,
    OUTCOME,
    REPLANNED,
    mean_measures,
    read_steps,
)
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.train.distributed.strategies import SingleProcess
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.loop import TrainingLoop

# Whether a run adds up in the same order every time: a killed run then resumes to the bytes of a whole one.
# On a GPU the order of sums differs in the backward pass of attention. Its deterministic version is slower
# and takes more memory for few heads; what else a step computes has one, too, or is in a fixed order anyway.
AUTO: Mapping[Literal["streamed", "packed", "plain"], bool] = {
    # Attention is a few percent of a step that trains all weights.
    "streamed": True,
    # Attention is a larger share of a step whose products are in 8 bits.
    "packed": False,
    # What any model of transformers computes may lack a deterministic version.
    "plain": False,
}
"""Meaning of `deterministic: auto` on a GPU, by kind of step."""

CUBLAS_VARIABLE, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""8 buffers of 4,096 KiB: torch's own default for cuBLAS on Hopper."""


def is_deterministic(plan: Plan, settings: TrainSettings) -> bool:
    if plan.device.kind == "cpu":
        return True
    if settings.deterministic != "auto":
        return settings.deterministic == "on"
    if plan.streamed is not None:
        return AUTO["streamed"]
    return AUTO["plain" if plan.tuning is None else "packed"]


def use_deterministic_kernels(enabled: bool, *, on_gpu: bool) -> None:
    """Call before the first product on the GPU: torch reads cuBLAS's setting only once."""
    import torch

    if enabled and on_gpu:
        os.environ.setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACE)
    # Not `warn_only`: flash attention would stay as it is, and cuDNN's, which has no such version, be used.
    torch.use_deterministic_algorithms(enabled)
    # Nothing here reads memory that it did not write, so filling it first is wasted work.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@contextmanager
def explain_missing_kernels() -> Iterator[None]:
    """An operation without a deterministic version is refused by torch: name the setting that requires it."""
    try:
        yield
    except RuntimeError as error:
        if "determinis" not in str(error):
            raise
        raise UserError(
            f"this run cannot be deterministic: {str(error).split(', but')[0]}",
            why="`train.deterministic` requires sums in the same order every time",
            fix="set `train.deterministic: off`; a resumed run then differs in the last bits",
        ) from error


LoadBase = Callable[[TrainJob], Any]


def load_for(job: TrainJob) -> Any:
    """Load the base of a run from disk."""
    from graftwork.model.load import load_base

    settings = job_settings(job)
    method = settings.method
    # What is sharded, streamed or quantized is read into host memory: no device has to hold all of it.
    tuning = job.plan.tuning
    on_host = starts_on_host(job.plan, settings)
    model = load_base(
        Path(job.base_folder),
        # Full fine-tuning makes updates too small for 16 bits.
        dtype="float32" if method == "full" else job.plan.dtype,
        device="cpu" if on_host else job.plan.device.kind,
        four_bits=method == "qlora" and tuning is None,
    )
    if tuning is not None:
        from graftwork.train.gpu.load import load_quantized

        load_quantized(model, tuning, device=job.plan.device.kind)
    return model


def train(
    job: TrainJob,
    *,
    load: LoadBase = load_for,
    evaluator: TrainingEvaluator | None = None,
    strategy: "SingleProcess | None" = None,
    cases: Sequence[Case] = (),
) -> None:
    """Train the run to its end. `strategy` is set if several runs share their steps, `cases` are the prompts
    of reinforcement learning.
    """
    folder = Path(job.folder)
    outcome_file = folder / OUTCOME
    if outcome_file.exists():
        return
    if not is_main_process():
        _train(job, SilentHeartbeat(), lambda _message: None, load=load, evaluator=evaluator)
        return
    attempts, messages = Journal(folder / ATTEMPTS), Journal(folder / MESSAGES)
    attempts.append({"pid": os.getpid(), **clock.now().model_dump()}, durable=True)

    def report(message: str) -> None:
        try:
            messages.append({"at": time.time(), "message": message})
        except EnvironmentFailure:
            # A full disk must not end the run.
            print(message, file=sys.stderr)

    with Heart(folder, vitals=True) as heart:
        outcome = _train(
            job, heart, report, load=load, evaluator=evaluator, shared_strategy=strategy, cases=cases
        )
        if outcome is not None:
            outcome = outcome.model_copy(update={"restarts": len(attempts.read()) - 1})
            write_atomic(outcome_file, outcome.to_json())
            heart.beat("done", outcome.steps, outcome.steps)


FIRST_PHASES = {
    "dpo": "log-probabilities of the start",
    "kto": "log-probabilities of the start",
    "grpo": "sampling the first answers",
}
"""Phases of an objective before its first step."""


def _train(
    job: TrainJob,
    heart: Heart | SilentHeartbeat,
    report: Callable[[str], None],
    *,
    load: LoadBase,
    evaluator: TrainingEvaluator | None,
    shared_strategy: "SingleProcess | None" = None,
    cases: Sequence[Case] = (),
) -> TrainOutcome | None:
    """Train and return the outcome; None in all processes but the first."""
    from graftwork.model.threads import guard_spinning, use_threads
    from graftwork.train.distributed.launch import make_strategy

    settings, started_at = job_settings(job), time.perf_counter()
    # The order of sums, on a device and over threads: before the device is first used.
    use_deterministic_kernels(is_deterministic(job.plan, settings), on_gpu=job.plan.device.kind != "cpu")
    guard_spinning(use_threads(settings.threads or threads_per_process()))
    strategy = shared_strategy or make_strategy(settings, device=job.plan.device.kind, dtype=job.plan.dtype)
    reporting = reporting_callbacks(
        job,
        settings,
        evaluator=evaluator,
        strategy=strategy,
        progress=heart.move,
        report=report,
        stop_requested=stop_asked.is_set,
    )
    heart.beat("loading the base model", 0, 1)
    with explain_missing_kernels():
        run = _Run(job, settings, strategy, heart, report, load)
        run.prepare(cases)
        loop = run.make_loop(reporting)
        load_seconds = time.perf_counter() - started_at
        replay = loop.run()
        heart.beat("loss after training", loop.steps, loop.steps)
        return run.finish(replay, load_seconds=load_seconds)


class _Run:
    """A run in this process: `prepare` it for its first step, `make_loop`, and `finish` it after the last."""

    def __init__(
        self,
        job: TrainJob,
        settings: TrainSettings,
        strategy: "SingleProcess",
        heart: Heart | SilentHeartbeat,
        report: Callable[[str], None],
        load: LoadBase,
    ) -> None:
        self.job, self.settings, self.strategy = job, settings, strategy
        self.heart, self.report, self.load = heart, report, load
        self.folder = Path(job.folder)

    def prepare(self, cases: Sequence[Case]) -> None:
        """Load and hash the base, attach what is trained, measure the loss before training."""
        from graftwork.model.adapter_shape import AdapterShape
        from graftwork.model.adapters.peft import make_trainable
        from graftwork.train.distributed.strategies import SingleProcess
        from graftwork.train.engine_choice import make_engine
        from graftwork.train.loss import mean_loss
        from graftwork.train.run_source import prepare_source

        job, settings, strategy, move = self.job, self.settings, self.strategy, self.heart.move
        model = self.load(job)
        self.base_hash = hash_base(job, model, SingleProcess(), first=strategy.rank == 0)
        dataset = Path(job.dataset_folder)
        rows = choose_training_rows(read_rows(dataset, "train"), settings=settings)
        if not rows and settings.needs_rows:
            raise EnvironmentFailure(
                "the training split is empty", fix="prepare more data", where=job.dataset_folder
            )
        self.rows = len(rows)
        self.checks = read_rows(dataset, "validation")[: settings.validation_rows]
        self.heart.beat("loss before training", 0, 1)
        # A model that an engine still has to place cannot be called before that.
        bare = strategy.size == 1 and not starts_on_host(job.plan, settings)
        if bare:
            device = job.plan.device.kind
            self.loss_before = self._once(lambda: mean_loss(model, self.checks, batch_size=8, device=device))
        self.shape = AdapterShape.model_validate(job.plan.train["adapter"])
        start = Path(job.start_adapter) if job.start_adapter else None
        parameters = make_trainable(model, self.shape, seed=settings.seed, start=start)
        engine_rows, open_source = prepare_source(
            job, settings, rows, cases, report=self.report, progress=move, stopped=stop_asked.is_set
        )
        self.engine, notes = make_engine(
            job,
            settings,
            model,
            parameters,
            engine_rows,
            strategy=strategy,
            progress=stoppable_progress(move, stop_asked.is_set) if strategy.size == 1 else move,
        )
        for note in notes:
            self.report(note)
        if not bare:
            # A fresh adapter changes nothing yet, so this is the loss of what training starts from.
            self.loss_before = self._once(lambda: self.engine.mean_loss(self.checks, batch_size=8))
        if settings.objective in FIRST_PHASES:
            self.heart.beat(FIRST_PHASES[settings.objective], 0, 1)
        self.batches, self.source_callbacks = open_source(self.engine)

    def _once(self, compute: Callable[[], float | None]) -> float | None:
        """A figure that a resumed run reads instead of recomputing it."""
        strategy, path = self.strategy, self.folder / "loss_before"
        if not strategy.broadcast(path.exists()):
            figure = repr(compute())
            if strategy.rank == 0:
                write_atomic(path, figure)
        text = strategy.broadcast(path.read_text() if strategy.rank == 0 else "")
        return None if text == "None" else float(text)

    def make_loop(self, reporting: Sequence[TrainingCallback]) -> "TrainingLoop":
        from graftwork.train.loop import RunContext, TrainingLoop

        job, settings = self.job, self.settings
        # Only the first process watches the clock and writes; the others stop when it does.
        follows = self.strategy.rank > 0
        deadline = None if follows else deadline_of(job, settings)
        store = (
            ReadOnlyCheckpointStore(self.folder / CHECKPOINTS, keep=settings.keep_checkpoints)
            if follows
            else open_checkpoint_store(job, settings, deadline=deadline)
        )
        context = RunContext(
            settings,
            self.folder,
            report=self.report,
            stop_requested=stop_asked.is_set,
            # A checkpoint belongs to these, besides its settings and the order of its rows.
            identity={
                "dataset": job.plan.dataset_hash,
                "base": job.plan.base_fingerprint,
                "adapter": json.dumps(job.plan.train["adapter"], sort_keys=True),
            },
            versions=_versions(),
        )
        callbacks = guard_callbacks(
            settings, store, deadline=deadline, peek=self.batches.peek, report=self.report
        )
        if isinstance(self.heart, Heart):
            callbacks.append(HeartbeatCallback(self.heart, self.folder))
            if settings.run.rehearse_crash:
                callbacks.append(CrashRehearsal(self.folder, checkpoint_every=settings.checkpoint_every))
        callbacks = [*callbacks, *self.source_callbacks, *reporting]
        return TrainingLoop(self.engine, self.batches, context, callbacks=callbacks, store=store)

    def finish(self, replay: tuple[int, bool] | None, *, load_seconds: float) -> TrainOutcome | None:
        """Check that the base is unchanged, save what was trained, and describe the outcome."""
        from graftwork.model.adapters.peft import save_trained
        from graftwork.model.base import loadable_name

        job, engine, folder, strategy = self.job, self.engine, self.folder, self.strategy
        loss_after = engine.mean_loss(self.checks, batch_size=8)
        base_hash = hash_base(job, engine.model, strategy, first=strategy.rank == 0)
        model = gather_model(job, engine, load=self.load, shape=self.shape)
        strategy.finish()
        if strategy.rank:
            return None
        if base_hash != self.base_hash:
            raise EnvironmentFailure(
                "the base weights changed during training",
                why="an adapter trained on changing weights cannot be served",
                fix="this is a bug: please report it with the run's folder",
                where=job.folder,
            )
        adapter = folder / ADAPTER
        save_trained(model, adapter, shape=self.shape, base=loadable_name(job.plan.base))
        steps, evaluations = read_steps(folder), read_evaluations(folder)
        busy = sum(step.seconds for step in steps)
        return TrainOutcome(
            run_id=job.run_id,
            adapter_folder=str(adapter),
            adapter_hash=folder_digest(adapter),
            base_hash_before=self.base_hash,
            base_hash_after=base_hash,
            base_proof="files" if self.shape.kind == "full" else "memory",
            steps=steps[-1].step,
            epochs=self.settings.epochs,
            first_loss=steps[0].loss,
            final_loss=steps[-1].loss,
            validation_loss_before=self.loss_before,
            validation_loss_after=loss_after,
            seconds=busy,
            load_seconds=load_seconds,
            tokens_per_second=sum(step.tokens for step in steps) / busy,
            peak_memory_gib=engine.peak_memory_gib(),
            peak_allocated_gib=peak_allocated_gib(),
            trainable_parameters=engine.trainable,
            restarts=0,
            replayed_steps=replay[0] if replay else 0,
            # Fewer rows at a time add up to the same gradient, but not to its last bit.
            replay_identical=replay[1] if replay and not (folder / REPLANNED).exists() else None,
            skipped_steps=sum(step.skipped for step in steps),
            repeated_steps=sum(len(step.repeated) for step in steps),
            rows=self.rows,
            started_from=folder_digest(Path(job.start_adapter)) if job.start_adapter else None,
            looks=evaluations,
            best_step=find_best_step(evaluations),
            measures_first=steps[0].measures,
            measures_last=mean_measures(steps[-max(len(steps) // 10, 1) :]),
            versions=_versions(),
            settings=job.plan.train,
        )


def deadline_of(job: TrainJob, settings: TrainSettings) -> float | None:
    """When the place disappears, by the steady clock: as the job states, or this many minutes from now."""
    if job.deadline is not None:
        start = job.deadline_from or clock.now()
        return clock.steady() - clock.seconds_since(start) + (job.deadline - start.at)
    minutes = settings.run.deadline_minutes
    return clock.steady() + minutes * 60 if minutes is not None else None


def guard_callbacks(
    settings: TrainSettings,
    store: CheckpointStore,
    *,
    deadline: float | None,
    peek: Callable[[int], Sequence[Row]],
    report: Callable[[str], None],
) -> list[TrainingCallback]:
    """Callbacks that refuse a step or end the run before it is damaged."""
    # The loss of sampled answers is a sum weighted by advantages: large rewards make it jump, rightly.
    compares = settings.objective != "grpo"
    callbacks: list[TrainingCallback] = [
        DivergenceCallback(settings.watch, compares_losses=compares, peek=peek, report=report)
    ]
    if deadline is not None:
        every, seconds = settings.eval.every, settings.eval.seconds
        callbacks.append(
            DeadlineCallback(
                deadline,
                save_seconds=lambda: store.seconds,
                evaluation_seconds=lambda number: seconds if every and number % every == 0 else 0.0,
            )
        )
    return callbacks


def stoppable_progress(move: Callable[..., None], stop_asked: Callable[[], bool]) -> Callable[..., None]:
    """Updates the heartbeat; on a stop request it abandons the step between two of its parts. Only for a
    single process: in a strategy, the others would wait forever.
    """
    from graftwork.train.loop import StepInterrupted

    def progress(*doing: str) -> None:
        move(*doing)
        if stop_asked():
            raise StepInterrupted

    return progress


def reporting_callbacks(
    job: TrainJob,
    settings: TrainSettings,
    *,
    evaluator: TrainingEvaluator | None = None,
    strategy: "SingleProcess | None" = None,
    progress: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = lambda _message: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[TrainingCallback]:
    from graftwork.train.trackers import TrackerCallback, require_installed

    folder = Path(job.folder)
    require_installed(settings.run.trackers)
    callbacks: list[TrainingCallback] = []
    latest: Callable[[], TrainingEvaluation | None] = lambda: None  # noqa: E731
    if settings.eval.every is not None:
        evaluation = EvaluationCallback(
            settings.eval,
            read_rows(Path(job.dataset_folder), "validation"),
            folder=folder,
            evaluator=evaluator,
            report=report,
            progress=progress,
            stop_requested=stop_requested,
        )
        callbacks.append(evaluation)
        latest = lambda: evaluation.latest  # noqa: E731
    if settings.run.trackers and (strategy is None or strategy.rank == 0):
        track = TrackerCallback(
            settings.run.trackers,
            run_id=job.run_id,
            settings=settings.what_is_learned(),
            folder=folder,
            latest_evaluation=latest,
            report=report,
        )
        callbacks.append(track)
    return callbacks


def hash_base(job: TrainJob, model: Any, strategy: "SingleProcess", *, first: bool) -> str:
    """A hash of the base: of its weights in memory, or of its files if those in memory are trained."""
    from graftwork.model.load import base_digest, base_files_digest

    full = job.plan.method == "full"
    if not first and (full or not strategy.shards):
        return ""
    if full:
        return base_files_digest(Path(job.base_folder))
    return base_digest(model, whole=strategy.gather if strategy.shards else None)


def gather_model(job: TrainJob, engine: "TrainingEngine", *, load: LoadBase, shape: "AdapterShape") -> Any:
    """The trained model; if it is sharded, a fresh one in host memory with the trained tensors."""
    import torch

    from graftwork.model.adapters.peft import make_trainable, trained_tensors

    if not engine.strategy.shards:
        return engine.model
    with torch.no_grad():
        trained = engine.learned()
        if engine.strategy.rank:
            return None
        fresh = load(job)
        make_trainable(fresh, shape, seed=0)
        for name, tensor in trained_tensors(fresh).items():
            tensor.copy_(trained[name])
    return fresh


def job_settings(job: TrainJob) -> TrainSettings:
    """The settings of a job: the plan contains those that change the result, the job the rest."""
    learned = job.plan.train["settings"]
    runtime: dict[str, Any] = {**job.keeping, **job.crew, "run": job.run}
    if job.endpoint:
        rollouts = learned["rollouts"]
        runtime["rollouts"] = {**rollouts, "endpoint": {**rollouts["endpoint"], **job.endpoint}}
    return TrainSettings.model_validate({**learned, **runtime})


def _versions() -> dict[str, str]:
    import torch
    import transformers

    from graftwork.version import __version__

    return {
        "graftwork": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    hide_in_tracebacks()
    leave(run_worker(TrainJob, lambda job: Path(job.folder), train, first=is_main_process()))
