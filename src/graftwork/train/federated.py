"""`graft train federated`: rounds of training at places whose data stays there; only adapters travel.

Input: an open project with `federated:`. Output: of each round who trained, who was left out and why, and the
merged adapter with its verdict: the average of the places' adapters, weighted by trained tokens, evaluated
and gated like any other. Of a place's data only counts and hashes are known here. Every part is found again
after a crash: trained runs by their outcome, running jobs in the ledger, finished rounds by their file.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from graftwork.data.project import PreparedData
from graftwork.evaluate.gate.project import note_rules
from graftwork.evaluate.project import Evaluated
from graftwork.files.disk import folder_digest, make_folder, write_atomic
from graftwork.fleet.jobs import (
    FleetRequest,
    RunSet,
    choose_offer,
    jobs_go_on,
)
from graftwork.fleet.places.hosts import HostsPlace
from graftwork.fleet.plans import PlacePlanner
from graftwork.fleet.project import open_place
from graftwork.fleet.settings import FederatedPlace, FederatedSettings
from graftwork.model.adapter_shape import WEIGHTS_FILE, AdapterShape
from graftwork.model.probe import probe_device
from graftwork.model.shape import read_shape
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.plan import WorkAhead, count_work, note_done, plan_for, run_id_of
from graftwork.pipeline.table import get_step, run_pipeline
from graftwork.process.worker import hold_lock
from graftwork.project.open_project import OpenProject, load_template, timestamp
from graftwork.project.reporter import Reporter
from graftwork.records.base import Record, fingerprint
from graftwork.records.dataset import Dataset, Row
from graftwork.records.errors import GracefulStop, GraftError, Interrupted, NegativeResult, UserError
from graftwork.records.interaction import Origin
from graftwork.records.plan import DeviceFacts, Plan
from graftwork.records.report import Decision, Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.export import MergeRequest, merge_adapters
from graftwork.train.all_models import with_train
from graftwork.train.objectives.epochs import choose_rows
from graftwork.train.run_folder import ADAPTER, OUTCOME, read_steps
from graftwork.train.settings import TrainSettings

UNREACHABLE_SECONDS = 900.0
"""A place that has not answered for this long has failed the round; a restart takes less."""


@dataclass(frozen=True)
class SiteRun:
    """The run of one place in one round."""

    site: FederatedPlace
    data: PreparedData
    """Its folder is at the place; counts and hashes, without the names of log files, settings and rows."""
    work: OpenProject
    outputs: StepOutputs
    ahead: WorkAhead

    @property
    def plan(self) -> Plan:
        return self.outputs.get("plan", Plan)

    @property
    def run_id(self) -> str:
        return run_id_of(self.plan)

    @property
    def folder(self) -> Path:
        return self.work.project.runs / self.run_id

    @property
    def is_trained(self) -> bool:
        return (self.folder / OUTCOME).exists()

    def outcome(self) -> TrainOutcome:
        return TrainOutcome.from_json((self.folder / OUTCOME).read_bytes())


class FleetSites:
    """The sites of a federation: this machine and hosts over SSH."""

    def __init__(self, work: OpenProject) -> None:
        self._work = work
        self.runs = RunSet(patience_seconds=UNREACHABLE_SECONDS)

    @cached_property
    def _device(self) -> DeviceFacts:
        return probe_device(threads=self._work.settings.train.threads)

    def describe(self, site: FederatedPlace) -> PreparedData:
        host = open_place(self._work, site.place)
        assert isinstance(host, HostsPlace)
        path = site.data
        if site.place == "local":
            path = str((self._work.project.root / site.data).expanduser().resolve())
        described = host.describe_dataset(path, model=site.model)
        empty: dict[str, Any] = {"inputs": (), "kept_after": {}, "redactions": {}, "settings": {}}
        dataset = Dataset.model_validate({**described["dataset"], **empty})
        template = load_template(self._work)
        mine = (self._work.base.revision, template.template_fingerprint, template.tokenizer_fingerprint)
        theirs = (dataset.base_fingerprint, dataset.template_fingerprint, dataset.tokenizer_fingerprint)
        if mine != theirs:
            raise UserError(
                f"the data of {site.label} was prepared for another base or chat template",
                why=f"it is for {dataset.base}; this project trains {self._work.base.name}",
                fix="run `graft data prepare` there with the same `base`",
                where=f"federated.places.{site.label}",
            )
        return PreparedData(folder=described["folder"], dataset=dataset, folders={}, portions=())

    def plan(self, site: FederatedPlace, data: PreparedData, *, start: Path | None, number: int) -> SiteRun:
        changes: dict[str, Any] = {"seed": self._work.settings.train.seed + number - 1}
        if start is not None:
            # Relative, so that a project that is moved has the same runs.
            changes["start_from"] = os.path.relpath(start, self._work.project.root)
        work = with_train(self._work, changes)
        ahead = work_at(data.dataset, work)
        outputs = StepOutputs({"prepare": data})
        local_plan = plan_for(work, outputs, self._device, ahead=ahead)
        outputs = StepOutputs({**outputs.outputs, "plan": local_plan})
        offer = choose_offer(open_place(work, site.place), "")
        site_plan = PlacePlanner(work, outputs, ahead=ahead).plan(offer)
        return SiteRun(site, data, work, StepOutputs({**outputs.outputs, "plan": site_plan}), ahead)

    def start(self, run: SiteRun) -> None:
        request = FleetRequest(run.site.place, base_there=run.site.base, dataset_there=run.data.folder)
        self.runs.start(run.site.label, run.work, request, run.outputs, ahead=run.ahead)


def work_at(dataset: Dataset, work: OpenProject) -> WorkAhead:
    """Return the work of a run of which only the lengths of rows are known here."""
    settings, train = work.settings.train, dataset.splits.get("train")
    lengths = train.spread_lengths() if train is not None else ()
    if train is None or not lengths:
        raise UserError("the training split of the place is empty", fix="prepare more data there")
    chosen_lengths = [
        lengths[index] for index in choose_rows(len(lengths), most=settings.max_rows, seed=settings.seed)
    ]
    validation = dataset.splits.get("validation")
    checked = min(settings.validation_rows, validation.rows) if validation is not None else 0
    tokens = round(checked * validation.tokens / validation.rows) if validation and validation.rows else 0
    trained, rows = train.trained_tokens / train.tokens, []
    for number, length in enumerate(chosen_lengths):
        reply = min(max(round(length * trained), 1), max(length - 1, 1))
        rows.append(
            # A row of this length that shares no beginning with another.
            Row(
                id=str(number),
                origin=Origin(file="", line=number),
                messages=(),
                reply="",
                tokens=(number, *(0,) * (length - 1)),
                trained_from=length - reply,
            )
        )
    return count_work(rows, settings, read_shape(Path(work.base.folder)), validation_tokens=tokens)


RETRIES = 1
"""Retries of a place per round."""


def train_round(
    sites: FleetSites, settings: FederatedSettings, reporter: Reporter, *, number: int, start: Path | None
) -> tuple[dict[str, SiteRun], dict[str, str]]:
    """Train until every place is done or has used up its attempts. Returns the runs, and why places are left
    out.
    """
    waiting, data, failures = list(settings.places), dict[str, PreparedData](), Counter[str]()
    training, trained, left_out = dict[str, SiteRun](), dict[str, SiteRun](), dict[str, str]()

    def fail(site: FederatedPlace, why: str) -> None:
        failures[site.label] += 1
        if failures[site.label] <= RETRIES:
            reporter.info(f"{site.label}: {why}; trying again")
            waiting.append(site)
        else:
            reporter.info(f"{site.label} is left out of the round: {why}")
            left_out[site.label] = why

    def begin(site: FederatedPlace) -> None:
        data[site.label] = sites.describe(site)
        hashes = {
            name: prepared.dataset.content_hash for name, prepared in data.items() if name != site.label
        }
        same = next(
            (name for name, content in hashes.items() if content == data[site.label].dataset.content_hash),
            None,
        )
        if same is not None:
            raise UserError(
                f"{same} and {site.label} have the same data",
                why="the same rows would be trained on twice and count twice",
                fix="specify each place's own data",
                where="federated.places",
            )
        run = sites.plan(site, data[site.label], start=start, number=number)
        if run.is_trained:
            trained[site.label] = run
        else:
            sites.start(run)
            training[site.label] = run

    with jobs_go_on():
        while waiting or training:
            due, waiting = waiting, []
            for site in due:
                try:
                    begin(site)
                except (Interrupted, GracefulStop, UserError):
                    raise
                except GraftError as error:
                    fail(site, error.what)
            for label, _, why in sites.runs.ended():
                run = training.pop(label)
                if why or not run.is_trained:
                    # A job of an earlier command may have been planned for another device.
                    fail(run.site, why or "its job trained another plan")
                else:
                    trained[label] = run
                    reporter.info(f"{label} has finished the round")
            if waiting or training:
                sites.runs.wait()
    return trained, left_out


def trained_tokens(run: SiteRun) -> int:
    """Tokens that the place's steps were trained on, as its journal counts them."""
    return sum(step.trained_tokens for step in read_steps(run.folder))


