"""The training loop: steps, checkpoints, resume. It knows the order of things, and nothing else.

In: an engine, rows, settings, a folder, attendants. Out: a trained engine, a journal line a step.
Killed anywhere, it goes on from the last good checkpoint and does the same steps again, to the same
bytes. Does not know torch, where the rows came from or what becomes of the adapter.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graftwork.files.journal import Journal
from graftwork.records.dataset import Row
from graftwork.records.errors import AnswerIsNo, StoppedInOrder
from graftwork.records.run import TrainStep
from graftwork.train.attend.attendant import Attendant, FinishEarly
from graftwork.train.checkpoint import Checkpoint, latest_good, write_checkpoint
from graftwork.train.engine import Engine, Measured
from graftwork.train.files import CHECKPOINTS, STEPS
from graftwork.train.log import read_journal
from graftwork.train.order import plan_steps
from graftwork.train.schedule import learning_rate
from graftwork.train.settings import TrainSettings


class Diverged(AnswerIsNo):
    """The loss or the gradient is not a number any more."""


@dataclass(frozen=True)
class Replay:
    """Steps that were done twice because of a crash, and whether both times gave the same bytes."""

    steps: int
    identical: bool


class Loop:
    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Row],
        *,
        settings: TrainSettings,
        folder: Path,
        attendants: Sequence[Attendant] = (),
        on_word: Callable[[str], None] = lambda _word: None,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._rows = rows
        self._settings = settings
        self._folder = folder
        self._attendants = attendants
        self._on_word = on_word
        self._stop_asked = stop_asked
        self._batches = plan_steps(rows, settings=settings)
        self._journal = Journal(folder / STEPS)

    @property
    def steps(self) -> int:
        return len(self._batches)

    def run(self) -> Replay | None:
        """Go on from the last good checkpoint to the last step."""
        done = self._resume()
        earlier = {s.step: s for s in read_journal(self._folder) if s.step > done}
        same: list[bool] = []
        for attendant in self._attendants:
            attendant.begins(self._engine, done=done, steps=self.steps)
        try:
            for number in range(done + 1, self.steps + 1):
                self._stop_if_asked(number)
                step = self._step(number)
                if number in earlier:
                    same.append(step.weights == earlier[number].weights and step.loss == earlier[number].loss)
                self._finish_step(step)
        except FinishEarly as finish:
            self._on_word(finish.reason)
        finally:
            for attendant in self._attendants:
                attendant.ends()
        return Replay(steps=len(same), identical=all(same)) if same else None

    def _stop_if_asked(self, number: int) -> None:
        if self._stop_asked():
            self._save(number - 1)
            raise StoppedInOrder(
                f"stopped in good order after step {number - 1} of {self.steps}",
                fix="run the same command again: it goes on from here",
            )
        for attendant in self._attendants:
            attendant.before_step(number, self.steps)

    def _step(self, number: int) -> TrainStep:
        started = time.perf_counter()
        rows = [self._rows[at] for at in self._batches[number - 1]]
        measured = self._engine.backward(rows)
        self._require_finite(number, measured, rows)
        rate = learning_rate(
            number,
            steps=self.steps,
            highest=self._settings.learning_rate,
            warmup_share=self._settings.warmup_share,
        )
        verdicts = [attendant.judge(number, measured, rows) for attendant in self._attendants]
        if all(verdicts):
            self._engine.apply(rate)
        else:
            self._engine.forget()
        return TrainStep(
            step=number,
            loss=measured.loss,
            learning_rate=rate,
            gradient_norm=measured.gradient_norm,
            tokens=measured.tokens,
            trained_tokens=measured.trained_tokens,
            seconds=time.perf_counter() - started,
            weights=self._engine.digest(),
        )

    def _finish_step(self, step: TrainStep) -> None:
        """The journal first, then whoever looks, then the checkpoint that holds what they saw."""
        self._journal.append(step.model_dump())
        finish: FinishEarly | None = None
        for attendant in self._attendants:
            try:
                attendant.after_step(step, self.steps)
            except FinishEarly as early:
                finish = early
        last = finish is not None or step.step == self.steps
        if last or step.step % self._settings.checkpoint_every == 0:
            self._save(step.step)
        if finish is not None:
            raise finish

    def _require_finite(self, number: int, measured: Measured, rows: Sequence[Row]) -> None:
        if math.isfinite(measured.loss) and math.isfinite(measured.gradient_norm):
            return
        raise Diverged(
            f"the loss of step {number} is {measured.loss}, its gradient {measured.gradient_norm}",
            why="training on would destroy the adapter; the last good checkpoint is kept",
            fix="lower `train.learning_rate`, or look at the rows of this batch",
            where=", ".join(str(row.origin) for row in rows),
        )

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "steps": self.steps,
            "settings": self._settings.what_is_learned(),
            "attendants": {attendant.name: attendant.state() for attendant in self._attendants},
        }
        folder = write_checkpoint(
            self._folder / CHECKPOINTS,
            Checkpoint(step=step, tensors=self._engine.state(), state=state),
            keep=self._settings.keep_checkpoints,
        )
        for attendant in self._attendants:
            attendant.after_checkpoint(folder, step)

    def _resume(self) -> int:
        """The step that the last good checkpoint was made after; 0 where there is none."""
        checkpoint, complaints = latest_good(self._folder / CHECKPOINTS)
        for complaint in complaints:
            self._on_word(complaint)
        if checkpoint is None:
            return 0
        self._engine.restore(checkpoint.tensors)
        kept = checkpoint.state.get("attendants", {})
        for attendant in self._attendants:
            attendant.restore(kept.get(attendant.name, {}))
        self._on_word(f"resuming after step {checkpoint.step} of {self.steps}")
        return checkpoint.step
