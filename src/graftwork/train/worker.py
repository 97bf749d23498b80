"""The training process: `python -m graftwork.train.worker JOB_FILE`.

In: a TrainJob. Out: `adapter/` and `outcome.json` in the run's folder, and on the way a heartbeat,
a journal of steps, checkpoints. Runs with torch, transformers, safetensors and pydantic alone.
"""

import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graftwork.files.dataset_folder import read_rows
from graftwork.files.digest import folder_digest
from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.trainable import make_trainable, trained_tensors
from graftwork.process import clock
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.text.publish import hide_in_tracebacks
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.callbacks.evaluation import TrainingEvaluator, find_best_step, read_evaluations
from graftwork.train.callbacks.guards import CrashRehearsal
from graftwork.train.callbacks.reporting import HeartbeatCallback
from graftwork.train.distributed.launch import SilentHeartbeat, is_main_process, threads_per_process
from graftwork.train.engine import TrainingEngine
from graftwork.train.objectives.epochs import EpochOrder, choose_training_rows
from graftwork.train.run_folder import ADAPTER, ATTEMPTS, MESSAGES, OUTCOME, REPLANNED, read_steps
from graftwork.train.run_setup import (
    deadline_of,
    guard_callbacks,
    open_checkpoint_store,
    reporting_callbacks,
    run_inputs,
    stoppable_progress,
)
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.train.distributed.strategies import DistributedStrategy

if TYPE_CHECKING:
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.train.distributed.strategies import DistributedStrategy
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.loop import TrainingLoop
    from graftwork.train.run_folder import Replay


def hash_base(job: TrainJob, model: Any, strategy: "DistributedStrategy", *, first: bool) -> str:
    """A hash of the base: of its weights in memory, or of its files where those in memory are learned."""
    from graftwork.model.load import base_digest, base_files_digest

    full = job.plan.method == "full"
    if not first and (full or not strategy.shards):
        return ""
    return base_files_digest(Path(job.base_folder)) if full else base_digest(model, whole=strategy.gather)


def require_base_unchanged(before: str, after: str, *, where: str) -> None:
    if after != before:
        raise EnvironmentLacks(
            "the base weights changed during training",
            why="an adapter trained on shifting ground cannot be served",
            fix="this is a fault of the program: please report it with the run's folder",
            where=where,
        )


def load_for(job: TrainJob) -> Any:
    """The base that this run is about, freshly loaded."""
    from graftwork.model.load import load_base

    settings = job_settings(job)
    method = settings.method
    # What is cut up into parts is read into host memory first: no device need hold all of it.
    tuning = job.plan.tuning
    aside = settings.strategy in ("fsdp", "zero3") or tuning is not None
    model = load_base(
        Path(job.base_folder),
        # Weights that are learned themselves need their small steps kept.
        dtype="float32" if method == "full" else job.plan.dtype,
        device="cpu" if aside else job.plan.device.kind,
        four_bits=method == "qlora" and tuning is None,
    )
    if tuning is not None:
        from graftwork.train.gpu.load import load_quantized

        load_quantized(model, tuning, device=job.plan.device.kind)
    return model


def train(
    job: TrainJob,
    *,
    load: Callable[[TrainJob], Any] = load_for,
    evaluator: TrainingEvaluator | None = None,
    strategy: "DistributedStrategy | None" = None,
) -> None:
    """Train the run to its end. `strategy` is given where runs share their steps with others."""
    folder = Path(job.folder)
    outcome_file = folder / OUTCOME
    if outcome_file.exists():
        return
    if not is_main_process():
        _train(job, SilentHeartbeat(), lambda _message: None, restarts=0, load=load, evaluator=evaluator)
        return
    attempts, words = Journal(folder / ATTEMPTS), Journal(folder / MESSAGES)
    attempts.append({"pid": os.getpid(), **clock.now().model_dump()}, durable=True)

    def say(word: str) -> None:
        try:
            words.append({"at": time.time(), "word": word})
        except EnvironmentLacks:
            # A full disk takes no words either; that is no reason to end the run.
            print(word, file=sys.stderr)

    with Heart(folder, vitals=True) as heart:
        outcome = _train(
            job,
            heart,
            say,
            restarts=len(attempts.read()) - 1,
            load=load,
            evaluator=evaluator,
            given_strategy=strategy,
        )
        if outcome is not None:
            write_whole(outcome_file, outcome.to_json())
            heart.beat("done", outcome.steps, outcome.steps)


class _Begun(NamedTuple):
    """A run that is ready for its first step."""

    engine: "TrainingEngine"
    rows: list[Row]
    checks: list[Row]
    shape: "AdapterShape"
    base_hash: str
    loss_before: float | None


