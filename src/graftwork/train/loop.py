"""The training loop: steps, checkpoints, resume. It knows the order of things, and nothing else.

In: an engine, rows, settings, a folder, attendants. Out: a trained engine, a journal line a step.
Killed anywhere, it goes on from the last good checkpoint and does the same steps again, to the same
bytes. Does not know torch, where the rows came from or what becomes of the adapter.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from graftwork.process import clock
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks, StoppedInOrder
from graftwork.records.run import TrainStep
from graftwork.train.callbacks import EarlyStop, TrainingCallback
from graftwork.train.checkpoints.checkpoint import Checkpoint, is_better, require_same_run, run_identity
from graftwork.train.checkpoints.store import CheckpointStore
from graftwork.train.engine import StepResult, TrainingEngine, random_states, restore_random_states
from graftwork.train.objectives.epochs import learning_rate, plan_steps
from graftwork.train.run_folder import (
    CHECKPOINTS,
    Replay,
    StepLog,
    copy_side_files,
    find_replay,
    read_journal,
    restore_side_files,
)
from graftwork.train.settings import TrainSettings

DIGEST_SHARE = 0.01
"""The weights are hashed at every step only where that takes less of a step than this."""
LAST_LOSSES = 32


class StepGivenUp(StoppedInOrder):
    """Raised by the engine's pulse: what is being computed is not to be finished. No weight has changed.

    Inside a step the loop catches it and saves. Elsewhere it ends the run as it is: before the first step
    there is nothing to save, and a look is taken when the steps since the last checkpoint come again.
    """

    def __init__(self) -> None:
        super().__init__(
            "stopped in good order between two steps",
            fix="run the same command again: it goes on from the last checkpoint",
        )


class Loop:
    def __init__(
        self,
        engine: TrainingEngine,
        rows: Sequence[Row],
        *,
        settings: TrainSettings,
        folder: Path,
        attendants: Sequence[TrainingCallback] = (),
        on_word: Callable[[str], None] = lambda _word: None,
        stop_asked: Callable[[], bool] = lambda: False,
        vault: CheckpointStore | None = None,
        made_for: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._engine = engine
        self._crew = engine.crew
        self._rows = rows
        self._settings = settings
        self._folder = folder
        self._attendants = attendants
        self._on_word = on_word
        self._stop_asked = stop_asked
        self._batches = plan_steps(rows, settings=settings)
        self._log = StepLog(folder)
        self._vault = vault or CheckpointStore(folder / CHECKPOINTS, keep=settings.keep_checkpoints)
        self._made_for = run_identity(rows, self._batches, settings=settings, more=made_for or {})
        self._versions = dict(versions or {})
        self._losses: deque[float] = deque(maxlen=LAST_LOSSES)
        self._safe = 0
        self._digest_is_cheap = True
        self.finished = ""
        """Why the run ended before its last step, if it did so well."""
        self.kept_step: int | None = None
        """The step of the best look, where the weights are those and not the last ones."""

    @property
    def steps(self) -> int:
        return len(self._batches)

    def run(self) -> Replay | None:
        """Go on from the last good checkpoint to the last step; what was done again, over all attempts."""
        done = self._resume()
        for attendant in self._attendants:
            attendant.begins(self._engine, done=done, steps=self.steps)
        try:
            for number in range(done + 1, self.steps + 1):
                if self.finished:
                    break
                self._stop_if_asked(number)
                self._finish_step(self._step(number))
        finally:
            try:
                for attendant in self._attendants:
                    attendant.before_settling()
                self._vault.settle()
                self._tell()
            finally:
                for attendant in self._attendants:
                    attendant.ends()
        self._take_best()
        return find_replay(read_journal(self._folder))

    def _stop_if_asked(self, number: int) -> None:
        wish = self._stopped_after(number - 1) if self._stop_asked() else None
        for attendant in self._attendants:
            try:
                attendant.before_step(number, self.steps)
            except StoppedInOrder as stopped:
                wish = wish or stopped
        # Who works together stops together, after the same step.
        if self._crew.any(wish is not None):
            self._leave(number - 1, wish or self._stopped_after(number - 1))

    def _step(self, number: int) -> TrainStep:
        started = time.perf_counter()
        rows = [self._rows[at] for at in self._batches[number - 1]]
        measured = self._measure(number, rows)
        rate = self._rate(number)
        verdicts = [attendant.judge(number, measured, rows) for attendant in self._attendants]
        if not self._crew.any(not all(verdicts)):
            self._engine.apply(rate)
        else:
            self._engine.forget()
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
        )

    def _measure(self, number: int, rows: Sequence[Row]) -> StepResult:
        """The gradient; if the step is given up on the way, everything is as it was before it."""
        before = random_states()
        try:
            return self._engine.backward(rows)
        except StepGivenUp:
            self._engine.forget()
            restore_random_states(before)
            self._leave(number - 1, self._stopped_after(number - 1))

    def _digest(self, number: int, step_seconds: float) -> str:
        """A digest of the weights where a checkpoint or a look is due; elsewhere if it costs nothing."""
        every = self._settings.examine.every
        looked_at = every is not None and number % every == 0
        if not (self._digest_is_cheap or self._is_due(number) or looked_at):
            return ""
        begun = time.perf_counter()
        digest = self._engine.digest()
        self._digest_is_cheap = self._crew.tell(time.perf_counter() - begun < DIGEST_SHARE * step_seconds)
        return digest

    def _rate(self, number: int) -> float:
        return learning_rate(
            number,
            steps=self.steps,
            highest=self._settings.learning_rate,
            warmup_share=self._settings.warmup_share,
        )

    def _finish_step(self, step: TrainStep) -> None:
        """The journal first, then whoever looks, then the checkpoint that holds what they saw."""
        word = self._log.append(step) if self._crew.rank == 0 else None
        if word:
            self._on_word(word)
        self._losses.append(step.loss)
        for attendant in self._attendants:
            try:
                attendant.after_step(step, self.steps)
            except EarlyStop as early:
                self.finished = early.reason
        score = next((s for one in self._attendants if (s := one.score()) is not None), None)
        wanted = [attendant.wants_checkpoint(step) for attendant in self._attendants]
        self.finished = self._crew.tell(self.finished)
        due = self.finished or self._is_due(step.step) or any(wanted) or self._is_best(score)
        if self._crew.tell(bool(due)):
            self._save(step.step, score)
        if self.finished:
            self._on_word(self.finished)
        self._tell()

    def _is_due(self, number: int) -> bool:
        return number == self.steps or number % self._settings.checkpoint_every == 0

    def _is_best(self, score: float | None) -> bool:
        """The model of the best look must be there at the end, so it is saved at once."""
        if score is None or not self._settings.examine.keep_best:
            return False
        return is_better(score, self._vault.saved)

    def _save(self, step: int, score: float | None = None) -> None:
        """Hand the state over to be written; the loop goes on meanwhile."""
        for attendant in self._attendants:
            attendant.before_checkpoint(step)
        state: dict[str, Any] = {
            "step": step,
            "made_for": self._made_for,
            "versions": self._versions,
            "rate": self._rate(step),
            "rows_seen": sum(len(batch) for batch in self._batches[:step]),
            "finished": self.finished,
            "metrics": {"score": score, "losses": list(self._losses)},
            "attendants": {attendant.name: attendant.state() for attendant in self._attendants},
            "beside": copy_side_files(self._folder),
        }
        self._vault.save(Checkpoint(step, self._engine.state(), state, score, self._log.copy()))

    def _stopped_after(self, step: int) -> StoppedInOrder:
        return StoppedInOrder(
            f"stopped in good order after step {step} of {self.steps}",
            fix="run the same command again: it goes on from here",
        )

    def _leave(self, step: int, stopped: StoppedInOrder) -> NoReturn:
        """Save what is not safe yet, see that it is, and only then go."""
        # The checkpoint of this very step may still be on its way: it is waited for, not written twice.
        self._vault.wait()
        self._tell()
        if self._crew.tell(step > self._safe):
            self._save(step)
            self._vault.settle()
            self._tell()
        if step > self._safe:
            raise StoppedInOrder(
                f"{stopped.what}, but that checkpoint could not be written",
                why=f"the last good one is that of step {self._safe}",
                fix=stopped.fix,
                where=str(self._folder),
            ) from stopped
        raise stopped

    def _tell(self) -> None:
        """Pass on what the vault did and said since the last step."""
        for word in self._vault.words():
            self._on_word(word)
        for path, step in self._vault.written():
            self._safe = max(self._safe, step)
            for attendant in self._attendants:
                attendant.after_checkpoint(path, step)

    def _resume(self) -> int:
        """The step that the last good checkpoint was made after; 0 where there is none."""
        checkpoint = self._seen_by_all(self._vault.open)
        self._tell()
        if checkpoint is None:
            return 0
        state = checkpoint.state
        require_same_run(
            self._made_for, state.get("made_for", {}), step=checkpoint.step, where=str(self._folder)
        )
        self._engine.restore(checkpoint.tensors)
        if self._crew.rank == 0:
            self._log.restore(checkpoint.journal)
            restore_side_files(self._folder, state.get("beside", {}))
        kept = state.get("attendants", {})
        for attendant in self._attendants:
            attendant.restore(kept.get(attendant.name, {}))
        self._losses.extend(state.get("metrics", {}).get("losses", ()))
        self.finished = state.get("finished", "")
        self._safe = checkpoint.step
        self._on_word(f"resuming after step {checkpoint.step} of {self.steps}")
        self._compare_versions(state.get("versions", {}))
        return checkpoint.step

    def _seen_by_all(self, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
        """A checkpoint that every process of the crew has found: the first looks, then the others."""
        mine = find() if self._crew.rank == 0 else None
        named = self._crew.tell(mine.step if mine else None)
        if self._crew.rank:
            mine = find()
        if self._crew.any((mine.step if mine else None) != named):
            raise EnvironmentLacks(
                "the processes of this run see different checkpoints",
                why="they work in folders that are not the same",
                fix="put the project on a file system that all machines share, under the same path",
                where=str(self._folder),
            )
        return mine

    def _compare_versions(self, held: dict[str, str]) -> None:
        mine = self._versions
        other = [f"{name} {held[name]}" for name in mine if held.get(name, mine[name]) != mine[name]]
        if other:
            self._on_word(
                f"the checkpoint was made with {', '.join(other)}: the last bits may differ from here on"
            )

    def _take_best(self) -> None:
        """The weights of the best look, where the last step is not the best."""
        if not self._settings.examine.keep_best:
            return
        best = self._seen_by_all(self._vault.best)
        self._tell()
        last = max((saved.step for saved in self._vault.saved), default=0)
        if best is not None and best.step != last:
            self._engine.restore_learned(best.tensors)
            self.kept_step = best.step
            self._on_word(
                f"the adapter is that of step {best.step}, whose look was the best ({best.score:.4g})"
            )
