"""This project's run on the machine of an offer: its plan there, and its bundle.

Input: an open project with its dataset, offers of places. Output: plans for the GPUs of these places; a
bundle in `.graft/fleet/bundles` with the newest good checkpoint of the run. Starts nothing, and takes nothing
secret along.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graftwork.data.project import PreparedData
from graftwork.files.remote import open_url
from graftwork.fleet.bundle import TRAVELING_SPLITS, BundleParts, build_bundle
from graftwork.fleet.project import catalog_name
from graftwork.grading.checks import GradeCheck
from graftwork.model.base import EMBEDDED, BaseFolder
from graftwork.model.hub import parse_hub_name
from graftwork.model.probe import describe_device
from graftwork.model.shape import read_shape
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.plan import WorkAhead, measure_work, plan_for, plan_identity
from graftwork.pipeline.steps.train import enter_run, make_job
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.catalog.prices import list_places as list_terms
from graftwork.project.open_project import OpenProject, name_entry, timestamp
from graftwork.records.base import fingerprint, hide_login
from graftwork.records.errors import Corrupted, EnvironmentFailure, NegativeResult, UserError
from graftwork.records.fleet import Bundle, BundleBase
from graftwork.records.hardware import Offer, PlaceTerms
from graftwork.records.plan import DeviceFacts, Plan
from graftwork.train.checkpoints import list_saved, pass_mirrors, step_name, verify_checkpoint
from graftwork.train.run_folder import CHECKPOINTS
from graftwork.train.settings import TrainSettings


@dataclass
class PlacePlanner:
    """Plans of one run for several machines; each kind of GPU is planned once."""

    work: OpenProject
    outputs: StepOutputs
    ahead: WorkAhead | None = None
    """Work of the run; None: counted in the rows, when needed."""
    _known: dict[str, Plan | NegativeResult] = field(default_factory=dict)

    @property
    def here(self) -> Plan:
        return self.outputs.get("plan", Plan)

    def plan(self, offer: Offer) -> Plan:
        """The plan for the GPU of the offer; for a machine without one, and for this one, that of here.

        Raises NegativeResult if the run does not fit there.
        """
        device = None if offer.place == "local" else self._device(offer)
        if device is None:
            return self.here
        if device.name not in self._known:
            if self.ahead is None:
                shape = read_shape(Path(self.work.base.folder))
                self.ahead = measure_work(self.work, self.outputs.get("prepare", PreparedData), shape)
            try:
                self._known[device.name] = plan_for(self.work, self.outputs, device, ahead=self.ahead)
            except NegativeResult as no:
                self._known[device.name] = no
        plan = self._known[device.name]
        if isinstance(plan, NegativeResult):
            raise plan
        return plan

    def _device(self, offer: Offer) -> DeviceFacts | None:
        device = self.here.device
        if not offer.gpu:
            return None if device.kind == "cpu" else describe_device(threads=self.work.settings.train.threads)
        with suppress(UserError):
            gpu = find_gpu(offer.gpu)
            return DeviceFacts(
                kind="cuda",
                name=gpu.name,
                memory_gib=gpu.memory_gib,
                threads=int(offer.vcpus or device.threads),
                capability=gpu.capability,
            )
        # A GPU that the catalog does not know.
        return None

    def knows(self, offer: Offer) -> bool:
        """Whether the plan is for the offered machine, or, for lack of facts, for this one."""
        return offer.place == "local" or not offer.gpu or self._device(offer) is not None


SETUP_MINUTES = 5.0


def terms_of(place_name: str) -> PlaceTerms | None:
    """What the catalog knows about a place."""
    kind = place_name.partition(":")[0]
    return next((terms for terms in list_terms() if terms.name == catalog_name(kind)), None)


def setup_minutes(place_name: str) -> float:
    """From the order to the first step, as the catalog has it; none for this machine."""
    terms = terms_of(place_name)
    return SETUP_MINUTES if terms is None else terms.setup_minutes


def storage_price(place_name: str) -> float | None:
    """Price of a GiB-month of a volume that outlives the machine; None if there is none, or none is known."""
    terms = terms_of(place_name)
    return terms.storage_usd_gib_month or None if terms is not None else None


def adopt_plan(work: OpenProject, plan: Plan) -> None:
    """Use the plan of a run that was trained at a place for this project's plan step.

    Without it the next command would train again here, where the plan is different.
    """
    for model in work.settings.all_models:
        name = name_entry(work, "plan", model=model)
        entry = work.ledger.get(name)
        if entry is None:
            continue
        stored = Plan.model_validate(entry.output)
        if plan_identity(stored) == plan_identity(plan) or not is_same_run(stored, plan):
            continue
        adopted = replace(entry, output=plan.model_dump(mode="json"), finished_at=timestamp())
        # Another process may have planned again meanwhile: its plan is the newer one.
        work.ledger.put_if(adopted, lambda known, name=name, entry=entry: known.get(name) == entry)  # type: ignore[misc]


def is_same_run(plan: Plan, earlier: Plan) -> bool:
    """Return whether two plans train the same thing and differ only in what the device decides."""

    return _asked(plan) == _asked(earlier)


def identify_training(plan: Plan) -> str:
    """The same for all plans that train the same thing."""
    return fingerprint(list(_asked(plan)))[:16]


def _asked(plan: Plan) -> tuple[str, str, dict[str, Any]]:
    learned = {key: value for key, value in plan.train.items() if key != "weights"}
    return plan.base_fingerprint, plan.dataset_hash, learned


MODULE = "graftwork.train.worker_process"


@dataclass(frozen=True)
class BundleOptions:
    """Where a place finds files that need not travel, and the limits of the job."""

    base_there: str = ""
    """The folder of the base at the place."""
    base_travels: bool = True
    """Whether a base that is a folder here is copied into the bundle."""
    dataset_there: str = ""
    seconds: float | None = None
    max_usd: float | None = None


def pack_run(work: OpenProject, outputs: StepOutputs, options: BundleOptions) -> tuple[Path, Bundle]:
    """Write the bundle of this model's run to the returned folder, and enter the run in the store."""
    job = make_job(work, outputs)
    enter_run(work, job)
    mirror = _mirror(work)
    base = describe_base(work.weights, options)
    body: dict[str, Any] = json.loads(job.to_json())
    body |= {"folder": "", "base_folder": "", "dataset_folder": "", "start_adapter": None}
    body |= {"deadline": None, "deadline_from": None}
    body["run"] |= {"mirror": hide_login(mirror) if mirror else None, "deadline_minutes": None}
    parts = BundleParts(
        run_id=job.run_id,
        module=MODULE,
        job=body,
        base=base,
        base_folder=Path(work.weights.folder) if base.kind == "bundled" else None,
        dataset_folder=Path(job.dataset_folder),
        dataset_there=options.dataset_there,
        splits=traveling_splits(work.settings.train),
        start_adapter=Path(job.start_adapter) if job.start_adapter else None,
        checkpoint=newest_checkpoint(Path(job.folder)),
        seconds=options.seconds,
        max_usd=options.max_usd,
        mirror=mirror,
    )
    return build_bundle(parts, work.project.state / "fleet" / "bundles")