def _train(
    job: TrainJob,
    heart: Heart | SilentHeartbeat,
    say: Callable[[str], None],
    *,
    restarts: int,
    load: Callable[[TrainJob], Any],
    evaluator: TrainingEvaluator | None,
    given_strategy: "DistributedStrategy | None" = None,
) -> TrainOutcome | None:
    """What became of the run; None behind the first process, which tells it for all."""
    from graftwork.train.distributed.launch import make_strategy

    settings, begun = job_settings(job), time.perf_counter()
    strategy = given_strategy or make_strategy(settings, device=job.plan.device.kind, dtype=job.plan.dtype)
    looking_on = reporting_callbacks(
        job,
        settings,
        evaluator=evaluator,
        strategy=strategy,
        progress=heart.move,
        report=say,
        stop_asked=stop_asked.is_set,
    )
    heart.beat("loading the base model", 0, 1)
    _make_exact(job, settings)
    ready = _begin(
        job, heart, say, settings=settings, strategy=strategy, load=load, shares=given_strategy is not None
    )
    loop = _make_loop(job, ready, heart, say, settings=settings, strategy=strategy, looking_on=looking_on)
    loaded = time.perf_counter() - begun
    replay = loop.run()
    heart.beat("loss after training", loop.steps, loop.steps)
    return _finish(job, ready, replay, strategy=strategy, load=load, restarts=restarts, loaded=loaded)


def _begin(
    job: TrainJob,
    heart: Heart | SilentHeartbeat,
    say: Callable[[str], None],
    *,
    settings: TrainSettings,
    strategy: "DistributedStrategy",
    load: Callable[[TrainJob], Any],
    shares: bool,
) -> _Begun:
    """Load the base, prove it, attach what is learned, measure the loss before."""
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.trainable import make_trainable
    from graftwork.train.distributed.strategies import SingleProcess
    from graftwork.train.engine_choice import EngineInputs, make_engine
    from graftwork.train.loss import mean_loss

    model = load(job)
    before = hash_base(job, model, SingleProcess(), first=strategy.rank == 0)
    rows = _training_rows(job, settings)
    checks = read_rows(Path(job.dataset_folder), "validation")[: settings.validation_rows]
    heart.beat("loss before training", 0, 1)
    bare = strategy.size == 1 and job.plan.tuning is None
    loss_before = None
    if bare:
        device = job.plan.device.kind
        loss_before = _once(job, lambda: mean_loss(model, checks, batch_rows=8, device=device), strategy)
    shape = AdapterShape.model_validate(job.plan.train["adapter"])
    start = Path(job.start_adapter) if job.start_adapter else None
    learned = make_trainable(model, shape, seed=settings.seed, start=start)
    progress = stoppable_progress(heart.move, stop_asked.is_set) if strategy.size == 1 else heart.move
    engine = make_engine(
        EngineInputs(job, settings, model, learned, rows),
        strategy=strategy,
        shares_steps=shares,
        progress=progress,
        report=say,
    )
    if not bare:
        # A fresh adapter changes nothing yet; what it starts from is what the loss is measured on.
        loss_before = _once(job, lambda: engine.mean_loss(checks, batch_rows=8), strategy)
    return _Begun(engine, rows, checks, shape, before, loss_before)


def _make_loop(
    job: TrainJob,
    ready: _Begun,
    heart: Heart | SilentHeartbeat,
    say: Callable[[str], None],
    *,
    settings: TrainSettings,
    strategy: "DistributedStrategy",
    looking_on: Sequence[TrainingCallback],
) -> "TrainingLoop":
    from graftwork.train.checkpoints.store import open_read_only_store
    from graftwork.train.loop import RunContext, TrainingLoop

    folder = Path(job.folder)
    # The first process alone watches the clock and writes; the others stop when it does.
    deadline = None if strategy.rank else deadline_of(job, settings)
    store = (
        open_read_only_store(folder, settings)
        if strategy.rank
        else open_checkpoint_store(job, settings, deadline=deadline)
    )
    beside = _callbacks(settings, folder, heart) if isinstance(heart, Heart) else []
    context = RunContext(
        settings,
        folder,
        report=say,
        stop_requested=stop_asked.is_set,
        made_for=run_inputs(job),
        versions=_versions(),
    )
    return TrainingLoop(
        ready.engine,
        EpochOrder(ready.rows, settings=settings),
        context,
        callbacks=[*guard_callbacks(settings, store, deadline=deadline, report=say), *beside, *looking_on],
        store=store,
    )