def merge_round(work: OpenProject, runs: Sequence[SiteRun]) -> TrainOutcome:
    """Average the adapters of a round and enter the result as a run. Existing results are not recomputed."""
    for run in runs:
        # `graft fleet fetch` or a killed process may have brought the files.
        note_done(run.work, run.run_id)
    parts, tokens = [run.outcome() for run in runs], [trained_tokens(run) for run in runs]
    shares = [count / sum(tokens) for count in tokens]
    run_id = fingerprint(["federated", [run.run_id for run in runs], tokens])[:12]
    folder = work.project.runs / run_id
    if (folder / OUTCOME).exists():
        return note_done(work, run_id)
    make_folder(folder)
    adapter = folder / ADAPTER
    if not adapter.exists():
        request = MergeRequest(
            tuple(f"run:{run.run_id}" for run in runs),
            adapter,
            weights=",".join(map(repr, shares)),
            shape=AdapterShape.model_validate(runs[0].plan.train["adapter"]),
        )
        merge_adapters(work, request)
    # What the places' runs come to together: losses by tokens, times and rows added up.
    outcome = parts[0].model_copy(
        update={
            "run_id": run_id,
            "adapter_folder": str(adapter),
            "adapter_hash": folder_digest(adapter),
            "steps": sum(part.steps for part in parts),
            "first_loss": _mean(shares, [part.first_loss for part in parts]),
            "final_loss": _mean(shares, [part.final_loss for part in parts]),
            "validation_loss_before": _mean(shares, [part.validation_loss_before for part in parts]),
            # Of each place's own adapter on its own rows: no place has all rows to measure the merged one on.
            "validation_loss_after": _mean(shares, [part.validation_loss_after for part in parts]),
            "seconds": sum(part.seconds for part in parts),
            "load_seconds": sum(part.load_seconds for part in parts),
            "rows": sum(part.rows for part in parts),
            "restarts": sum(part.restarts for part in parts),
            "residuals": (),
            "residual_parts": (),
            "drifts": (),
        }
    )
    if work.runs.get(run_id) is None:
        work.runs.create(
            run_id, folder=str(folder), plan=runs[0].plan.model_dump(mode="json"), when=timestamp()
        )
    note_rules(work, run_id, stage="trained")
    write_atomic(folder / OUTCOME, outcome.to_json())
    return note_done(work, run_id)


