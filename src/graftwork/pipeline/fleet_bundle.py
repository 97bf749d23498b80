"""The training run of a project as a bundle.

In: an open project with a dataset and a plan. Out: a bundle in `.graft/fleet/bundles`, with the newest good
checkpoint of the run if there is one. Takes nothing secret along.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.files.remote import open_url
from graftwork.fleet.bundle import TRAVELLING_SPLITS, BundleParts, build_bundle
from graftwork.grading.checks import GradeCheck
from graftwork.model.base import EMBEDDED, BaseFolder
from graftwork.model.hub import parse_hub_name
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.train import enter_run, make_job
from graftwork.records.base import hide_login
from graftwork.records.errors import Damaged, EnvironmentLacks, UserMistake
from graftwork.records.fleet import Bundle, BundleBase
from graftwork.train.checkpoints.checkpoint import list_saved, step_name, verify_checkpoint
from graftwork.train.run_folder import CHECKPOINTS
from graftwork.train.run_setup import pass_mirrors
from graftwork.train.settings import TrainSettings

MODULE = "graftwork.pipeline.training_worker"


@dataclass(frozen=True)
class BundleOptions:
    """Where a place finds what need not travel, and the limits of the job."""

    base_there: str = ""
    """The folder of the base at the place."""
    base_travels: bool = True
    """Whether a base that is a folder here is copied into the bundle."""
    dataset_there: str = ""
    seconds: float | None = None
    max_usd: float | None = None


@dataclass(frozen=True)
class PackedRun:
    """A bundle on disk, and what it must not contain."""

    folder: Path
    bundle: Bundle
    run_folder: Path
    secrets: dict[str, str]


def pack_run(work: OpenProject, made: StepOutputs, options: BundleOptions) -> PackedRun:
    """Write the bundle of this model's run and enter the run in the store."""
    job = make_job(work, made)
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
        splits=travelling_splits(work.settings.train),
        start_adapter=Path(job.start_adapter) if job.start_adapter else None,
        checkpoint=newest_checkpoint(Path(job.folder)),
        seconds=options.seconds,
        max_usd=options.max_usd,
        mirror=mirror,
    )
    folder, bundle = build_bundle(parts, work.project.state / "fleet" / "bundles")
    return PackedRun(folder, bundle, Path(job.folder), secrets_of(work, job.run_id))


def travelling_splits(train: TrainSettings) -> tuple[str, ...]:
    """The splits that a run reads where it trains. Pure."""
    rollouts = train.rollouts
    prompts = train.objective == "grpo" and rollouts.asks_rows
    return tuple(dict.fromkeys((*TRAVELLING_SPLITS, rollouts.source) if prompts else TRAVELLING_SPLITS))


def find_unpacked(train: TrainSettings, checks: Sequence[GradeCheck] = ()) -> list[str]:
    """The settings of a run that name files which no bundle holds. Pure."""
    if train.objective != "grpo":
        return []
    metrics = {check.name: check.metric for check in checks}
    own = [
        f"train.rewards: {reward.metric}"
        for reward in train.rewards
        if ".py:" in metrics.get(reward.metric, reward.metric)
    ]
    found = ["train.rollouts.environment"] if train.rollouts.environment is not None else []
    if train.rollouts.taskset is not None:
        found.append("train.rollouts.taskset")
    elif not train.rollouts.asks_rows:
        found.append(f"train.rollouts.source: {train.rollouts.source}")
    if train.examine.source is not None:
        found.append(f"train.examine.source: {train.examine.source}")
    return [*found, *own]


def require_packable(work: OpenProject) -> None:
    """Before anything is paid for: the run needs no file of the project that stays here."""
    settings = work.settings
    if found := find_unpacked(settings.train, settings.evaluate.checks):
        raise UserMistake(
            "this run needs files of the project that are not sent along",
            why=f"{', '.join(found)}: a bundle holds base, dataset and checkpoint only",
            fix="train it on this machine with `graft train`, or use built-in rewards and the rl split",
            where=found[0].partition(":")[0],
        )


def require_mirror(work: OpenProject) -> None:
    """Before anything is paid for: the address of the mirror is one. Nothing is asked there."""
    if (mirror := _mirror(work)) is None:
        return
    setting = "fleet.mirror" if work.settings.fleet.mirror else "train.run.mirror"
    # A package that is missing here may be there.
    with suppress(EnvironmentLacks):
        open_url(mirror, kind="mirror", setting=setting)


def secrets_of(work: OpenProject, run_id: str) -> dict[str, str]:
    """What the job needs and no file may hold: the login of the mirror."""
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
    """The newest checkpoint with the bytes that its manifest names."""
    folder = run_folder / CHECKPOINTS
    for saved in sorted(list_saved(folder), key=lambda saved: saved.step, reverse=True):
        path = folder / step_name(saved.step)
        try:
            verify_checkpoint(path)
        except Damaged:
            continue
        return path
    return None
