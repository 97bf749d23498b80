"""The training process: `python -m graftwork.train.worker JOB_FILE`.

In: a TrainJob. Out: `adapter/` and `outcome.json` in the run's folder, and on the way a heartbeat,
a journal of steps, checkpoints. Runs with torch, transformers, safetensors and pydantic alone.
"""

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from graftwork.files.dataset_folder import read_rows
from graftwork.files.digest import folder_digest
from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.process.heartbeat import Heart
from graftwork.process.memory import peak_memory_gib
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.train.attend.attendant import Attendant
from graftwork.train.attend.pulse import Pulse
from graftwork.train.attend.rehearsal import Rehearsal
from graftwork.train.files import ADAPTER, ATTEMPTS, OUTCOME, WORDS
from graftwork.train.log import read_steps
from graftwork.train.order import choose_training_rows
from graftwork.train.settings import TrainSettings


def train(job: TrainJob) -> None:
    folder = Path(job.folder)
    outcome_file = folder / OUTCOME
    if outcome_file.exists():
        return
    attempts, words = Journal(folder / ATTEMPTS), Journal(folder / WORDS)
    attempts.append({"pid": os.getpid(), "at": time.time()}, durable=True)
    with Heart(folder) as heart:
        outcome = _train(job, heart, words, restarts=len(attempts.read()) - 1)
        write_whole(outcome_file, outcome.to_json())
        heart.beat("done", outcome.steps, outcome.steps)


def _train(job: TrainJob, heart: Heart, words: Journal, *, restarts: int) -> TrainOutcome:
    import torch

    from graftwork.model.adapter import AdapterShape, attach, save_adapter
    from graftwork.model.load import base_digest, load_base, use_threads
    from graftwork.train.engine import Engine
    from graftwork.train.loop import Loop
    from graftwork.train.loss import mean_loss

    folder, settings = Path(job.folder), job_settings(job)
    begun = time.perf_counter()
    heart.beat("loading the base model", 0, 1)
    torch.use_deterministic_algorithms(True)
    use_threads(settings.threads)
    device = job.plan.device.kind
    model = load_base(Path(job.base_folder), dtype=job.plan.dtype, device=device)
    before = base_digest(model)
    rows = _training_rows(job, settings)
    checks = read_rows(Path(job.dataset_folder), "validation")[: settings.validation_rows]
    heart.beat("loss before training", 0, 1)
    loss_before = _once(folder / "loss_before", lambda: mean_loss(model, checks, batch_rows=8, device=device))
    shape = AdapterShape.model_validate(job.plan.train["adapter"])
    engine = Engine(model, attach(model, shape, seed=settings.seed), settings=settings, pulse=heart.move)
    loop = Loop(
        engine,
        rows,
        settings=settings,
        folder=folder,
        attendants=_attendants(settings, folder, heart),
        on_word=lambda word: words.append({"word": word}),
        stop_asked=stop_asked.is_set,
    )
    loaded = time.perf_counter() - begun
    replay = loop.run()
    heart.beat("loss after training", loop.steps, loop.steps)
    loss_after = mean_loss(model, checks, batch_rows=8, device=device)
    after = base_digest(model)
    _require_unchanged(before, after, folder)
    adapter = folder / ADAPTER
    save_adapter(model, adapter, shape=shape, base=job.plan.base)
    steps = read_steps(folder)
    busy = sum(step.seconds for step in steps)
    return TrainOutcome(
        run_id=job.run_id,
        adapter_folder=str(adapter),
        adapter_hash=folder_digest(adapter),
        base_hash_before=before,
        base_hash_after=after,
        steps=loop.steps,
        epochs=settings.epochs,
        first_loss=steps[0].loss,
        final_loss=steps[-1].loss,
        validation_loss_before=loss_before,
        validation_loss_after=loss_after,
        seconds=busy,
        load_seconds=loaded,
        tokens_per_second=sum(step.tokens for step in steps) / busy,
        peak_memory_gib=peak_memory_gib(),
        trainable_parameters=engine.trainable,
        restarts=restarts,
        replayed_steps=replay.steps if replay else 0,
        replay_identical=replay.identical if replay else None,
        rows=len(rows),
        versions=_versions(),
        settings=job.plan.train,
    )


def job_settings(job: TrainJob) -> TrainSettings:
    """What is learned stands in the plan; how the run is kept stands beside it in the job."""
    return TrainSettings.model_validate({**job.plan.train["settings"], "run": job.run})


def _attendants(settings: TrainSettings, folder: Path, heart: Heart) -> list[Attendant]:
    """Who stands beside the loop, in the order in which they are asked."""
    attendants: list[Attendant] = [Pulse(heart)]
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


def _require_unchanged(before: str, after: str, folder: Path) -> None:
    """The base is what it was when training began."""
    if after != before:
        raise EnvironmentLacks(
            "the base weights changed during training",
            why="an adapter trained on shifting ground cannot be served",
            fix="this is a fault of the program: please report it with the run's folder",
            where=str(folder),
        )


def _once(path: Path, compute: Any) -> float | None:
    """A figure that a resumed run need not compute again."""
    if not path.exists():
        write_whole(path, repr(compute()))
    text = path.read_text()
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
    sys.exit(run_worker(TrainJob, lambda job: Path(job.folder), train))