def _mean(shares: Sequence[float], values: Sequence[float | None]) -> float | None:
    weighted = [(share, value) for share, value in zip(shares, values, strict=True) if value is not None]
    return sum(s * v for s, v in weighted) / sum(s for s, _ in weighted) if weighted else None


def judge_round(work: OpenProject, outputs: StepOutputs, outcome: TrainOutcome) -> Verdict:
    """Evaluate the merged adapter on this project's held-out cases and run the gate. No step is recorded."""
    outputs = StepOutputs({**outputs.outputs, "train": outcome})
    with hold_lock(work.project.state / "pipeline"):
        evaluated = get_step("evaluate").do(work, outputs)
        assert isinstance(evaluated, Evaluated)
        verdict = get_step("gate").do(work, StepOutputs({**outputs.outputs, "evaluate": evaluated}))
    assert isinstance(verdict, Verdict)
    return verdict


FOLDER = "federated"


class PlaceResult(Record):
    """A place in a round."""

    name: str
    place: str
    run_id: str
    data: str
    """The hash of its dataset."""
    rows: int
    steps: int
    trained_tokens: int
    weight: float
    loss_before: float | None
    loss: float | None
    """Loss of its own adapter on its own validation rows; before: of the base."""
    seconds: float


class RoundResult(Record):
    """One finished round; written last."""

    number: int
    places: tuple[PlaceResult, ...]
    left_out: dict[str, str] = {}
    """Places that did not finish, with the reason."""
    run_id: str
    adapter: str
    adapter_hash: str
    decision: Decision | None = None
    reason: str = ""