def traveling_splits(train: TrainSettings) -> tuple[str, ...]:
    """The splits that a run reads where it trains. Pure."""
    rollouts = train.rollouts
    prompts = train.objective == "grpo" and rollouts.asks_rows
    return tuple(dict.fromkeys((*TRAVELING_SPLITS, rollouts.source) if prompts else TRAVELING_SPLITS))


def find_unpacked(train: TrainSettings, checks: Sequence[GradeCheck] = ()) -> list[str]:
    """The settings of a run that name files which no bundle holds. Pure."""
    if train.objective != "grpo":
        return []
    metrics = {check.name: check.metric for check in checks}
    own_metrics = [
        f"train.rewards: {reward.metric}"
        for reward in train.rewards
        if ".py:" in metrics.get(reward.metric, reward.metric)
    ]
    unpacked = ["train.rollouts.environment"] if train.rollouts.environment is not None else []
    if train.rollouts.taskset is not None:
        unpacked.append("train.rollouts.taskset")
    elif not train.rollouts.asks_rows:
        unpacked.append(f"train.rollouts.source: {train.rollouts.source}")
    if train.eval.source is not None:
        unpacked.append(f"train.eval.source: {train.eval.source}")
    return [*unpacked, *own_metrics]


def require_packable(work: OpenProject) -> None:
    """Before anything is paid: check that the run needs no file of the project that stays here."""
    settings = work.settings
    if unpacked := find_unpacked(settings.train, settings.evaluate.checks):
        raise UserError(
            "this run needs files of the project that are not sent along",
            why=f"{', '.join(unpacked)}: a bundle holds base, dataset and checkpoint only",
            fix="train it on this machine with `graft train`, or use built-in rewards and the rl split",
            where=unpacked[0].partition(":")[0],
        )


def require_mirror(work: OpenProject) -> None:
    """Before anything is paid: check that the address of the mirror is valid. No request is sent."""
    if (mirror := _mirror(work)) is None:
        return
    setting = "fleet.mirror" if work.settings.fleet.mirror else "train.run.mirror"
    # A package that is missing here may be there.
    with suppress(EnvironmentFailure):
        open_url(mirror, kind="mirror", setting=setting)


def secrets_of(work: OpenProject, run_id: str) -> dict[str, str]:
    """Secrets that the job needs and no file may contain: the login of the mirror."""
    return pass_mirrors({run_id: _mirror(work)})


def _mirror(work: OpenProject) -> str | None:
    return work.settings.fleet.mirror or work.settings.train.run.mirror


def describe_base(base: BaseFolder, options: BundleOptions) -> BundleBase:
    """How the place gets the base."""
    if options.base_there:
        return BundleBase(kind="path", name=base.name, revision=base.revision, path=options.base_there)
    if base.name == EMBEDDED:
        return BundleBase(kind="embedded", name=base.name, revision=base.revision)
    hub_name = parse_hub_name(base.name)
    if hub_name is not None and hub_name.revision and not Path(base.name).is_dir():
        return BundleBase(kind="hub", name=base.name, revision=base.revision)
    if not options.base_travels:
        return BundleBase(kind="path", name=base.name, revision=base.revision, path=base.folder)
    return BundleBase(kind="bundled", name=base.name, revision=base.revision)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """The newest checkpoint that matches its manifest."""
    folder = run_folder / CHECKPOINTS
    for saved in sorted(list_saved(folder), key=lambda saved: saved.step, reverse=True):
        path = folder / step_name(saved.step)
        try:
            verify_checkpoint(path)
        except Corrupted:
            continue
        return path
    return None
