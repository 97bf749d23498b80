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

from graftwork.files.dataset_folder import read_rows
from graftwork.files.digest import folder_digest
from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.process import clock
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.text.redact import hide_in_tracebacks
from graftwork.train.attend.attendant import Attendant
from graftwork.train.attend.onlookers import onlookers
from graftwork.train.attend.pulse import Pulse
from graftwork.train.attend.rehearsal import Rehearsal
from graftwork.train.files import ADAPTER, ATTEMPTS, OUTCOME, REPLANNED, WORDS
from graftwork.train.launch import QuietHeart, is_first, threads_each
from graftwork.train.log import read_steps
from graftwork.train.looks import find_best, read_looks
from graftwork.train.order import choose_training_rows
from graftwork.train.ports import Examiner
from graftwork.train.proof import prove_base, require_unchanged
from graftwork.train.safety import deadline_of, guards, made_for, open_vault, pulse_that_stops
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.train.crew import Crew
    from graftwork.train.engine import Engine
    from graftwork.train.log import Replay
    from graftwork.train.loop import Loop


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
        from graftwork.train.gpu.furnish import furnish

        furnish(model, tuning, device=job.plan.device.kind)
    return model


def train(
    job: TrainJob,
    *,
    load: Callable[[TrainJob], Any] = load_for,
    examiner: Examiner | None = None,
    crew: "Crew | None" = None,
) -> None:
    """Train the run to its end. `crew` is given where runs share their steps with others."""
    folder = Path(job.folder)
    outcome_file = folder / OUTCOME
    if outcome_file.exists():
        return
    if not is_first():
        _train(job, QuietHeart(), lambda _word: None, restarts=0, load=load, examiner=examiner)
        return
    attempts, words = Journal(folder / ATTEMPTS), Journal(folder / WORDS)
    attempts.append({"pid": os.getpid(), **clock.now().model_dump()}, durable=True)

    def say(word: str) -> None:
        try:
            words.append({"at": time.time(), "word": word})
        except EnvironmentLacks:
            # A full disk takes no words either; that is no reason to end the run.
            print(word, file=sys.stderr)

    with Heart(folder, vitals=True) as heart:
        outcome = _train(
            job, heart, say, restarts=len(attempts.read()) - 1, load=load, examiner=examiner, given_crew=crew
        )
        if outcome is not None:
            write_whole(outcome_file, outcome.to_json())
            heart.beat("done", outcome.steps, outcome.steps)


class _Begun(NamedTuple):
    """A run that is ready for its first step."""

    engine: "Engine"
    rows: list[Row]
    checks: list[Row]
    shape: "AdapterShape"
    base_hash: str
    loss_before: float | None


def _train(
    job: TrainJob,
    heart: Heart | QuietHeart,
    say: Callable[[str], None],
    *,
    restarts: int,
    load: Callable[[TrainJob], Any],
    examiner: Examiner | None,
    given_crew: "Crew | None" = None,
) -> TrainOutcome | None:
    """What became of the run; None behind the first process, which tells it for all."""
    from graftwork.train.crew.assemble import assemble

    settings, begun = job_settings(job), time.perf_counter()
    crew = given_crew or assemble(settings, device=job.plan.device.kind, dtype=job.plan.dtype)
    looking_on = onlookers(
        job,
        settings,
        examiner=examiner,
        crew=crew,
        pulse=heart.move,
        on_word=say,
        stop_asked=stop_asked.is_set,
    )
    heart.beat("loading the base model", 0, 1)
    _make_exact(job, settings)
    ready = _begin(job, heart, say, settings=settings, crew=crew, load=load, shares=given_crew is not None)
    loop = _make_loop(job, ready, heart, say, settings=settings, crew=crew, looking_on=looking_on)
    loaded = time.perf_counter() - begun
    replay = loop.run()
    heart.beat("loss after training", loop.steps, loop.steps)
    return _finish(job, ready, replay, crew=crew, load=load, restarts=restarts, loaded=loaded)