def _finish(
    job: TrainJob,
    ready: _Begun,
    replay: "Replay | None",
    *,
    strategy: "DistributedStrategy",
    load: Callable[[TrainJob], Any],
    restarts: int,
    loaded: float,
) -> TrainOutcome | None:
    """Prove the base again, save the adapter, say what came of it."""
    from graftwork.model.adapters.trainable import save_trained
    from graftwork.model.base import loadable_name

    engine, folder = ready.engine, Path(job.folder)
    loss_after = engine.mean_loss(ready.checks, batch_rows=8)
    after = hash_base(job, engine.model, strategy, first=strategy.rank == 0)
    model = gather_model(job, engine, load=load, shape=ready.shape)
    strategy.finish()
    if strategy.rank:
        return None
    require_base_unchanged(ready.base_hash, after, where=job.folder)
    adapter = folder / ADAPTER
    save_trained(model, adapter, shape=ready.shape, base=loadable_name(job.plan.base))
    steps, looks = read_steps(folder), read_evaluations(folder)
    busy = sum(step.seconds for step in steps)
    return TrainOutcome(
        run_id=job.run_id,
        adapter_folder=str(adapter),
        adapter_hash=folder_digest(adapter),
        base_hash_before=ready.base_hash,
        base_hash_after=after,
        base_proof="files" if ready.shape.kind == "full" else "memory",
        steps=steps[-1].step,
        epochs=job_settings(job).epochs,
        first_loss=steps[0].loss,
        final_loss=steps[-1].loss,
        validation_loss_before=ready.loss_before,
        validation_loss_after=loss_after,
        seconds=busy,
        load_seconds=loaded,
        tokens_per_second=sum(step.tokens for step in steps) / busy,
        peak_memory_gib=engine.peak_memory_gib(),
        trainable_parameters=engine.trainable,
        restarts=restarts,
        replayed_steps=replay.steps if replay else 0,
        # Fewer rows at a time add up to the same gradient, not to the same last bit of it.
        replay_identical=replay.identical if replay and not (folder / REPLANNED).exists() else None,
        rows=len(ready.rows),
        started_from=folder_digest(Path(job.start_adapter)) if job.start_adapter else None,
        looks=looks,
        best_step=find_best_step(looks),
        versions=_versions(),
        settings=job.plan.train,
    )


def _make_exact(job: TrainJob, settings: TrainSettings) -> None:
    """The same sums in the same order, every time; on a card, as near as its fast kernels come to it."""
    import torch

    from graftwork.model.threads import guard_spinning, use_threads

    torch.use_deterministic_algorithms(job.plan.device.kind == "cpu")
    # Nothing here reads memory that it did not write: filling it first is work for nobody.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    guard_spinning(use_threads(settings.threads or threads_per_process()))


def job_settings(job: TrainJob) -> TrainSettings:
    """What is learned stands in the plan; how the run is kept stands beside it in the job."""
    beside = {**job.keeping, **job.crew, "run": job.run}
    return TrainSettings.model_validate({**job.plan.train["settings"], **beside})


def _callbacks(settings: TrainSettings, folder: Path, heart: Heart) -> list[TrainingCallback]:
    """Who stands beside the loop, in the order in which they are asked."""
    callbacks: list[TrainingCallback] = [HeartbeatCallback(heart, folder)]
    if settings.run.rehearse_crash:
        callbacks.append(CrashRehearsal(folder, checkpoint_every=settings.checkpoint_every))
    return callbacks


def _training_rows(job: TrainJob, settings: TrainSettings) -> list[Row]:
    """The rows of the training split that weigh anything and that the budget allows."""
    rows = choose_training_rows(read_rows(Path(job.dataset_folder), "train"), settings=settings)
    if not rows:
        raise EnvironmentLacks(
            "the training split is empty", fix="prepare more data", where=job.dataset_folder
        )
    return rows


def _once(
    job: TrainJob, compute: Callable[[], float | None], strategy: "DistributedStrategy"
) -> float | None:
    """A figure that a resumed run need not compute again."""
    path = Path(job.folder) / "loss_before"
    if not strategy.broadcast(path.exists()):
        figure = repr(compute())
        if strategy.rank == 0:
            write_whole(path, figure)
    text = strategy.broadcast(path.read_text() if strategy.rank == 0 else "")
    return None if text == "None" else float(text)


def _versions() -> dict[str, str]:
    import torch
    import transformers

    import graftwork

    return {
        "graftwork": graftwork.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    hide_in_tracebacks()
    sys.exit(run_worker(TrainJob, lambda job: Path(job.folder), train, first=is_main_process()))


@torch.no_grad()
def gather_model(
    job: TrainJob, engine: TrainingEngine, *, load: Callable[[TrainJob], Any], shape: AdapterShape
) -> Any:
    """The trained model; where it lies in parts, a fresh one in host memory with what was learned."""
    if not engine.strategy.shards:
        return engine.model
    learned = engine.learned()
    if engine.strategy.rank:
        return None
    fresh = load(job)
    make_trainable(fresh, shape, seed=0)
    for name, tensor in trained_tensors(fresh).items():
        tensor.copy_(learned[name])
    return fresh
