"""The training loop: steps, checkpoints, resume. One device, one process.

In: a loaded base, rows, resolved settings, a folder. Out: the adapter in the model, a journal line
a step. Killed anywhere, it goes on from the last good checkpoint and does the same steps again, to
the same bytes. Does not know where the rows came from or what becomes of the adapter.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graftwork.files.journal import Journal
from graftwork.model.adapter import AdapterShape, adapter_tensors, attach
from graftwork.model.load import tensors_digest
from graftwork.records.dataset import Row
from graftwork.records.errors import AnswerIsNo, StoppedInOrder
from graftwork.records.run import TrainStep
from graftwork.train.checkpoint import Checkpoint, latest_good, write_checkpoint
from graftwork.train.files import CHECKPOINTS, STEPS
from graftwork.train.log import read_journal
from graftwork.train.loss import Batch, summed_loss
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


@dataclass(frozen=True)
class Hooks:
    """What the loop tells the outside, and what it asks."""

    on_step: Callable[[TrainStep, int], None]
    on_word: Callable[[str], None]
    stop_asked: Callable[[], bool]
    before_step: Callable[[int, int], None]


class Loop:
    def __init__(
        self, model: Any, rows: Sequence[Row], *, settings: TrainSettings, shape: AdapterShape, folder: Path
    ) -> None:
        self._model = model
        self._rows = rows
        self._settings = settings
        self._folder = folder
        self._device = str(next(model.parameters()).device)
        self._parameters = attach(model, shape, seed=settings.seed)
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self._batches = plan_steps(rows, settings=settings)
        self._journal = Journal(folder / STEPS)

    @property
    def steps(self) -> int:
        return len(self._batches)

    @property
    def trainable(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters)

    def run(self, hooks: Hooks) -> Replay | None:
        """Go on from the last good checkpoint to the last step."""
        done = self._resume(hooks)
        earlier = {s.step: s for s in read_journal(self._folder) if s.step > done}
        same: list[bool] = []
        for number in range(done + 1, self.steps + 1):
            if hooks.stop_asked():
                self._save(number - 1)
                raise StoppedInOrder(
                    f"stopped in good order after step {number - 1} of {self.steps}",
                    fix="run the same command again: it goes on from here",
                )
            hooks.before_step(number, self.steps)
            step = self._step(number)
            if number in earlier:
                same.append(step.weights == earlier[number].weights and step.loss == earlier[number].loss)
            self._journal.append(step.model_dump())
            if number % self._settings.checkpoint_every == 0 or number == self.steps:
                self._save(number)
            hooks.on_step(step, self.steps)
        return Replay(steps=len(same), identical=all(same)) if same else None

    def _step(self, number: int) -> TrainStep:
        started = time.perf_counter()
        rows = [self._rows[at] for at in self._batches[number - 1]]
        batch = Batch(rows, device=self._device)
        rate = learning_rate(
            number,
            steps=self.steps,
            highest=self._settings.learning_rate,
            warmup_share=self._settings.warmup_share,
        )
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = summed_loss(self._model, batch) / batch.trained
        loss.backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_gradient_norm))
        value = float(loss.detach())
        self._require_finite(number, value, norm, rows)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return TrainStep(
            step=number,
            loss=value,
            learning_rate=rate,
            gradient_norm=norm,
            tokens=batch.count,
            trained_tokens=batch.trained,
            seconds=time.perf_counter() - started,
            weights=tensors_digest(adapter_tensors(self._model)),
        )

    def _require_finite(self, number: int, loss: float, norm: float, rows: Sequence[Row]) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        raise Diverged(
            f"the loss of step {number} is {loss}, its gradient {norm}",
            why="training on would destroy the adapter; the last good checkpoint is kept",
            fix="lower `train.learning_rate`, or look at the rows of this batch",
            where=", ".join(str(row.origin) for row in rows),
        )

    def _save(self, step: int) -> None:
        tensors = {f"adapter/{k}": v.clone() for k, v in adapter_tensors(self._model).items()}
        for place, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter)
            if state:
                for key in ("exp_avg", "exp_avg_sq", "step"):
                    tensors[f"optimizer/{place}/{key}"] = state[key].clone()
        tensors["random/torch"] = torch.get_rng_state()
        state_ = {"step": step, "steps": self.steps, "settings": self._settings.model_dump(mode="json")}
        write_checkpoint(
            self._folder / CHECKPOINTS,
            Checkpoint(step=step, tensors=tensors, state=state_),
            keep=self._settings.keep_checkpoints,
        )

    def _resume(self, hooks: Hooks) -> int:
        """The step that the last good checkpoint was made after; 0 where there is none."""
        checkpoint, complaints = latest_good(self._folder / CHECKPOINTS)
        for complaint in complaints:
            hooks.on_word(complaint)
        if checkpoint is None:
            return 0
        live = adapter_tensors(self._model)
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(checkpoint.tensors[f"adapter/{name}"])
        for place, parameter in enumerate(self._parameters):
            keys = {k: f"optimizer/{place}/{k}" for k in ("exp_avg", "exp_avg_sq", "step")}
            if keys["step"] in checkpoint.tensors:
                self._optimizer.state[parameter] = {
                    k: checkpoint.tensors[v].to(parameter.device if k != "step" else "cpu")
                    for k, v in keys.items()
                }
        torch.set_rng_state(checkpoint.tensors["random/torch"])
        hooks.on_word(f"resuming after step {checkpoint.step} of {self.steps}")
        return checkpoint.step
