"""A base that stays in memory from one run to the next, as it was when it was loaded.

Input: jobs, one after the other. Output: for each its base; loaded again only if it is a different one, or
where the last run changed it. The random state is as after loading in a process of its own. Does not know
what a run does with it.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftwork.files.disk import Journal, write_atomic
from graftwork.process import clock
from graftwork.process.clock import add_waited
from graftwork.process.machine import explain_exhaustion, is_exhaustion
from graftwork.process.worker import ERROR_FILE, hold_lock, stop_asked
from graftwork.records.errors import EnvironmentFailure, GracefulStop, GraftError, Interrupted, WorkerFailed
from graftwork.records.fleet import Moment
from graftwork.records.run import TrainBatch, TrainJob
from graftwork.text.redact import publish_text
from graftwork.train.run_folder import ATTEMPTS, SAVED, is_settled
from graftwork.train.worker import job_settings, load_for

CACHEABLE_METHODS = ("lora", "dora")
"""Methods that leave every weight of the base unchanged and in place. The others get their own base."""


class BaseCache:
    def __init__(self, load: Callable[[TrainJob], Any]) -> None:
        self._load = load
        self._key: tuple[str, ...] | None = None
        self._model: Any = None
        self._modules: dict[str, Any] = {}
        self._weights: dict[str, tuple[int, int, str]] = {}
        self._fresh: Any = None
        self._loaded: Any = None
        self.loads = 0

    def take(self, job: TrainJob) -> Any:
        """The base of this job, without anything that an earlier run attached to it."""
        from graftwork.train.engine import random_states, restore_random_states

        self._fresh = self._fresh or random_states()
        tuning = job.plan.tuning
        form: tuple[str, ...] = ("plain",)
        if tuning is not None:
            form = (tuning.form, tuning.head, str(tuning.turned), str(tuning.host_embedding))
        key = (job.base_folder, job.plan.dtype, job.plan.device.kind, job.plan.method, *form)
        if self._model is not None and key == self._key and self._put_back():
            restore_random_states(self._loaded)
            return self._model
        self.drop()
        restore_random_states(self._fresh)
        model = self._load(job)
        self.loads += 1
        if job.plan.method in CACHEABLE_METHODS:
            self._key, self._model, self._loaded = key, model, random_states()
            self._modules = dict(model.named_modules())
            self._weights = _weight_identities(model)
        return model

    def drop(self) -> None:
        """Release it: before another is loaded, or after a failed run."""
        self._key, self._model, self._modules, self._weights = None, None, {}, {}

    def _put_back(self) -> bool:
        """Restore every module, with no hooks left; False if that is impossible."""
        for path, module in self._modules.items():
            if path:
                parent, _, leaf = path.rpartition(".")
                setattr(self._modules[parent], leaf, module)
            # What was set on the module itself would hide the method of its class.
            module.__dict__.pop("forward", None)
            for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
                hooks.clear()
        self._model.requires_grad_(False)
        self._model.eval()
        return (
            dict(self._model.named_modules()) == self._modules
            and _weight_identities(self._model) == self._weights
        )


def _weight_identities(model: Any) -> dict[str, tuple[int, int, str]]:
    """Identities of the model's tensors: their bytes are verified by each run itself."""
    return {
        name: (id(weight), weight.data_ptr(), str(weight.dtype)) for name, weight in model.named_parameters()
    }


LoadBase = Callable[[TrainJob], Any]
RESUMES = "check the log; progress so far is kept, and the same command resumes from there"
TrainRun = Callable[[TrainJob, LoadBase, Any], None]
"""Trains one run on the base from the given function, with the given strategy or alone."""


def train_many(batch: TrainBatch, train: TrainRun) -> None:
    """Each run that is not settled yet, in order; those of a group together."""
    base = BaseCache(load_for)
    for position, job in enumerate(batch.jobs):
        if is_settled(job):
            continue
        if stop_asked.is_set():
            raise GracefulStop("stopped cleanly between two runs", fix="run the same command again")
        group = next((group for group in batch.side_by_side if position in group), (position,))
        unsettled = [batch.jobs[index] for index in group if not is_settled(batch.jobs[index])]
        started_at = time.perf_counter()
        try:
            if len(unsettled) > 1:
                from graftwork.train.side_by_side import SideBySide, train_side_by_side

                def work_on(job: TrainJob) -> Callable[[LoadBase, SideBySide], None]:
                    return lambda load, strategy: _train_one(
                        job, load, train, begun=batch.begun, strategy=strategy
                    )

                train_side_by_side(base.take(unsettled[0]), [work_on(run) for run in unsettled])
            else:
                _train_one(job, base.take, train, begun=batch.begun, on_failure=base.drop)
        finally:
            for waiting in unsettled:
                # Who shares the steps shares the time.
                add_waited(Path(waiting.folder), (time.perf_counter() - started_at) / len(unsettled))
            free_memory()


def free_memory() -> None:
    """Free the memory of a run for the next one, and lift its limit on a GPU."""
    import torch

    gc.collect()
    # Do not initialize a GPU that was not used.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


