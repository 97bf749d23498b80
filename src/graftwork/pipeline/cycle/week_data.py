"""The data of a followed week: all its sessions train and judge what its first session found.

In: an open project and a week. Out: the dataset and the plan of each model, made at the first session of the
week and kept until the next week. Logs and settings of training that change meanwhile count from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.data import log_hashes
from graftwork.pipeline.table import get_step, run_pipeline
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder

BEFORE_TRAINING = ("audit", "prepare", "plan")
LOGS = "logs"


@dataclass(frozen=True)
class WeekData:
    work: OpenProject
    start: datetime
    models: Sequence[str]
    """Those with a session in this week; their data are taken at the same time."""
    busy: frozenset[str] = frozenset()
    """Models with a session that has not ended: it may have begun in the week before."""

    def outputs_of(self, model: str) -> StepOutputs:
        """What comes before training, as this week has it."""
        kept = self._read(model)
        if kept is None:
            self._take(model)
            kept = self._read(model)
        # Data whose files were deleted are made again.
        return kept if kept is not None else self._make(model)

    def report_changes(self) -> None:
        """Once for each change of the logs."""
        kept, now = self.work.ledger.get(_name(LOGS)), log_hashes(self.work)
        if kept is None or kept.output is None or kept.output.get("seen") == fingerprint(now):
            return
        if kept.output.get("taken") != fingerprint(now):
            self.work.reporter.info(
                "the logs have changed: this week continues with the data that it began with"
            )
        self._keep_logs(taken=str(kept.output.get("taken")), seen=fingerprint(now))

    def _take(self, model: str) -> None:
        logs = fingerprint(log_hashes(self.work))
        self._keep_logs(taken=logs, seen=logs)
        for name in dict.fromkeys((self.work.settings.main_model, model, *self.models)):
            if name in self.busy and self._read(name) is not None:
                continue
            try:
                made = self._make(name)
            except (Interrupted, StoppedInOrder):
                raise
            except GraftError:
                if name == model:
                    raise
                continue  # its own first session says what is wrong
            for step in BEFORE_TRAINING:
                self._keep(_name(step, name), made.outputs[step].model_dump(mode="json"))

    def _make(self, model: str) -> StepOutputs:
        # Nothing is trained here on the way: a model that starts from another waits for its adapter.
        made = [
            run_pipeline(self._of(model), upto=name, may_do=BEFORE_TRAINING) for name in ("audit", "plan")
        ]
        return StepOutputs({**made[0].outputs, **made[1].outputs})

    def _read(self, model: str) -> StepOutputs | None:
        found: dict[str, Record] = {}
        for name in BEFORE_TRAINING:
            step, entry = get_step(name), self.work.ledger.get(_name(name, model))
            if entry is None or (entry.fingerprint != self.start.isoformat() and model not in self.busy):
                return None
            found[name] = step.makes.model_validate(entry.output)
            if not step.still_there(self._of(model), found[name]):
                return None
        return StepOutputs(found)

    def _keep_logs(self, *, taken: str, seen: str) -> None:
        self._keep(_name(LOGS), {"taken": taken, "seen": seen})

    def _keep(self, name: str, output: dict[str, object]) -> None:
        self.work.ledger.put(
            name, fingerprint=self.start.isoformat(), output=output, finished_at=timestamp(), seconds=0.0
        )

    def _of(self, model: str) -> OpenProject:
        return replace(self.work, asked_model=None if model == self.work.settings.main_model else model)


def _name(step: str, model: str = "") -> str:
    return f"week.{step}@{model}" if model else f"week.{step}"
