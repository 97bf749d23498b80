"""The training loop: steps, checkpoints, resume.

Input: an engine, a batch source, callbacks, a folder. Output: a trained engine and a journal line for each
step. If killed anywhere, it resumes from the last good checkpoint and repeats the same steps to the same
bytes. Does not know torch, where the rows come from or what becomes of the adapter.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from graftwork.files.disk import write_atomic
from graftwork.process import clock
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentFailure, GracefulStop
from graftwork.records.run import TrainStep
from graftwork.train.callbacks import EarlyStop, TrainingCallback
from graftwork.train.checkpoints import Checkpoint, CheckpointStore, is_better, require_same_run
from graftwork.train.engine import StepResult, TrainingEngine, random_states, restore_random_states
from graftwork.train.objectives import BatchSource
from graftwork.train.objectives.epochs import learning_rate
from graftwork.train.run_folder import (
    CHECKPOINTS,
    COPIED_FILES,
    StepLog,
    find_replay,
    read_journal,
)
from graftwork.train.settings import TrainSettings

DIGEST_SHARE = 0.01
"""The weights are hashed at every step only if that takes less than this share of a step."""
LAST_LOSSES = 32


class StepInterrupted(GracefulStop):
    """Raised by the engine's progress function to abandon the computation. No weight has changed. Inside a
    step the loop catches it and saves a checkpoint. Elsewhere it ends the run: before the first step there is
    nothing to save, and an evaluation is repeated with the steps since the last checkpoint.
    """

    def __init__(self) -> None:
        super().__init__(
            "stopped cleanly between two steps",
            fix="run the same command again: it resumes from the last checkpoint",
        )


@dataclass(frozen=True)
class RunContext:
    """The settings and the folder of a run, and its communication with the process around it."""

    settings: TrainSettings
    folder: Path
    report: Callable[[str], None] = lambda _message: None
    stop_requested: Callable[[], bool] = lambda: False
    identity: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the dataset, the base model and the adapter's shape: a checkpoint belongs to them."""
    versions: Mapping[str, str] = field(default_factory=dict)