class Federation(Record):
    """The results of all rounds."""

    model: str
    folder: str
    rounds: tuple[RoundResult, ...]
    of_rounds: int
    adapter: str
    release: str
    """The command that releases the last round's adapter; empty if its gate did not say deploy."""


class PlannedPlace(Record):
    """A place of a federation before it starts."""

    name: str
    place: str
    data: str
    rows: int = 0
    steps: int = 0
    """In one round."""
    minutes: float = 0.0
    """In one round."""
    why_not: str = ""


class FederationPlan(Record):
    """`--dry-run`: the schedule, and what travels."""

    model: str
    rounds: int
    done: int
    quorum: int
    proximal: float
    places: tuple[PlannedPlace, ...]
    adapter_mb: float
    """Size of one adapter; it is sent to each place and back in every round."""
    minutes: float
    """Time of all remaining rounds, with the places in parallel."""
    travels: tuple[str, ...]
    stays: tuple[str, ...]


def plan_federation(work: OpenProject) -> FederationPlan:
    """Ask every place for its data and plan the first round. Nothing is started."""
    return _Federated(work).plan()


def run_federation(work: OpenProject, *, again: bool = False) -> Federation:
    """Do the missing rounds. `again` begins a new federation with round 1."""
    outputs = run_pipeline(work, upto="prepare")
    return _Federated(work, again=again).run(outputs)