def _train_one(
    job: TrainJob,
    load: LoadBase,
    train: TrainRun,
    *,
    begun: Moment,
    strategy: Any = None,
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """Run to the end, or write the reason of the failure to its folder."""
    try:
        with hold_lock(Path(job.folder)):
            _require_patience(job, begun=begun)
            train(job, load, strategy)
    except (GracefulStop, Interrupted):
        raise
    except GraftError as error:
        on_failure()
        write_failure(job, error)
    except Exception as error:
        # A bug in one run must not keep the others from running.
        sys.excepthook(*sys.exc_info())
        on_failure()
        failure: GraftError = WorkerFailed(
            f"the training of run {job.run_id} failed: {type(error).__name__}",
            why=publish_text(str(error)).splitlines()[0] if str(error) else "it left no message",
            fix=RESUMES,
            where=job.folder,
        )
        write_failure(job, explain_exhaustion(error) if is_exhaustion(error) else failure)


def write_failure(job: TrainJob, error: GraftError) -> None:
    write_atomic(Path(job.folder) / ERROR_FILE, json.dumps(error.as_json()))


def _require_patience(job: TrainJob, *, begun: Moment) -> None:
    """A run that cannot start is skipped, and one that kills its process repeatedly does not keep the others
    from being trained.
    """
    if job.start_adapter is not None and not Path(job.start_adapter).is_dir():
        raise EnvironmentFailure(
            "the adapter that training should start from is not there",
            why="the run that makes it has failed or was removed",
            fix="fix that run first; `graft train --all` then continues with this one",
            where=job.start_adapter,
        )

    def when(line: dict[str, Any]) -> float:
        """In seconds after the command began."""
        return clock.seconds_between(begun, clock.read_moment(line))

    folder = Path(job.folder)
    attempts = [when(line) for line in Journal(folder / ATTEMPTS).read()]
    saved = [(when(line), int(line["step"])) for line in Journal(folder / SAVED).read()]
    crashes = consecutive_crashes(attempts, saved, begun=0.0)
    if crashes > job_settings(job).run.max_restarts:
        raise WorkerFailed(
            f"the training of run {job.run_id} was killed {crashes} time(s) without progress",
            why="most often the machine ran out of memory",
            fix=RESUMES,
            where=job.folder,
        )


def consecutive_crashes(
    attempts: Sequence[float], saved: Sequence[tuple[float, int]], *, begun: float
) -> int:
    """Crashes of this command's attempts since the run last made progress. Pure. Input: when each attempt
    began; when the checkpoint of which step was safe.
    """
    newest = max((step for _, step in saved), default=0)
    # Saved again, after a crash, a step is not progress.
    further = min((moment for moment, step in saved if step == newest), default=begun)
    since = [moment for moment in attempts if moment >= max(begun, further)]
    # The attempt that came further was killed after that, too.
    return len(since) + (
        1 if further > begun and any(begun <= moment < further for moment in attempts) else 0
    )


FASTER_ON = {"cpu": False, "cuda": False}
"""Devices where it is known to be faster: none yet. On a CPU two noisy repeats took 3-9 % less CPU time than
the plain path, but a single run uses the CPU's own step there. Not measured against that step, nor on a GPU.
"""

SMALL_TOKENS = 4096
"""Larger steps saturate a device on their own."""

MEMORY_SHARE = 0.9
"""The share of a device's memory that a group may plan to fill."""

BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2, "float16": 2}


def choose_side_by_side(jobs: Sequence[TrainJob]) -> tuple[tuple[int, ...], ...]:
    """Groups of at least two, each of runs that can and should share their steps."""
    groups: list[list[int]] = []
    for index, job in enumerate(jobs):
        if not _wanted(job):
            continue
        for group in groups:
            if _can_share([*(jobs[member] for member in group), job]):
                group.append(index)
                break
        else:
            groups.append([index])
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _wanted(job: TrainJob) -> bool:
    mode = job.run.get("side_by_side", "auto")
    is_single_process = job.crew.get("strategy", "single") == "single"
    # A GPU's own step has layers of its own, which know one adapter.
    if mode == "off" or not is_single_process or job.plan.tuning is not None:
        return False
    settings = job.plan.train["settings"]
    if settings["method"] not in ("lora", "dora") or settings.get("experts"):
        return False
    if settings.get("objective", "sft") != "sft":
        return False
    plain, tokens = job.plan.plain, job.plan.tokens.value / max(job.plan.steps.value, 1)
    # Those that share a step take all of their rows together.
    if plain is not None and (plain.checkpointed or plain.micro_rows < int(settings.get("batch_size", 1))):
        return False
    return mode == "on" or (FASTER_ON[job.plan.device.kind] and tokens <= SMALL_TOKENS)


def _can_share(jobs: Sequence[TrainJob]) -> bool:
    """Return whether they have one base, do not wait for each other, and fit the device's memory together."""
    first, last = jobs[0], jobs[-1]
    if (first.base_folder, first.plan.dtype) != (last.base_folder, last.plan.dtype):
        return False
    if any(last.start_adapter and last.start_adapter.startswith(job.folder) for job in jobs):
        return False
    base = last.plan.total_parameters.value * BYTES_PER_WEIGHT.get(last.plan.dtype, 4) / 2**30
    # The weights are there once; what each run needs besides them is there for each.
    needed = base + sum(max(job.plan.peak_memory_gib.high - base, 0.0) for job in jobs)
    return needed <= MEMORY_SHARE * last.plan.device.memory_gib