class TrainingLoop:
    def __init__(
        self,
        engine: TrainingEngine,
        source: BatchSource,
        context: RunContext,
        *,
        callbacks: Sequence[TrainingCallback] = (),
        store: CheckpointStore | None = None,
    ) -> None:
        settings, folder = context.settings, context.folder
        self._engine = engine
        self._strategy = engine.strategy
        self._settings = settings
        self._folder = folder
        self._callbacks = callbacks
        self._report = context.report
        self._stop_requested = context.stop_requested
        self._source = source
        self._log = StepLog(folder)
        self._store = store or CheckpointStore(folder / CHECKPOINTS, keep=settings.keep_checkpoints)
        self._identity = {
            **source.identity(),
            **context.identity,
            "settings": settings.what_is_learned(),
        }
        self._versions = dict(context.versions)
        self._losses: deque[float] = deque(maxlen=LAST_LOSSES)
        self._safe = 0
        self._number = 0
        self._digest_is_cheap = True
        self._skipped: list[int] = []
        """Steps that were skipped, whose rows are trained on again after the next good step."""
        self.finished = ""
        """Why the run stopped early, if it did."""
        self.kept_step: int | None = None
        """The step of the best evaluation, if the weights are those of that step and not of the last one."""

    @property
    def steps(self) -> int:
        return self._source.steps

    def run(self) -> tuple[int, bool] | None:
        """Train from the last good checkpoint to the last step; returns `find_replay` for all attempts."""

        def work_meanwhile() -> None:
            """While a GPU computes a step: write the journal line of the last one, and prepare the next."""
            self._flush_log()
            if self._number < self.steps and (rows := self._source.peek(self._number + 1)):
                self._engine.prefetch(rows)

        done = self._resume()
        self._engine.meanwhile = work_meanwhile
        for callback in self._callbacks:
            callback.on_train_begin(self._engine, done=done, steps=self.steps)
        try:
            # A stop request may have kept the run from repeating them before.
            self._repeat_skipped(done)
            for number in range(done + 1, self.steps + 1):
                if self.finished:
                    break
                stop = self._stopped_after(number - 1) if self._stop_requested() else None
                for callback in self._callbacks:
                    try:
                        callback.on_step_begin(number, self.steps)
                    except GracefulStop as stopped:
                        stop = stop or stopped
                # All processes stop after the same step.
                if self._strategy.any_process(stop is not None):
                    self._leave(number - 1, stop or self._stopped_after(number - 1))
                self._finish_step(self._step(number))
        finally:
            self._flush_log()
            try:
                for callback in self._callbacks:
                    callback.on_train_stopping()
                self._store.settle()
                self._report_saved()
            finally:
                for callback in self._callbacks:
                    callback.on_train_end()
        self._take_best()
        return find_replay(read_journal(self._folder))

    def _step(self, number: int) -> TrainStep:
        started = time.perf_counter()
        self._number = number
        repeated: tuple[int, ...] = ()
        before = random_states()
        try:
            rows = self._source.batch(number)
            measured = self._backward(rows)
        except StepInterrupted:
            # No weight has changed, and what was sampled is in the journal.
            self._engine.forget()
            restore_random_states(before)
            self._leave(number - 1, self._stopped_after(number - 1))
        rate = self._rate(number)
        verdicts = [callback.accept_gradient(number, measured, rows) for callback in self._callbacks]
        refused = self._strategy.any_process(not all(verdicts))
        self._update(rate, refused=refused)
        skipped = refused and not measured.is_finite
        if not refused:
            repeated = self._repeat_skipped(number)
        elif skipped and self._source.peek(number):
            self._skipped.append(number)
        weights = self._digest(number, time.perf_counter() - started)
        return TrainStep(
            step=number,
            loss=measured.loss,
            learning_rate=rate,
            gradient_norm=measured.gradient_norm,
            tokens=measured.tokens,
            trained_tokens=measured.trained_tokens,
            seconds=time.perf_counter() - started,
            weights=weights,
            at=time.time(),
            steady=clock.steady(),
            measures={**measured.measures, **self._source.measures(number)},
            skipped=skipped,
            repeated=repeated,
        )

    def _update(self, rate: float, *, refused: bool) -> None:
        if refused:
            self._engine.forget()
            return
        if self._engine.state_is_live:
            self._store.wait()
        self._engine.apply(rate)

    def _repeat_skipped(self, number: int) -> tuple[int, ...]:
        """Train once more on the rows of skipped steps, after the good step `number`; returns those that
        worked. A stop request leaves the rest for the start of the resumed run: the weights are the same
        then.
        """
        repeated: list[int] = []
        while self._skipped and self._skipped[-1] < number:
            before, rows = random_states(), self._source.peek(self._skipped[0])
            try:
                measured = self._backward(rows)
            except StepInterrupted:
                self._engine.forget()
                restore_random_states(before)
                break
            step = self._skipped.pop(0)
            failed = self._strategy.any_process(not measured.is_finite)
            self._update(self._rate(number), refused=failed)
            if failed:
                self._report(f"the rows of step {step} failed again and are left out of this epoch")
            else:
                repeated.append(step)
        return tuple(repeated)

    def _backward(self, rows: Sequence[Row]) -> StepResult:
        """The gradient; if it overflows in float16, it is recomputed with a smaller loss scale."""
        while (measured := self._engine.backward(rows)).overflowed:
            self._engine.forget()
        return measured

    def _digest(self, number: int, step_seconds: float) -> str:
        """A digest of the weights if a checkpoint or an evaluation is due, or if it costs little."""
        every = self._settings.eval.every
        evaluated = every is not None and number % every == 0
        if not (self._digest_is_cheap or self._is_due(number) or evaluated):
            return ""
        started_at = time.perf_counter()
        digest = self._engine.digest()
        self._digest_is_cheap = self._strategy.broadcast(
            time.perf_counter() - started_at < DIGEST_SHARE * step_seconds
        )
        return digest

    def _rate(self, number: int) -> float:
        return learning_rate(
            number,
            steps=self.steps,
            highest=self._settings.learning_rate,
            warmup_ratio=self._settings.warmup_ratio,
        )

    def _finish_step(self, step: TrainStep) -> None:
        """Write the journal, then call the callbacks, then save the checkpoint with their state."""
        self._log.add(step)
        if not self._engine.computes_apart:
            self._flush_log()
        self._losses.append(step.loss)
        for callback in self._callbacks:
            try:
                callback.on_step_end(step, self.steps)
            except EarlyStop as early:
                self.finished = early.reason
        score = next((s for callback in self._callbacks if (s := callback.score()) is not None), None)
        requested = [callback.wants_checkpoint(step) for callback in self._callbacks]
        self.finished = self._strategy.broadcast(self.finished)
        # The best model must still exist at the end, so it is saved at once.
        is_best = score is not None and self._settings.eval.keep_best and is_better(score, self._store.saved)
        due = self.finished or self._is_due(step.step) or any(requested) or is_best
        if self._strategy.broadcast(bool(due)):
            self._save(step.step, score)
        if self.finished:
            self._report(self.finished)
        self._report_saved()

    def _flush_log(self) -> None:
        problem = self._log.flush() if self._strategy.rank == 0 else None
        if problem:
            self._report(problem)

    def _is_due(self, number: int) -> bool:
        return number == self.steps or number % self._settings.checkpoint_every == 0

    def _save(self, step: int, score: float | None = None) -> None:
        """Hand the state to the store, which writes it while training continues."""
        self._flush_log()
        for callback in self._callbacks:
            callback.on_save_begin(step)
        state: dict[str, Any] = {
            "step": step,
            "identity": self._identity,
            "versions": self._versions,
            "rate": self._rate(step),
            "rows_seen": self._source.rows_before(step),
            "finished": self.finished,
            "skipped": list(self._skipped),
            "metrics": {"score": score, "losses": list(self._losses)},
            "callbacks": {callback.name: callback.state() for callback in self._callbacks},
            # The other small files that a run in a new place would miss.
            "side_files": {
                name: (self._folder / name).read_text()
                for name in COPIED_FILES
                if (self._folder / name).exists()
            },
        }
        self._store.save(Checkpoint(step, self._engine.state(), state, score, self._log.copy()))

    def _stopped_after(self, step: int) -> GracefulStop:
        return GracefulStop(
            f"stopped cleanly after step {step} of {self.steps}",
            fix="run the same command again: it resumes from here",
        )

    def _leave(self, step: int, stopped: GracefulStop) -> NoReturn:
        """Save a checkpoint if the last one is older, wait until it is written, and stop."""
        # The checkpoint of this step may still be in the making: wait for it instead of writing it twice.
        self._store.wait()
        self._report_saved()
        if self._strategy.broadcast(step > self._safe):
            self._save(step)
            self._store.settle()
            self._report_saved()
        if step > self._safe:
            raise GracefulStop(
                f"{stopped.what}, but that checkpoint could not be written",
                why=f"the last good one is from step {self._safe}",
                fix=stopped.fix,
                where=str(self._folder),
            ) from stopped
        raise stopped

    def _report_saved(self) -> None:
        """Report the messages and finished checkpoints of the store since the last call."""
        for message in self._store.messages():
            self._report(message)
        for path, step in self._store.written():
            self._safe = max(self._safe, step)
            for callback in self._callbacks:
                callback.on_save_end(path, step)

    def _resume(self) -> int:
        """The step of the last good checkpoint, which is restored; 0 without one."""
        checkpoint = self._seen_by_all(self._store.open)
        self._report_saved()
        if checkpoint is None:
            return 0
        state = checkpoint.state
        require_same_run(
            self._identity, state.get("identity", {}), step=checkpoint.step, where=str(self._folder)
        )
        self._engine.restore(checkpoint.tensors)
        if self._strategy.rank == 0:
            self._log.restore(checkpoint.journal)
            for name, content in state.get("side_files", {}).items():
                if name in COPIED_FILES and not (self._folder / name).exists():
                    write_atomic(self._folder / name, content)
        states = state.get("callbacks", {})
        for callback in self._callbacks:
            callback.restore(states.get(callback.name, {}))
        self._losses.extend(state.get("metrics", {}).get("losses", ()))
        self.finished = state.get("finished", "")
        self._skipped = list(state.get("skipped", ()))
        self._safe = checkpoint.step
        self._report(f"resuming after step {checkpoint.step} of {self.steps}")
        saved, mine = state.get("versions", {}), self._versions
        differing = [f"{name} {saved[name]}" for name in mine if saved.get(name, mine[name]) != mine[name]]
        if differing:
            self._report(
                f"the checkpoint was made with {', '.join(differing)}: the last bits may differ from here on"
            )
        return checkpoint.step

    def _seen_by_all(self, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """A checkpoint that every process has found: the first process searches, then the others."""
        mine = find() if self._strategy.rank == 0 else None
        shared_step = self._strategy.broadcast(mine.step if mine else None)
        if self._strategy.rank:
            mine = find()
        if self._strategy.any_process((mine.step if mine else None) != shared_step):
            raise EnvironmentFailure(
                "the processes of this run see different checkpoints",
                why="they work in folders that are not the same",
                fix="put the project on a file system that all machines share, under the same path",
                where=str(self._folder),
            )
        return mine

    def _take_best(self) -> None:
        """Restore the weights of the best evaluation if the last step is not the best."""
        if not self._settings.eval.keep_best:
            return
        best = self._seen_by_all(self._store.best)
        self._report_saved()
        last = max((saved.step for saved in self._store.saved), default=0)
        if best is not None and best.step != last:
            self._engine.restore_learned(best.tensors)
            self.kept_step = best.step
            self._report(
                f"the adapter is from step {best.step}, which had the best evaluation ({best.score:.4g})"
            )
