"""The places of a federation: what data each has, the run of a round there, and its job.

In: an open project and the place as graft.yaml names it. Out: counts and hashes of its data (never rows), a
run that is planned for it, and a job of the fleet that trains it. Nothing here decides what a round does.
"""

import os
import threading
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from graftwork.fleet.places.hosts import HostsPlace
from graftwork.fleet.settings import FederatedPlace
from graftwork.model.probe import probe_device
from graftwork.model.shape import read_shape
from graftwork.pipeline.fleet_jobs import (
    POLL_SECONDS,
    FleetRequest,
    bring,
    choose_offer,
    collecting,
    find_open,
    get_job,
    start_run,
)
from graftwork.pipeline.fleet_places import open_place
from graftwork.pipeline.fleet_plans import PlacePlanner
from graftwork.pipeline.open_project import OpenProject, load_template
from graftwork.pipeline.run_identity import note_done, run_id_of
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.steps.plan import WorkAhead, count_work, plan_for
from graftwork.pipeline.train_all import with_train
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, Row
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Origin
from graftwork.records.plan import DeviceFacts, Plan
from graftwork.records.run import TrainOutcome
from graftwork.train.objectives.epochs import choose_rows
from graftwork.train.run_folder import OUTCOME

UNREACHABLE_SECONDS = 900.0
"""A place that has not answered for so long has failed the round; a restart takes less."""


class SiteData(Record):
    """What is known here of a place's data."""

    name: str
    place: str
    folder: str
    """At the place."""
    dataset: Dataset
    """Counts and hashes; without the names of its log files, its settings and its rows."""


@dataclass(frozen=True)
class SiteRun:
    """The run of one place in one round."""

    site: FederatedPlace
    data: SiteData
    work: OpenProject
    made: StepOutputs
    ahead: WorkAhead

    @property
    def plan(self) -> Plan:
        return self.made.get("plan", Plan)

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


class Sites(Protocol):
    """What a federation asks of its places."""

    def describe(self, site: FederatedPlace) -> SiteData: ...

    def plan(self, site: FederatedPlace, data: SiteData, *, start: Path | None, number: int) -> SiteRun: ...

    def start(self, run: SiteRun) -> None:
        """Start its job, or find the one that an earlier process started."""

    def poll(self, run: SiteRun) -> str | None:
        """None while it trains, an empty text once it is trained and fetched, else why it failed."""

    def wait(self) -> None:
        """Until it makes sense to ask again."""


