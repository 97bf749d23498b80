"""`graft train sweep`: try learning rates, ranks and batches by successive halving on validation loss.

Input: an open project, the values to try and a budget. Output: every trial with its loss, and the best
settings. Each trial is a run in `.graft/runs`, so a killed sweep continues where it was. A trial that the
planner does not expect to end within the budget is not begun. Reads the training and validation splits only.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

from graftwork.data.project import PreparedData
from graftwork.files.config_text import read_config_text, set_values
from graftwork.files.dataset import read_rows
from graftwork.files.disk import Journal, make_folder, write_atomic
from graftwork.fleet.jobs import FleetRequest, choose_offer, require_done, train_there
from graftwork.fleet.plans import PlacePlanner
from graftwork.fleet.project import open_place
from graftwork.model.probe import probe_device
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.plan import note_done, plan_for, run_id_of, starts_from_main
from graftwork.pipeline.table import run_pipeline
from graftwork.process.worker import hold_lock
from graftwork.project.open_project import OpenProject
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import EnvironmentFailure, NegativeResult, OutOfMemory, UserError, WorkerFailed
from graftwork.records.fleet import FleetJob
from graftwork.records.hardware import Offer
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome
from graftwork.train.all_models import train_variant, with_train
from graftwork.train.objectives.epochs import choose_training_rows
from graftwork.train.run_folder import OUTCOME

KEEP_ONE_OF = 3
"""Keep one of this many trials of a rung; it continues with this many times the rows."""
FEWEST_TRIALS = 2


class SweepSettings(Record):
    """What a trial changes."""

    learning_rate: float
    rank: int
    batch_size: int

    def describe(self) -> str:
        return f"learning rate {self.learning_rate:g}, rank {self.rank}, batch {self.batch_size}"


class Rung(Record):
    """`trials` settings are trained on `rows` rows each."""

    trials: int
    rows: int


class SearchSpace(NamedTuple):
    learning_rates: tuple[float, ...]
    ranks: tuple[int, ...]
    batch_size: tuple[int, ...]


def default_space(now: SweepSettings) -> SearchSpace:
    """A third and three times the rate, half and twice the rank, half the batch."""
    return SearchSpace(
        # Two digits: more would pretend to a precision that a search has not.
        tuple(min(float(f"{now.learning_rate * factor:.2g}"), 1.0) for factor in (1 / 3, 1.0, 3.0)),
        tuple(dict.fromkeys((max(now.rank // 2, 1), now.rank, min(now.rank * 2, 512)))),
        tuple(dict.fromkeys((max(now.batch_size // 2, 1), now.batch_size))),
    )


def choose_trials(
    space: SearchSpace, now: SweepSettings, *, most: int, seed: int
) -> tuple[SweepSettings, ...]:
    """The present settings first, then as many others of the space, drawn by the seed."""
    every = [
        SweepSettings(learning_rate=rate, rank=rank, batch_size=rows) for rate, rank, rows in product(*space)
    ]
    alternatives = [settings for settings in dict.fromkeys(every) if settings != now]
    random.Random(f"{seed}/sweep").shuffle(alternatives)
    return (now, *alternatives[: max(most - 1, 0)])


def count_rungs(trials: int) -> tuple[int, ...]:
    """How many trials each rung has: all of them, a third, a ninth … down to one."""
    counts = [trials]
    while counts[-1] > 1:
        counts.append(math.ceil(counts[-1] / KEEP_ONE_OF))
    return tuple(counts)


def plan_rungs(
    trials: int, *, rows: int, least: int, budget: float, cost: Callable[[int], float]
) -> tuple[Rung, ...]:
    """The rungs within the budget; fewer trials if it is small, none if it is too small. `rows` is the number
    of a whole run, `least` the fewest meaningful, `cost` the price of a trial by its rows, in the unit of the
    budget.
    """
    for count in range(trials, FEWEST_TRIALS - 1, -1):
        counts = count_rungs(count)
        first = _largest_first(counts, rows=rows, least=least, budget=budget, cost=cost)
        if first is not None:
            return _join_whole(_rungs(counts, first, rows), rows)
    return ()


def _rungs(counts: Sequence[int], first: int, rows: int) -> tuple[Rung, ...]:
    return tuple(
        Rung(trials=count, rows=min(first * KEEP_ONE_OF**level, rows)) for level, count in enumerate(counts)
    )


def _join_whole(rungs: tuple[Rung, ...], rows: int) -> tuple[Rung, ...]:
    """Once trials see every row, another rung would train the same again."""
    whole = next((level for level, rung in enumerate(rungs) if rung.rows == rows), len(rungs) - 1)
    return rungs[: whole + 1]


def _largest_first(
    counts: Sequence[int], *, rows: int, least: int, budget: float, cost: Callable[[int], float]
) -> int | None:
    """The most rows of the first rung that the budget allows, by bisection; None if not even `least`."""

    def price(first: int) -> float:
        return sum(rung.trials * cost(rung.rows) for rung in _join_whole(_rungs(counts, first, rows), rows))

    low, high = min(least, rows), rows
    if price(low) > budget:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if price(middle) <= budget else (low, middle - 1)
    return low


def advance(losses: Sequence[tuple[SweepSettings, float]], count: int) -> tuple[SweepSettings, ...]:
    """The `count` best by loss; on a tie, those that were tried first."""
    return tuple(settings for settings, _ in sorted(losses, key=lambda pair: pair[1])[:count])


FOLDER = "sweeps"
SCHEDULE_FILE = "sweep.json"
TRIALS_FILE = "trials.jsonl"
LEAST_BATCHES = 2
"""A trial with fewer steps proves nothing."""
USABLE = 0.9
"""Share of a budget of minutes to plan for: plans are not exact."""


class SweepTrial(Record):
    """One setting at one rung."""

    settings: SweepSettings
    rung: int
    rows: int
    state: Literal["done", "failed", "not begun"]
    run_id: str = ""
    loss: float | None = None
    """On the validation rows, after training."""
    planned_minutes: float | None = None
    minutes: float = 0.0
    why: str = ""


class SweepSchedule(Record):
    """The plan of a sweep, stored so that it continues unchanged after a crash."""

    settings: tuple[SweepSettings, ...]
    rungs: tuple[Rung, ...]


class SweepResult(Record):
    model: str
    place: str
    device: str
    folder: str
    budget_minutes: float | None = None
    budget_steps: int | None = None
    rungs: tuple[Rung, ...]
    trials: tuple[SweepTrial, ...]
    now: SweepSettings
    """Values in graft.yaml."""
    best: SweepSettings | None
    """The best of the last rung that any trial finished."""
    changes: dict[str, float | int] = {}
    """The settings of `train` that differ from graft.yaml."""
    minutes: float
    written_to: str = ""


@dataclass(frozen=True)
class SweepRequest:
    minutes: float | None = None
    steps: int | None = None
    learning_rates: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    batch_size: tuple[int, ...] = ()
    trials: int = 9
    place: str = "here"
    confirmed: bool = False
    """Whether a place that costs money may be used."""


class _Here:
    def __init__(self, work: OpenProject, outputs: StepOutputs) -> None:
        self._work, self._made = work, outputs

    @cached_property
    def _device(self) -> Any:
        return probe_device(threads=self._work.settings.train.threads)

    def plan(self, variant: OpenProject) -> Plan:
        return plan_for(variant, self._made, self._device)

    def train(self, variant: OpenProject, plan: Plan) -> TrainOutcome:
        return train_variant(variant, StepOutputs({**self._made.outputs, "plan": plan}))


class _Elsewhere(_Here):
    """A place of the fleet: trials are jobs there, one after the other."""

    def __init__(self, work: OpenProject, outputs: StepOutputs, request: SweepRequest) -> None:
        super().__init__(work, outputs)
        self._place, self._confirmed = request.place, request.confirmed

    @cached_property
    def _offer(self) -> Offer:
        try:
            return choose_offer(open_place(self._work, self._place), "")
        except NegativeResult as no:
            # Of the place as it is now, not of a trial.
            raise EnvironmentFailure(no.what, why=no.why, fix=no.fix, where=self._place) from no

    def plan(self, variant: OpenProject) -> Plan:
        outputs = StepOutputs({**self._made.outputs, "plan": super().plan(variant)})
        return PlacePlanner(variant, outputs).plan(self._offer)

    def train(self, variant: OpenProject, plan: Plan) -> TrainOutcome:
        # The offer may be another one by now, and the plan with it: a job of the same settings is taken.
        offer = self._offer
        run_id = train_there(
            variant,
            StepOutputs({**self._made.outputs, "plan": plan}),
            FleetRequest(self._place, gpu=(offer.instance or offer.gpu) if offer.usd_per_hour else ""),
            confirm=lambda quote: self._confirmed or not quote.largest_usd,
            require=_require_trained,
        )
        return note_done(variant, run_id)


def _require_trained(variant: OpenProject, job: FleetJob) -> None:
    """As `require_done`. A machine that was taken away, or never came, does not count against the
    settings.
    """
    try:
        require_done(variant, job)
    except WorkerFailed as error:
        if job.state == "lost" or job.booted_at is None:
            fix = "run the same command again: the sweep resumes with this trial"
            raise EnvironmentFailure(error.what, why=error.why, fix=fix, where=job.place) from error
        raise


def run_sweep(work: OpenProject, request: SweepRequest) -> SweepResult:
    """Search until the last rung or the end of the budget."""
    if (request.minutes is None) == (request.steps is None):
        raise UserError(
            "a sweep needs one budget", fix="give --minutes or --steps, not both", where="--minutes"
        )
    if request.trials < FEWEST_TRIALS:
        raise UserError(
            "a sweep needs at least two trials",
            why="it compares trials with each other",
            fix="pass --trials 2 or more",
            where="--trials",
        )
    if work.settings.train.objective != "sft":
        raise UserError(
            f"a sweep cannot compare runs with `objective: {work.settings.train.objective}`",
            why="it compares validation losses, which only supervised runs have in common",
            fix="sweep the supervised run, and set the others manually",
        )
    outputs = run_pipeline(work, upto="prepare")
    if starts_from_main(work):
        run_pipeline(replace(work, asked_model=None), upto="train")
    machine: _Here = _Here(work, outputs) if request.place == "here" else _Elsewhere(work, outputs, request)
    return _Sweep(work, outputs, request, machine).run()


class _Sweep:
    def __init__(
        self, work: OpenProject, outputs: StepOutputs, request: SweepRequest, machine: _Here
    ) -> None:
        self._work, self._request, self._machine = work, request, machine
        train = work.settings.train
        self._now = SweepSettings(
            learning_rate=train.learning_rate, rank=train.rank, batch_size=train.batch_size
        )
        usual = default_space(self._now)
        self._space = SearchSpace(
            request.learning_rates or usual.learning_rates,
            request.ranks or usual.ranks,
            request.batch_size or usual.batch_size,
        )
        prepared = outputs.get("prepare", PreparedData)
        folder = Path(prepared.folder)
        self._rows = len(choose_training_rows(read_rows(folder, "train"), settings=train))
        validation = prepared.dataset.splits.get("validation")
        checked = min(validation.rows if validation else 0, train.validation_rows)
        if not self._rows or not checked:
            raise UserError(
                "a sweep needs training rows and validation rows",
                why=f"there are {self._rows} training rows and {checked} rows for the validation loss",
                fix="raise `data.validation` or `train.validation_rows`, or add logs",
            )
        identity = [
            work.model,
            work.base.revision,
            prepared.dataset.content_hash,
            train.what_is_learned(),
            list(self._space),
            [request.minutes, request.steps, request.trials, request.place],
        ]
        self.folder = work.project.state / FOLDER / fingerprint(identity)[:12]
        self._journal = Journal(self.folder / TRIALS_FILE)
        self._device = ""

    def run(self) -> SweepResult:
        make_folder(self.folder)
        with hold_lock(self.folder):
            schedule = self._schedule()
            done = {(trial.rung, trial.settings): trial for trial in self._read()}
            alive, best = schedule.settings, None
            for level, rung in enumerate(schedule.rungs):
                losses = []
                for settings in alive[: rung.trials]:
                    trial = done.get((level, settings))
                    if trial is None:
                        trial = self._try(settings, level, rung)
                        self._journal.append(trial.model_dump(mode="json"), durable=True)
                        done[level, settings] = trial
                    if trial.loss is not None:
                        losses.append((settings, trial.loss))
                if not losses:
                    break
                best = advance(losses, 1)[0]
                alive = (
                    advance(losses, schedule.rungs[level + 1].trials)
                    if level + 1 < len(schedule.rungs)
                    else ()
                )
        trials = tuple(done.values())
        train = self._work.settings.train.model_dump()
        best_changes = self._changes(best) if best is not None else {}
        return SweepResult(
            model=self._work.model,
            place=self._request.place,
            device=self._device,
            folder=str(self.folder),
            budget_minutes=self._request.minutes,
            budget_steps=self._request.steps,
            rungs=schedule.rungs,
            trials=trials,
            now=self._now,
            best=best,
            changes={key: value for key, value in best_changes.items() if value != train[key]},
            minutes=round(sum(trial.minutes for trial in trials), 3),
        )

    def _read(self) -> list[SweepTrial]:
        return [SweepTrial.model_validate(line) for line in self._journal.read()]

    def _schedule(self) -> SweepSchedule:
        """The schedule as first planned: the planner may know more by now."""
        path = self.folder / SCHEDULE_FILE
        if path.exists():
            return SweepSchedule.from_json(path.read_bytes())
        settings = choose_trials(
            self._space, self._now, most=self._request.trials, seed=self._work.settings.train.seed
        )
        for trial in settings:
            # Values that cannot be are refused before the first trial is trained.
            self._variant(trial, self._rows)
        least = LEAST_BATCHES * max(trial.batch_size for trial in settings)
        epochs, batch_size, fewest = (
            self._work.settings.train.epochs,
            self._now.batch_size,
            min(least, self._rows),
        )
        budget = float(self._request.steps or 0)

        def cost(rows: int) -> float:
            """The price of a trial by its rows: steps of the present batch, or minutes by the planner."""
            if self._request.minutes is None:
                return rows * epochs / batch_size
            return minutes_of_fewest + (rows - fewest) * minutes_per_row

        if self._request.minutes is not None:
            budget = self._request.minutes * USABLE
            minutes_of_fewest, minutes_of_all = (
                self._machine.plan(self._variant(self._now, rows)).minutes.value
                for rows in (fewest, self._rows)
            )
            minutes_per_row = (minutes_of_all - minutes_of_fewest) / max(self._rows - fewest, 1)
        rungs = plan_rungs(len(settings), rows=self._rows, least=least, budget=budget, cost=cost)
        if not rungs:
            raise NegativeResult(
                "the budget is too small for a sweep",
                why=f"{FEWEST_TRIALS} trials of {least} rows, and one of them again on more, take longer",
                fix="allow more minutes or steps, or sweep smaller batches",
                where="--minutes" if self._request.minutes is not None else "--steps",
            )
        schedule = SweepSchedule(settings=settings[: rungs[0].trials], rungs=rungs)
        write_atomic(path, schedule.to_json())
        return schedule

    def _try(self, settings: SweepSettings, level: int, rung: Rung) -> SweepTrial:
        """Train it, unless the planner expects it to exceed the budget."""
        variant = self._variant(settings, rung.rows)
        trial = SweepTrial(settings=settings, rung=level, rows=rung.rows, state="not begun")
        try:
            plan = self._machine.plan(variant)
        except NegativeResult as no:
            return trial.model_copy(update={"why": f"{no.what}: {no.why}"})
        self._device = plan.device.name
        planned = plan.minutes.value
        trial = trial.model_copy(update={"run_id": run_id_of(plan), "planned_minutes": round(planned, 3)})
        if self._request.minutes is not None:
            minutes_left = self._request.minutes - sum(done.minutes for done in self._read())
            if planned > minutes_left:
                why = f"would take {planned:.1f} of {max(minutes_left, 0):.1f} minutes that are left"
                return trial.model_copy(update={"why": why})
        self._work.reporter.info(f"rung {level + 1}, {rung.rows} rows: {settings.describe()}")
        started_at = time.perf_counter()
        trained_before = (variant.project.runs / run_id_of(plan) / OUTCOME).exists()
        try:
            outcome = self._machine.train(variant, plan)
        except (WorkerFailed, OutOfMemory) as error:
            # Any other error says nothing of these settings: the same command tries them again.
            minutes = (time.perf_counter() - started_at) / 60
            return trial.model_copy(update={"state": "failed", "why": error.what, "minutes": minutes})
        waited = time.perf_counter() - started_at
        # What was killed before counts as well; a run that was there before the sweep costs nothing.
        minutes = 0.0 if trained_before else max(waited, outcome.seconds + outcome.load_seconds) / 60
        trial = trial.model_copy(update={"run_id": outcome.run_id, "minutes": round(minutes, 3)})
        loss = outcome.validation_loss_after
        if loss is None or not math.isfinite(loss):
            return trial.model_copy(update={"state": "failed", "why": "it has no validation loss"})
        return trial.model_copy(update={"state": "done", "loss": loss})

    def _variant(self, settings: SweepSettings, rows: int) -> OpenProject:
        # A trial on all rows is the run that graft.yaml would give with its settings.
        most = self._work.settings.train.max_rows if rows == self._rows else rows
        return with_train(self._work, {**self._changes(settings), "max_rows": most})

    def _changes(self, settings: SweepSettings) -> dict[str, float | int]:
        """Return the changes to `train`. Alpha follows the rank, so the adapter keeps its strength."""
        train = self._work.settings.train
        alpha = train.alpha if train.use_rslora else train.alpha * settings.rank / train.rank
        return {**settings.model_dump(), "alpha": alpha}


def write_best(work: OpenProject, result: SweepResult) -> SweepResult:
    """Set the best settings in graft.yaml; its comments and order are preserved."""
    if not result.changes:
        return result
    path, where, settings = work.project.file, str(work.project.file), work.project.settings
    model = settings.models.get(work.model)
    overrides = model.train.model_dump() if model is not None else {}
    text = read_config_text(path)
    for key, value in result.changes.items():
        # Where graft.yaml sets it for this model: for all models, or under the model itself.
        for_all = work.model == settings.main_model and key not in overrides
        section = ("train",) if for_all else ("models", work.model, "train")
        text = set_values(text, section, {key: value}, where=where)
    write_atomic(path, text)
    return result.model_copy(update={"written_to": str(path)})