class _Federated:
    def __init__(self, work: OpenProject, *, again: bool = False) -> None:
        self._work, self._sites = work, FleetSites(work)
        self._settings = require_possible(work)
        identity = [
            work.model,
            work.base.revision,
            work.settings.train.what_is_learned(),
            self._settings.model_dump(mode="json", include={"places"}),
        ]
        name = fingerprint(identity)[:12]
        root = work.project.state / FOLDER
        turns = sorted(int(path.name.rpartition("-")[2]) for path in root.glob(f"{name}-*"))
        turn = (turns[-1] if turns else 1) + (again and bool(turns))
        self.folder = root / f"{name}-{turn}"

    def run(self, outputs: StepOutputs) -> Federation:
        make_folder(self.folder)
        with hold_lock(self.folder):
            rounds = []
            start: Path | None = None
            for number in range(1, self._settings.rounds + 1):
                done = self._read(number) or self._round(number, start, outputs)
                rounds.append(done)
                start = Path(done.adapter)
        last = rounds[-1]
        return Federation(
            model=self._work.model,
            folder=str(self.folder),
            rounds=tuple(rounds),
            of_rounds=self._settings.rounds,
            adapter=last.adapter,
            release=f"graft release import {last.adapter}" if last.decision == "deploy" else "",
        )

    def plan(self) -> FederationPlan:
        site_plans, megabytes = [], 0.0
        for site in self._settings.places:
            planned = PlannedPlace(name=site.label, place=site.place, data=site.data)
            try:
                data = self._sites.describe(site)
                run = self._sites.plan(site, data, start=None, number=1)
            except GraftError as error:
                site_plans.append(planned.model_copy(update={"why_not": error.what}))
                continue
            megabytes = run.plan.trainable_parameters.value * 4 / 1e6
            figures = {
                "rows": data.dataset.splits["train"].rows,
                "steps": round(run.plan.steps.value),
                "minutes": round(run.plan.minutes.value, 2),
            }
            site_plans.append(planned.model_copy(update=figures))
        done = sum(self._read(number) is not None for number in range(1, self._settings.rounds + 1))
        return FederationPlan(
            model=self._work.model,
            rounds=self._settings.rounds,
            done=done,
            quorum=self._settings.needed,
            proximal=self._work.settings.train.proximal,
            places=tuple(site_plans),
            adapter_mb=round(megabytes, 3),
            minutes=round(
                max((site_plan.minutes for site_plan in site_plans), default=0)
                * (self._settings.rounds - done),
                2,
            ),
            travels=(
                "to a place: the program, the settings of the run, the round's start adapter; the base, "
                "where the place does not have it",
                "from a place: counts, lengths and hashes of its dataset; the trained adapter, losses and "
                "times of its steps, its log; checkpoints of a run that failed",
            ),
            stays=("rows, logs, names of log files and settings of the place's dataset",),
        )

    def _round(self, number: int, start: Path | None, outputs: StepOutputs) -> RoundResult:
        self._work.reporter.started("train", f"round {number} of {self._settings.rounds}")
        trained, left_out = train_round(
            self._sites, self._settings, self._work.reporter, number=number, start=start
        )
        runs = [trained[site.label] for site in self._settings.places if site.label in trained]
        if len(runs) < self._settings.needed:
            why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise NegativeResult(
                f"round {number} has {len(runs)} of the {self._settings.needed} places that it needs",
                why=why,
                fix="run the same command again when they can train: what is trained is kept; or lower "
                "federated.quorum",
            )
        outcome = merge_round(self._work, runs)
        tokens = [trained_tokens(run) for run in runs]
        results = []
        for run, count in zip(runs, tokens, strict=True):
            part = run.outcome()
            results.append(
                PlaceResult(
                    name=run.site.label,
                    place=run.site.place,
                    run_id=run.run_id,
                    data=run.data.dataset.content_hash,
                    rows=part.rows,
                    steps=part.steps,
                    trained_tokens=count,
                    weight=round(count / sum(tokens), 6),
                    loss_before=part.validation_loss_before,
                    loss=part.validation_loss_after,
                    seconds=round(part.seconds, 3),
                )
            )
        done = RoundResult(
            number=number,
            places=tuple(results),
            left_out=left_out,
            run_id=outcome.run_id,
            adapter=outcome.adapter_folder,
            adapter_hash=outcome.adapter_hash,
        )
        if self._settings.evaluate:
            verdict = judge_round(self._work, outputs, outcome)
            done = done.model_copy(update={"decision": verdict.decision, "reason": verdict.reason})
        write_atomic(self.folder / f"round-{number}.json", done.to_json())
        return done

    def _read(self, number: int) -> RoundResult | None:
        """A round that is finished, and whose adapter is still there."""
        path = self.folder / f"round-{number}.json"
        if not path.exists():
            return None
        done = RoundResult.from_json(path.read_bytes())
        return done if (Path(done.adapter) / WEIGHTS_FILE).exists() else None


def require_possible(work: OpenProject) -> FederatedSettings:
    """Return the settings, if the project's runs can be federated."""
    settings = work.project.settings.federated
    if settings is None:
        raise UserError(
            "graft.yaml names no places that train together",
            fix="add `federated: {rounds: 3, places: [{name: north, place: local, data: FOLDER}, …]}`",
            where="federated",
        )
    why = why_impossible(work.settings.train)
    if why:
        raise UserError("these runs cannot be averaged", why=why, fix="change `train`", where="train")
    return settings


def why_impossible(train: TrainSettings) -> str:
    """Return why runs with these settings have no average that training can continue from; empty if they
    have.
    """
    if train.objective != "sft":
        return f"`objective: {train.objective}` writes rows and answers into the run's folder, which travels"
    if train.method not in ("lora", "qlora"):
        return f"`method: {train.method}` does not train plain LoRA factors"
    if train.modules or train.experts:
        return "`train.modules` and `train.experts` give layers of different shapes"
    if train.eval.every is not None and train.eval.metric != "loss":
        return f"`eval.metric: {train.eval.metric}` writes answers into the run's folder, which travels"
    if train.start_from == "main":
        return "`start_from: main` is this project's run; specify the folder of an adapter instead"
    return ""