class FleetSites:
    """Places of the fleet: this machine and hosts over SSH."""

    def __init__(self, work: OpenProject) -> None:
        self._work = work
        self._jobs: dict[str, str] = {}
        self._unreachable_since: dict[str, float] = {}
        """By run."""

    @cached_property
    def _device(self) -> DeviceFacts:
        return probe_device(threads=self._work.settings.train.threads)

    def describe(self, site: FederatedPlace) -> SiteData:
        place = open_place(self._work, site.place)
        assert isinstance(place, HostsPlace)
        path = site.data
        if site.place == "local":
            path = str((self._work.project.root / site.data).expanduser().resolve())
        found = place.describe_dataset(path, model=site.model)
        empty: dict[str, Any] = {"inputs": (), "kept_after": {}, "redactions": {}, "settings": {}}
        dataset = Dataset.model_validate({**found["dataset"], **empty})
        _require_same_base(self._work, dataset, site)
        return SiteData(name=site.label, place=site.place, folder=found["folder"], dataset=dataset)

    def plan(self, site: FederatedPlace, data: SiteData, *, start: Path | None, number: int) -> SiteRun:
        train, federated = self._work.settings.train, self._work.project.settings.federated
        assert federated is not None
        changes: dict[str, Any] = {
            "seed": train.seed + number - 1,
            "proximal": federated.proximal or train.proximal,
        }
        if start is not None:
            # Relative, so that a project that is moved has the same runs.
            changes["start_from"] = os.path.relpath(start, self._work.project.root)
        work = with_train(self._work, changes)
        prepared = PreparedData(folder=data.folder, dataset=data.dataset, folders={}, portions=())
        ahead = work_at(data.dataset, work)
        made = StepOutputs({"prepare": prepared})
        here = plan_for(work, made, self._device, ahead=ahead)
        made = StepOutputs({**made.outputs, "plan": here})
        offer = choose_offer(open_place(work, site.place), "")
        there = PlacePlanner(work, made, ahead=ahead).plan(offer)
        return SiteRun(site, data, work, StepOutputs({**made.outputs, "plan": there}), ahead)

    def start(self, run: SiteRun) -> None:
        job = find_open(run.work, run.run_id)
        if job is None:
            request = FleetRequest(run.site.place, base_there=run.site.base, dataset_there=run.data.folder)
            job = start_run(run.work, request, lambda _quote: True, made=run.made, ahead=run.ahead)
        self._jobs[run.run_id] = job.id

    def poll(self, run: SiteRun) -> str | None:
        found = collecting(run.work, run.site.place).reconcile(now=time.time())
        job = get_job(run.work, self._jobs[run.run_id])
        if job.is_open:
            return self._why_given_up(run, is_reachable=not found.unreachable)
        job = bring(run.work, job)
        if job.state != "done" or not run.is_trained:
            return job.reason or job.state
        note_done(run.work, run.run_id)
        return ""

    def _why_given_up(self, run: SiteRun, *, is_reachable: bool) -> str | None:
        """None while the place answers, or may answer again soon."""
        if is_reachable:
            self._unreachable_since.pop(run.run_id, None)
            return None
        now = time.monotonic()
        since = self._unreachable_since.setdefault(run.run_id, now)
        if now - since < UNREACHABLE_SECONDS:
            return None
        del self._unreachable_since[run.run_id]
        return f"{run.site.place} has not answered for {UNREACHABLE_SECONDS / 60:.0f} minutes"

    def wait(self) -> None:
        threading.Event().wait(POLL_SECONDS)


def _require_same_base(work: OpenProject, dataset: Dataset, site: FederatedPlace) -> None:
    template = load_template(work)
    mine = (work.base.revision, template.template_fingerprint, template.tokenizer_fingerprint)
    theirs = (dataset.base_fingerprint, dataset.template_fingerprint, dataset.tokenizer_fingerprint)
    if mine != theirs:
        raise UserMistake(
            f"the data of {site.label} was prepared for another base or chat template",
            why=f"it is for {dataset.base}; this project trains {work.base.name}",
            fix="run `graft data prepare` there with the same `base`",
            where=f"federated.places.{site.label}",
        )


def work_at(dataset: Dataset, work: OpenProject) -> WorkAhead:
    """The work of a run on rows of which only the lengths are known here."""
    settings, train = work.settings.train, dataset.splits.get("train")
    lengths = train.spread_lengths() if train is not None else ()
    if train is None or not lengths:
        raise UserMistake("the training split of the place is empty", fix="prepare more data there")
    chosen = [lengths[at] for at in choose_rows(len(lengths), most=settings.max_rows, seed=settings.seed)]
    validation = dataset.splits.get("validation")
    checked = min(settings.validation_rows, validation.rows) if validation is not None else 0
    tokens = round(checked * validation.tokens / validation.rows) if validation and validation.rows else 0
    rows = [_stand_in(at, length, train.trained_tokens / train.tokens) for at, length in enumerate(chosen)]
    return count_work(rows, settings, read_shape(Path(work.base.folder)), validation_tokens=tokens)


def _stand_in(number: int, length: int, replied: float) -> Row:
    """A row of this length that shares no beginning with another."""
    reply = min(max(round(length * replied), 1), max(length - 1, 1))
    return Row(
        id=str(number),
        origin=Origin(file="", line=number),
        messages=(),
        reply="",
        tokens=(number, *(0,) * (length - 1)),
        trained_from=length - reply,
    )