def _begin(
    job: TrainJob,
    heart: Heart | QuietHeart,
    say: Callable[[str], None],
    *,
    settings: TrainSettings,
    crew: "Crew",
    load: Callable[[TrainJob], Any],
    shares: bool,
) -> _Begun:
    """Load the base, prove it, attach what is learned, measure the loss before."""
    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.learn import begin_learning
    from graftwork.train.assemble import make_engine
    from graftwork.train.crew.alone import Alone
    from graftwork.train.loss import mean_loss

    model = load(job)
    before = prove_base(job, model, Alone(), first=crew.rank == 0)
    rows = _training_rows(job, settings)
    checks = read_rows(Path(job.dataset_folder), "validation")[: settings.validation_rows]
    heart.beat("loss before training", 0, 1)
    bare = crew.size == 1 and job.plan.tuning is None
    loss_before = None
    if bare:
        device = job.plan.device.kind
        loss_before = _once(job, lambda: mean_loss(model, checks, batch_rows=8, device=device), crew)
    shape = AdapterShape.model_validate(job.plan.train["adapter"])
    start = Path(job.start_adapter) if job.start_adapter else None
    learned = begin_learning(model, shape, seed=settings.seed, start=start)
    pulse = pulse_that_stops(heart.move, stop_asked.is_set) if crew.size == 1 else heart.move
    engine = make_engine(
        job, model, learned, rows, settings=settings, crew=crew, shares=shares, pulse=pulse, say=say
    )
    if not bare:
        # A fresh adapter changes nothing yet; what it starts from is what the loss is measured on.
        loss_before = _once(job, lambda: engine.mean_loss(checks, batch_rows=8), crew)
    return _Begun(engine, rows, checks, shape, before, loss_before)


def _make_loop(
    job: TrainJob,
    ready: _Begun,
    heart: Heart | QuietHeart,
    say: Callable[[str], None],
    *,
    settings: TrainSettings,
    crew: "Crew",
    looking_on: Sequence[Attendant],
) -> "Loop":
    from graftwork.train.crew.follow import reading_vault
    from graftwork.train.loop import Loop

    folder = Path(job.folder)
    # The first process alone watches the clock and writes; the others stop when it does.
    deadline = None if crew.rank else deadline_of(job, settings)
    vault = reading_vault(folder, settings) if crew.rank else open_vault(job, settings, deadline=deadline)
    beside = _attendants(settings, folder, heart) if isinstance(heart, Heart) else []
    return Loop(
        ready.engine,
        ready.rows,
        settings=settings,
        folder=folder,
        attendants=[*guards(settings, vault, deadline=deadline, on_word=say), *beside, *looking_on],
        on_word=say,
        stop_asked=stop_asked.is_set,
        vault=vault,
        made_for=made_for(job),
        versions=_versions(),
    )


def _finish(
    job: TrainJob,
    ready: _Begun,
    replay: "Replay | None",
    *,
    crew: "Crew",
    load: Callable[[TrainJob], Any],
    restarts: int,
    loaded: float,
) -> TrainOutcome | None:
    """Prove the base again, save the adapter, say what came of it."""
    from graftwork.model.base import loadable_name
    from graftwork.model.learn import save_learned
    from graftwork.train.crew.follow import whole_model

    engine, folder = ready.engine, Path(job.folder)
    loss_after = engine.mean_loss(ready.checks, batch_rows=8)
    after = prove_base(job, engine.model, crew, first=crew.rank == 0)
    model = whole_model(job, engine, load=load, shape=ready.shape)
    crew.part()
    if crew.rank:
        return None
    require_unchanged(ready.base_hash, after, where=job.folder)
    adapter = folder / ADAPTER
    save_learned(model, adapter, shape=ready.shape, base=loadable_name(job.plan.base))
    steps, looks = read_steps(folder), read_looks(folder)
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
        best_step=find_best(looks),
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
    guard_spinning(use_threads(settings.threads or threads_each()))


def job_settings(job: TrainJob) -> TrainSettings:
    """What is learned stands in the plan; how the run is kept stands beside it in the job."""
    beside = {**job.keeping, **job.crew, "run": job.run}
    return TrainSettings.model_validate({**job.plan.train["settings"], **beside})


def _attendants(settings: TrainSettings, folder: Path, heart: Heart) -> list[Attendant]:
    """Who stands beside the loop, in the order in which they are asked."""
    attendants: list[Attendant] = [Pulse(heart, folder)]
    if settings.run.rehearse_crash:
        attendants.append(Rehearsal(folder, checkpoint_every=settings.checkpoint_every))
    return attendants


def _training_rows(job: TrainJob, settings: TrainSettings) -> list[Row]:
    """The rows of the training split that weigh anything and that the budget allows."""
    rows = choose_training_rows(read_rows(Path(job.dataset_folder), "train"), settings=settings)
    if not rows:
        raise EnvironmentLacks(
            "the training split is empty", fix="prepare more data", where=job.dataset_folder
        )
    return rows


def _once(job: TrainJob, compute: Callable[[], float | None], crew: "Crew") -> float | None:
    """A figure that a resumed run need not compute again."""
    path = Path(job.folder) / "loss_before"
    if not crew.tell(path.exists()):
        figure = repr(compute())
        if crew.rank == 0:
            write_whole(path, figure)
    text = crew.tell(path.read_text() if crew.rank == 0 else "")
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
    sys.exit(run_worker(TrainJob, lambda job: Path(job.folder), train, first=is_first()))
